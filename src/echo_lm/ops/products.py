"""Matrix products inside Triton kernels, split as far as their precision asks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mm(a, b, PRECISION: tl.constexpr, A_EXACT: tl.constexpr = False, B_EXACT: tl.constexpr = False):
    """a @ b in fp32. "bf16x3" splits each tile in two, unless bf16 holds it exactly."""
    if PRECISION == "bf16x3":
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        product = tl.dot(a_high, b_high)
        if not A_EXACT:
            product = tl.dot((a - a_high.to(tl.float32)).to(tl.bfloat16), b_high, product)
        if not B_EXACT:
            product = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.bfloat16), product)
        return product
    elif PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
