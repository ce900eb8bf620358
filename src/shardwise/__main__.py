"""``python -m shardwise``: the command line, where its script is not on the path."""

from __future__ import annotations

from runpy import run_module

if __name__ == "__main__":
    run_module("shardwise.cli", run_name="__main__", alter_sys=True)
