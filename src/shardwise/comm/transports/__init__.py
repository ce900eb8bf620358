"""Implementations of the protocol, side by side."""
