"""Matrix products inside Triton kernels, split as far as their precision asks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mm(
    a, b, PRECISION: tl.constexpr, A_EXACT: tl.constexpr = False, B_EXACT: tl.constexpr = False,
    A_T: tl.constexpr = False, B_T: tl.constexpr = False,
):  # fmt: skip
    """a @ b in fp32, either transposed. "bf16x3" splits each tile in two, unless bf16 holds it
    exactly."""
    if PRECISION == "bf16x3":
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        product = dot(a_high, b_high, A_T, B_T)
        if not A_EXACT:
            product += dot((a - a_high.to(tl.float32)).to(tl.bfloat16), b_high, A_T, B_T)
        if not B_EXACT:
            product += dot(a_high, (b - b_high.to(tl.float32)).to(tl.bfloat16), A_T, B_T)
        return product
    elif PRECISION == "bf16":
        return dot(a.to(tl.bfloat16), b.to(tl.bfloat16), A_T, B_T)
    else:
        return dot(a.to(tl.float32), b.to(tl.float32), A_T, B_T, PRECISION)


@triton.jit
def dot(a, b, A_T: tl.constexpr, B_T: tl.constexpr, PRECISION: tl.constexpr = None):
    """Transposed last of all: a matrix met both ways then lies in shared memory only once."""
    if A_T:
        a = tl.trans(a)
    if B_T:
        b = tl.trans(b)
    return tl.dot(a, b, input_precision=PRECISION)
