"""shardwise: fully sharded data-parallel training that can be planned, read and trusted."""
