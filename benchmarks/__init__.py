"""Side by side against what exists: one package per question, run as ``python -m benchmarks``."""
