"""Tests of ``shardwise.hf``."""
