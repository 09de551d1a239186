"""What the exact chunk form costs, in multiply-adds of one head (derived in ops/ska/README.md)."""

from __future__ import annotations


def exact_chunk_products(rank: int, value_dim: int, order: int, size: int) -> int:
    """Matrix products for a chunk of `size` tokens, its sums included."""
    r, P, S, K = rank, value_dim, size, order
    sums = 2 * S * r**2 + S * r * P
    whitening = 3 * S * r**2 + 2 * r**3 + P * r**2
    inverse_rows = 2 * S**2 * r
    inverses = (K + 1) * 2 * S**2 * r
    steps = K * (S * r**2 + 2 * S**2 * r)
    values = S * r * P + S**2 * (r + P)
    return sums + whitening + inverse_rows + inverses + steps + values


def exact_chunk_factors(rank: int, size: int) -> int:
    """Two Cholesky factors, n^3 / 6 each, and their inverses by triangular solves, n^3 / 2 each."""
    return 2 * (rank**3 + size**3) // 3


def solve_every_token(rank: int, value_dim: int, order: int) -> int:
    """What "T separate operator estimates" would take for each token: sums, factor, solves, reads.

    A Cholesky factor (r^3 / 6), and for one query K + 1 pairs of triangular solves, K products with
    M and one with C. Fewer than the exact chunk form's up to r = 83 (K = 2, P = 64, any S): what
    that form gains there is that its work comes as products of matrices.
    """
    r, P, K = rank, value_dim, order
    return 2 * r**2 + r * P + r**3 // 6 + (2 * K + 1) * r**2 + r * P
