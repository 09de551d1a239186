"""How the operators of a model fare: conditioning and filters, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo_lm.analysis.operator import Conditioning, conditioning
from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.layers.ska import LayerState, memory_of
from echo_lm.model.lm import EchoLM
from echo_lm.ops.ska.problem import Relative, relative_scale
from echo_lm.results import rounded


@torch.inference_mode()
def ska_health(
    model: EchoLM, tokens: Tensor, mask: Tensor | None = None, starts: Tensor | None = None
) -> dict[str, Any]:
    """For each SKA layer, by its name, after reading `tokens`: `lambda_min` and `condition` (the
    worst of all rows and heads) of G + ridge I, and of each head the `ridge`, the filter's
    `coefficients` and, where sums fade, the `decay`. Of packed documents it is a row's last."""
    names = {id(module): name for name, module in model.named_modules()}
    # Parameters before the pass: after it, who shares a model may have put them away.
    layers = {i: Layer.of(names[id(m)], m) for i, m in enumerate(model.mixers()) if _recalls(m)}
    if not layers:
        return {}
    was_training = model.training
    model.eval()
    state = model(
        tokens, return_state=True, statistics_mask=mask, logits_to_keep=0, document_starts=starts
    ).state
    model.train(was_training)
    return {layer.name: layer.health(state.layers[i]) for i, layer in layers.items()}


def _recalls(layer: Any) -> bool:
    return isinstance(layer, SpectralKoopmanAttention)


@dataclass(frozen=True)
class Layer:
    """What is to be known of a layer besides its state."""

    name: str
    ridge: Tensor | float
    relative_ridge: Relative
    settings: dict[str, Any]

    @classmethod
    def of(cls, name: str, layer: SpectralKoopmanAttention) -> Layer:
        ridge = layer.ridge
        # Many small matrices: a CPU is done before a GPU has begun.
        ridge = ridge.double().cpu() if isinstance(ridge, Tensor) else ridge
        settings = {"coefficients": _curve(layer.coefficients)}
        if layer.decay is not None:
            settings["decay"] = _curve(layer.decay)
        return cls(name, ridge, layer.relative_ridge, settings)

    def health(self, state: LayerState) -> dict[str, Any]:
        memory = memory_of(state).to("cpu")
        gram = memory.gram.double()
        scale = relative_scale(self.relative_ridge, gram, memory.key_energy.double())
        ridge = self.ridge if isinstance(self.ridge, Tensor) else self.ridge * scale
        ridge = ridge.expand(scale.shape)
        # Sums that are not finite have no eigenvalues; the next step says what is wrong.
        unknown = Conditioning(*[torch.full_like(ridge, torch.nan)] * 2)
        found = conditioning(gram, ridge) if bool(gram.isfinite().all()) else unknown
        return {
            "lambda_min": float(found.smallest.min()),
            "condition": float(found.condition.max()),
            "ridge": _curve(ridge.mean(0)),
            **self.settings,
        }


def _curve(values: Tensor) -> Any:
    """Four digits: curves of these are for reading."""
    nested = values.detach().float().cpu().tolist()
    return [[rounded(c) for c in row] if isinstance(row, list) else rounded(row) for row in nested]
