"""Checkpoints looked at, compared and rewritten in other formats. Nothing here needs a model.

Read in this order: ``catalogue`` (what a checkpoint holds), ``difference`` (where two differ),
``export`` (safetensors again: merged, split or cast), ``pickled`` (one file of ``torch.save``),
``foreign`` and ``normalize`` (what a checkpoint of torch holds), ``dcp_import`` and ``dcp_export``.
"""
