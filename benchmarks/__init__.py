"""What README.md says of a CPU: `python -m benchmarks [NAME...]` writes `results/cpu/NAME.json`."""
