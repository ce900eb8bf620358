"""What this machine has, and whether the engine is right on it: `shardwise doctor`."""
