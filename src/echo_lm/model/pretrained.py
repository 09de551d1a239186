"""Models on disk: `config.json` beside `model.safetensors`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo_lm.model.boxed import model_folder
from echo_lm.model.config import EchoConfig

if TYPE_CHECKING:
    from echo_lm.model.lm import EchoLM

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TIED = "head.weight"


def save_pretrained(
    config: EchoConfig, weights: Mapping[str, Tensor], directory: str | Path
) -> None:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: t.detach().contiguous()
        for name, t in weights.items()
        if not (config.tie_embeddings and name == TIED)
    }
    config.save(directory / CONFIG_FILE)
    # Renamed when complete, so that a full disk does not cost the weights of an earlier save.
    unfinished = directory / f"{WEIGHTS_FILE}.unfinished"
    save_file(weights, unfinished, metadata={"format": "pt"})
    # safetensors writes for nobody but the owner; who may read the configuration may read these.
    shutil.copymode(directory / CONFIG_FILE, unfinished)
    unfinished.replace(directory / WEIGHTS_FILE)


def load_pretrained(
    cls: type[EchoLM],
    directory: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> EchoLM:
    directory = model_folder(directory)
    config = EchoConfig.load(directory / CONFIG_FILE)
    weights = _read_weights(directory / WEIGHTS_FILE)
    model = cls(config)
    wanted = model.state_dict()
    if config.tie_embeddings:
        del wanted[TIED]
    _check_weights(weights, wanted, directory / WEIGHTS_FILE)
    if config.tie_embeddings:
        weights[TIED] = weights["embedding.weight"]
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weights[name].dtype)
    model.load_state_dict(weights)
    return model.to(device=device, dtype=dtype)


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"There are no weights at {path}.") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file, or is cut short: {error}.") from None


def _check_weights(got: dict[str, Tensor], wanted: dict[str, Tensor], path: Path) -> None:
    missing, unknown = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [
            f"holds {_some(unknown)}, which the model does not have"
        ] * bool(unknown)
        raise ValueError(f"{path} does not fit its config.json: it {' and '.join(parts)}.")
    for name, tensor in wanted.items():
        if got[name].shape != tensor.shape:
            raise ValueError(
                f"{path} does not fit its config.json: {name} is {list(got[name].shape)} in the "
                f"file and {list(tensor.shape)} in the model."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
