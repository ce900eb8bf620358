"""Waits that end or are explained, and settings that differ between ranks."""
