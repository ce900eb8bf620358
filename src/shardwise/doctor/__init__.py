"""A report on this machine, and tests of the engine on it: `shardwise doctor`."""
