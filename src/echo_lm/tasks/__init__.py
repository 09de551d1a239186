"""Synthetic recall tasks, one family a file."""
