"""Once per model: its values, its order, its shards."""
