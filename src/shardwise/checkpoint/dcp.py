"""Conversion from and to ``torch.distributed.checkpoint``: the public names of it.

They live in ``shardwise.convert``; importing them costs the import of ``torch.distributed``.
"""

from __future__ import annotations

from shardwise.convert.dcp_export import export_dcp
from shardwise.convert.dcp_import import import_checkpoint
from shardwise.convert.writer import Converted

__all__ = ["Converted", "export_dcp", "import_checkpoint"]
