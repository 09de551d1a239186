"""What the tests of the adapter share: small models of every family, on both sides."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo_lm.hf import EchoForCausalLM
from echo_lm.model import EchoLM

from ..model.families import FAMILIES, SHRUNK, padded, random_tokens, small_model

transformers.utils.logging.disable_progress_bar()

SOME = ["echo-50m", "echo-50m-paper", "mamba2-attention-50m", "mamba3-50m"]
"""Every kind of mixer, both kinds of SKA."""

__all__ = [
    "FAMILIES",
    "SHRUNK",
    "SOME",
    "both",
    "close",
    "left_padded",
    "letters",
    "padded",
    "random_tokens",
    "small_model",
]


def both(
    name: str, folder: Path, dtype: torch.dtype = torch.float64
) -> tuple[EchoLM, EchoForCausalLM]:
    """A model, and what transformers reads of its folder."""
    model = small_model(name, dtype)
    model.save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(theirs, EchoForCausalLM)
    return model.eval(), theirs.eval()


def left_padded(lengths: list[int]) -> Tensor:
    """A mask whose rows end together."""
    places = torch.arange(max(lengths))
    return torch.stack([places >= max(lengths) - length for length in lengths]).long()


def close(got: Tensor, wanted: Tensor) -> None:
    """Equal in fp64 but for the order of summation."""
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def letters(folder: Path) -> None:
    """A tokenizer of 61 printable characters, beside the model that reads them."""
    vocabulary = {chr(ord("@") + i): i for i in range(1, 61)} | {" ": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
