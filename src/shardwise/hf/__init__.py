"""Language models of ``transformers`` with adapters of ``peft``, sharded.

Read in this order: ``folder`` (a name → files), ``file_map`` (stored tensors → the model's),
``weights`` (byte ranges → shards), ``load`` (all of it).
"""

from __future__ import annotations

from shardwise.hf.load import Changes, LoadedModel, load, on_meta

__all__ = ["Changes", "LoadedModel", "load", "on_meta"]
