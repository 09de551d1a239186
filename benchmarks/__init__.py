"""Benchmarks: `python -m benchmarks [NAME...]` measures and writes `results/cpu/NAME.json`."""
