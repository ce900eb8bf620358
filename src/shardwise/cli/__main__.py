"""``python -m shardwise.cli``, which is what a launcher starts."""

from __future__ import annotations

from shardwise.cli import main

if __name__ == "__main__":
    main()
