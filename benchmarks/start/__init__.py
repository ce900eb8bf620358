"""From a command to its first training step: where the seconds go."""
