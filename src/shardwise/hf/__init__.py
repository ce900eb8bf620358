"""Language models of ``transformers`` with adapters of ``peft``, sharded.

Read in this order: ``folder`` (a name → files), ``file_map`` (stored tensors → the model's),
``weights`` (byte ranges → shards), ``load`` (all of it).
"""

from __future__ import annotations

from shardwise.hf.load import LoadedModel, load

__all__ = ["LoadedModel", "load"]
