"""Saving and loading a training state, beside what torch has for it."""
