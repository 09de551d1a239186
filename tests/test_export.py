"""A model to pass on is the checkpoint without what only training needs."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from echo_lm.data.tokenise import tokenizer_of
from echo_lm.export import run
from echo_lm.model import EchoLM

from .model.families import small_config, wake
from .test_cli import echo_lm


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000001"
    torch.manual_seed(0)
    wake(EchoLM(small_config("echo-50m"))).save_pretrained(folder)
    (folder / "optimiser.safetensors").write_bytes(b"moments")
    (folder / "run.json").write_text("{}")
    return folder


def test_only_the_model_is_passed_on(checkpoint: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    run(checkpoint, tmp_path / "out", dtype=None, console=Console(file=said, width=200))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1
    size = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert f"{size:,} bytes" in said.getvalue()
    before, after = (EchoLM.from_pretrained(f) for f in (checkpoint, tmp_path / "out"))
    assert before.config == after.config
    torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)


def test_weights_may_be_narrower(checkpoint: Path, tmp_path: Path) -> None:
    done = echo_lm("export", str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}
    wide = EchoLM.from_pretrained(checkpoint).to(torch.bfloat16)
    narrow = EchoLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(narrow.state_dict(), wide.state_dict(), rtol=0, atol=0)


def test_its_tokenizer_goes_along(checkpoint: Path, tokenizer: Path, tmp_path: Path) -> None:
    shutil.copyfile(tokenizer, checkpoint / "tokenizer.json")
    run(checkpoint, tmp_path / "out", dtype=None, console=Console(quiet=True))
    assert tokenizer_of(tmp_path / "out", None, 10**6).encode("a river").ids


def test_a_folder_in_use_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(ValueError, match=r"out is not empty: choose another folder"):
        run(checkpoint, tmp_path / "out", dtype=None, console=Console(quiet=True))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
