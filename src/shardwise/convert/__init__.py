"""Checkpoints looked at and rewritten in other formats. Nothing here needs a model.

Read in this order: ``catalogue`` (what a checkpoint holds), ``writer`` and ``export`` (safetensors
again: merged, split or cast; one file of ``torch.save``), ``dcp_export``; ``torch_reader``,
``normalize`` and ``dcp_import`` (the way back).
"""
