"""What the tests of the model share: a small model of every family, and how far two may differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.model import EchoConfig, EchoLM, EchoState

SHRUNK = [
    "echo-50m",
    "echo-50m-paper",
    "mamba2-50m",
    "mamba2-ska-swiglu-50m",
    "mamba2-attention-50m",
    "mamba3-50m",
    "transformer-50m",
    "echo-50m, fading, convolved, late",
]
AS_THEY_ARE = [
    "synthetic-ssm",
    "synthetic-attention",
    "synthetic-ska",
    "synthetic-ska-paper",
    "mamba3-tool",
    "mamba3-cg-ska-tool",
    "mamba3-cot",
    "mamba3-cg-ska-cot",
]
FAMILIES = SHRUNK + AS_THEY_ARE
RECURRENT = [name for name in SHRUNK if not ("attention" in name or "transformer" in name)]

TOLERATED = 16
"""Roundings a block may show in `worst_token`, each as large as `rounding` says."""


def small_config(name: str) -> EchoConfig:
    """Three narrow blocks of a large preset, both kinds of mixer among them; a small preset as it
    is."""
    preset, _, changed = name.partition(", ")
    config = EchoConfig.preset(preset)
    if name in AS_THEY_ARE:
        return config
    if changed:
        changes = {"half_life": 12.0, "conv_kernel": 4, "sees_itself": False}
        config = replace(config, ska=replace(config.ska, **changes))
    return replace(
        config,
        dim=32,
        heads=2,
        vocab_size=61,
        mixers=config.mixers[2:5],
        mlp_hidden=64,
        ska=replace(config.ska, rank=12, chunk_size=8),
        mamba2=replace(config.mamba2, state_dim=8, head_dim=16),
        mamba3=replace(config.mamba3, state_dim=8, head_dim=16),
    )


def wake(model: EchoLM) -> EchoLM:
    """Give SKA's output projections, zero at the start, random weights: else no test could fail."""
    for module in model.modules():
        if isinstance(module, SpectralKoopmanAttention):
            torch.nn.init.normal_(module.out_proj.weight, std=module.dim**-0.5)
    return model


def small_model(name: str, dtype: torch.dtype = torch.float64, *, grad: bool = False) -> EchoLM:
    return wake(EchoLM(small_config(name))).to(dtype).requires_grad_(grad)


def random_tokens(model: EchoLM, *shape: int) -> Tensor:
    return torch.randint(model.config.vocab_size, shape)


def read(model: EchoLM, tokens: Tensor, state: EchoState | None = None) -> EchoState:
    """The state after some tokens."""
    after = model(tokens, state=state, return_state=True).state
    assert after is not None
    return after


def in_pieces(
    model: EchoLM, tokens: Tensor, cuts: list[int], state: EchoState | None = None
) -> tuple[Tensor, EchoState]:
    logits = []
    for begin, end in pairwise([0, *cuts, tokens.shape[1]]):
        out = model(tokens[:, begin:end], state=state, return_state=True)
        state = out.state
        logits.append(out.logits)
    assert state is not None
    return torch.cat(logits, 1), state


def random_cuts(tokens: int, pieces: int) -> list[int]:
    return sorted((torch.randperm(tokens - 1)[: pieces - 1] + 1).tolist())


def rounding(config: EchoConfig, dtype: torch.dtype) -> float:
    """One rounding at the end of every block.

    Inside SKA, fp32 or fp64 in any case, rounding grows like a key's energy over the ridge. In bf16
    that is drowned by the rounding of what goes in and out.
    """
    grows = 1.0
    if any("ska" in mixer for mixer in config.mixers) and dtype != torch.bfloat16:
        ridge = config.ska.ridge if config.ska.relative_ridge else 0.03
        assert ridge is not None
        grows = 1 / ridge
    return len(config.mixers) * grows * torch.finfo(dtype).eps


def worst_token(got: Tensor, wanted: Tensor) -> float:
    """Error of the logits of the worst token, relative to logits as they usually are."""
    got, wanted = got.detach().double(), wanted.detach().double()
    usual = wanted.square().sum(-1).mean().sqrt()
    return float((got - wanted).norm(dim=-1).max() / usual)


def assert_close(got: Tensor, wanted: Tensor, config: EchoConfig) -> None:
    """Equal but for the order of summation, in the precision of `got`."""
    assert worst_token(got, wanted) <= TOLERATED * rounding(config, got.dtype)


def assert_same_state(got: EchoState, wanted: EchoState) -> None:
    """Bitwise."""
    ours, theirs = got.to_dict(), wanted.to_dict()
    assert ours.keys() == theirs.keys()
    for name, entry in theirs.items():
        same = torch.equal(ours[name], entry) if isinstance(entry, Tensor) else ours[name] == entry
        assert same, name


@contextmanager
def refused(*words: object) -> Iterator[None]:
    """A ValueError of one sentence in which all of these words occur."""
    with pytest.raises(ValueError, match=r"[.?]$") as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message


def padded(kind: str, rows: int, time: int) -> Tensor:
    """An attention mask; the last row has no padding."""
    mask = torch.ones(rows, time, dtype=torch.int64)
    for row in range(rows - 1):
        n = 2 * row + 3
        if kind == "left":
            mask[row, :n] = 0
        elif kind == "right":
            mask[row, -n:] = 0
        else:
            mask[row, torch.randperm(time)[:n]] = 0
    return mask
