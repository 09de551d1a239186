"""Keys divided by the largest of them (Appendix E)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def largest_norm(keys: Float[Tensor, "*b t r"]) -> Float[Tensor, "*b"]:
    """m = max_t |k_t|, at least 1e-6 as in the paper.

    Dividing keys and queries by m and adding eps I is the same map as a ridge of eps m^2.
    """
    return keys.norm(dim=-1).amax(-1).clamp_min(1e-6)


def sequence_max(keys: Float[Tensor, "*b t r"]) -> Float[Tensor, "*b t r"]:
    """k_t / m: no key is longer than 1, so |G|_F, tr G and lambda_max(G) are at most T (E.1)."""
    return keys / largest_norm(keys)[..., None, None]
