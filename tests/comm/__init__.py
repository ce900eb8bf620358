"""Tests of shardwise.comm, file by file."""
