"""Benchmarks: whole processes, in turn, as ratios within one run."""
