"""What the front door hands to every form once it has checked and prepared its arguments."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
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
    starts: Bool[Tensor, "b t"] | None = None
    """Tokens before which all is forgotten."""

    def before(self, t: int, S: Float[Tensor, "b h p r"]) -> Float[Tensor, "b h p r"]:
        """What token t finds of what the token before it left."""
        if self.starts is None:
            return S
        return S.masked_fill(self.starts[:, t, None, None, None], 0)
