"""``shard()``, and the handle that it returns."""
