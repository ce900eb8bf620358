r"""Sharding configurations of other libraries: read, accounted for, and written.

    report = read(json.load(file))                 # the dialect is guessed from the keys
    print(*report.entries, sep="\n")               # each key once
    sw.shard(model, **shard_arguments(report))     # as arguments
    write(report.policy, "accelerate").tree        # the same, as Accelerate's file has it

A dialect is a table, a file in ``tables``. ``policy`` is what all of them mean, ``rows`` reads the
tables, ``contradictions`` knows what does not go together, ``interpret`` reads and writes.
"""

from shardwise.dialects.arguments import shard_arguments
from shardwise.dialects.interpret import Entry, Report, Written, guess, is_of_trainer, read, write
from shardwise.dialects.policy import Policy
from shardwise.dialects.rows import DIALECTS

__all__ = [
    "DIALECTS",
    "Entry",
    "Policy",
    "Report",
    "Written",
    "guess",
    "is_of_trainer",
    "read",
    "shard_arguments",
    "write",
]
