"""What can be wrong with a call of the scan, each in one sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from echo_lm.ops.checks import debugging
from echo_lm.ops.ssd.state import SSDState


def check_inputs(x: Tensor, B: Tensor, C: Tensor, angle: Tensor | None, **scalars: Tensor) -> None:
    """Shapes; `scalars` have one entry for each token and head."""
    if x.dim() not in (4, 5) or 0 in x.shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but it must be [batch, time, heads, width] or "
            "[batch, time, heads, rank, width], no axis empty."
        )
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, but it must be a floating point one.")
    if B.dim() != x.dim() or B.shape[:2] != x.shape[:2] or B.shape[3:-1] != x.shape[3:-1]:
        raise ValueError(
            f"B has shape {tuple(B.shape)}, but for x of shape {tuple(x.shape)} it must be "
            f"{[*x.shape[:2], 'groups', *x.shape[3:-1], 'state_dim']}."
        )
    if C.shape != B.shape:
        raise ValueError(
            f"C has shape {tuple(C.shape)} and B has {tuple(B.shape)}, but they must be equal."
        )
    heads, groups = x.shape[2], B.shape[2]
    if groups == 0 or heads % groups:
        raise ValueError(f"x has {heads} heads, which B and C in {groups} groups cannot share.")
    for name, value in scalars.items():
        if value.shape != x.shape[:3]:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but x asks for {list(x.shape[:3])}: "
                "one number for each token and head."
            )
    if angle is not None:
        check_angle(angle, x, B)


def check_angle(angle: Tensor, x: Tensor, B: Tensor) -> None:
    if angle.dim() != 4 or angle.shape[:3] != x.shape[:3] or angle.shape[3] == 0:
        raise ValueError(
            f"angle has shape {tuple(angle.shape)}, but x asks for {[*x.shape[:3], 'angles']}."
        )
    if 2 * angle.shape[3] > B.shape[-1]:
        raise ValueError(
            f"angle turns {angle.shape[3]} pairs of coordinates, but B and C have only "
            f"{B.shape[-1]} coordinates."
        )


def check_lengths(lengths: Tensor | None, x: Tensor) -> None:
    if lengths is None:
        return
    if lengths.shape != x.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)} and dtype {lengths.dtype}, but it must "
            f"hold {x.shape[0]} integers: one for each row of x."
        )
    if torch.compiler.is_compiling() or (lengths.device.type != "cpu" and not debugging()):
        return  # Looking at the values would wait for the device.
    if bool((lengths < 0).any()) or bool((lengths > x.shape[1]).any()):
        raise ValueError(
            f"lengths is {lengths.tolist()}, but every entry must be between 0 and the "
            f"{x.shape[1]} tokens of x."
        )


def check_starts(starts: Tensor | None, x: Tensor) -> None:
    if starts is not None and (starts.shape != x.shape[:2] or starts.dtype != torch.bool):
        raise ValueError(
            f"starts has shape {tuple(starts.shape)} and dtype {starts.dtype}, but it must be bool "
            f"{list(x.shape[:2])}: whether each token begins anew."
        )


def check_state(state: SSDState, needed: dict[str, tuple[int, ...]]) -> None:
    if not isinstance(state, SSDState):
        raise ValueError(f"state is a {type(state).__name__}, but ssd continues an SSDState.")
    held = {name: tuple(tensor.shape) for name, tensor in state.to_dict().items()}
    if held != needed:
        raise ValueError(
            f"state holds {held}, but this call continues {needed}: pass a state that came from "
            "the same recurrence, or None to begin anew."
        )
