"""What the front door hands to every form once it has checked and prepared its arguments."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """One call of the delta rule, in fp32 or fp64.

    Padding at the end of a row is zero everywhere and so leaves S as it is.
    """

    q: Float[Tensor, "b t h r"]
    k: Float[Tensor, "b t h r"]
    v: Float[Tensor, "b t h p"]
    beta: Float[Tensor, "b t h"]
    S: Float[Tensor, "b h p r"]
    chunk_size: int
