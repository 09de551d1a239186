"""The Clebsch-Gordan lift (Appendix B): features of a rotated key that forget its rotation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Keeps the slope finite at k = 0; keys whose pairs are well above its root, 1e-3, do not feel it.
NORM_FLOOR = 1e-6


def clebsch_gordan(k: Float[Tensor, "*b n"]) -> Float[Tensor, "*b features"]:
    """`[|k_j|^2; Re(k_j^2); Im(k_j^2)]` for the complex pairs k_j = (2j, 2j+1).

    Rotating pair j by an angle leaves its first feature as it is and turns the other two by twice
    the angle.
    """
    re, im = torch.unflatten(k, -1, (-1, 2)).unbind(-1)
    return torch.cat((re * re + im * im, re * re - im * im, 2 * re * im), -1)


class ClebschGordanLift(nn.Module):
    """Map keys (or queries) of width `dim`, rotated by position, to SKA features of width `rank`.

    Each head has its own projection Phi from the 3 dim / 2 features of `clebsch_gordan`,
    orthogonal at the start.

    The features are of degree 2: a key twice as large would weigh four times as much in its
    features and sixteen times in a Gram matrix. With `normalize` they are divided by the root mean
    square modulus of the key's pairs, which no rotation changes. Then they grow like the key
    (sqrt(2) |k| <= |features| <= sqrt(dim) |k|) and a pair of average modulus keeps its modulus.
    Both value and gradient are zero at k = 0. `normalize=False` is the paper's raw map.
    """

    def __init__(self, dim: int, *, rank: int, heads: int, normalize: bool = True) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"dim is {dim}, but the lift takes complex pairs: it must be even.")
        if rank < 1 or heads < 1:
            raise ValueError(f"rank is {rank} and heads is {heads}, but both must be at least 1.")
        self.normalize = normalize
        phi = [nn.init.orthogonal_(torch.empty(rank, 3 * dim // 2)) for _ in range(heads)]
        self.phi = nn.Parameter(torch.stack(phi))

    def forward(self, k: Float[Tensor, "b t h n"]) -> Float[Tensor, "b t h r"]:
        heads, _, features = self.phi.shape
        if k.shape[-2:] != (heads, 2 * features // 3):
            raise ValueError(
                f"k has shape {tuple(k.shape)}, but this lift takes [batch, time, heads, width] "
                f"with {heads} heads of width {2 * features // 3}."
            )
        with torch.autocast(k.device.type, enabled=False):
            dtype = torch.promote_types(k.dtype, torch.float32)
            psi = self._features(k.to(dtype))
            return torch.einsum("bthf,hrf->bthr", psi, self.phi.to(dtype)).to(k.dtype)

    def _features(self, k: Float[Tensor, "b t h n"]) -> Float[Tensor, "b t h features"]:
        features = clebsch_gordan(k)
        if not self.normalize:
            return features
        mean_square = features[..., : k.shape[-1] // 2].mean(-1, keepdim=True)
        return features * (mean_square + NORM_FLOOR).rsqrt()
