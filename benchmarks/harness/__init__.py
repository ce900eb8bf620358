"""What all benchmarks share: ranks, rounds, memory, tables, plots and report files."""
