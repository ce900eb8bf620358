"""Checkpoints of others: torch's DCP folders, and FSDP1's pickled files. In, and out.

Read in this order: ``worker`` (the only place where a pickle is opened: a process of its own),
``foreign`` (this process's end of it), ``sorted_out`` (what is what), ``imported`` and ``exported``
(the two acts).
"""

from __future__ import annotations

from shardwise.checkpoint.dcp.exported import export_dcp
from shardwise.checkpoint.dcp.imported import Converted, import_checkpoint

__all__ = ["Converted", "export_dcp", "import_checkpoint"]
