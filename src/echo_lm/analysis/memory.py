"""From which length on a fixed state is smaller than a cache (Proposition I.14)."""

from __future__ import annotations


def state_numbers(rank: int, value_dim: int) -> int:
    """G, M, C, the last key and one scalar of a head, as the paper counts."""
    return 2 * rank**2 + value_dim * rank + rank + 1


def cache_crossover(rank: int, value_dim: int) -> float:
    """Tokens beyond which T (r + P) cached numbers are more than those of a head.

    Numbers, not bytes: the sums are fp32, a cache is usually 16-bit.
    """
    return state_numbers(rank, value_dim) / (rank + value_dim)
