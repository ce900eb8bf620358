"""Programs as users write them, each run plain, with shardwise and with FSDP2, and compared."""
