"""Launching the ranks as processes of this machine, and what a launched rank does for it."""
