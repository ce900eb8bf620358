"""Set-up, once per model: its values, its order, its shards."""
