"""What 26 pains of FSDP users, and misuse, come to: with FSDP2, and with shardwise."""
