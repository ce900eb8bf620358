"""Options of ``shard()`` as values: what a user says."""
