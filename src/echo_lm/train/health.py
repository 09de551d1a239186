"""How the operators of a model fare: conditioning and filters, for the metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echo_lm.analysis.operator import Conditioning, conditioning
from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.layers.ska import LayerState, memory_of
from echo_lm.model.lm import EchoLM
from echo_lm.ops.ska.problem import relative_scale


@torch.inference_mode()
def ska_health(model: EchoLM, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """For each SKA layer, by its name, after reading `tokens`: `lambda_min` and `condition` (the
    worst of all rows and heads) of G + ridge I, and of each head the `ridge`, the filter's
    `coefficients` and, where sums fade, the `decay`."""
    names = {id(module): name for name, module in model.named_modules()}
    found = [(names[id(m)], i, m) for i, m in enumerate(model.mixers()) if _recalls(m)]
    if not found:
        return {}
    state = model(tokens, return_state=True, statistics_mask=mask).state
    return {name: _of_layer(layer, state.layers[i]) for name, i, layer in found}


def _recalls(layer: Any) -> bool:
    return isinstance(layer, SpectralKoopmanAttention)


def _of_layer(layer: SpectralKoopmanAttention, state: LayerState) -> dict[str, Any]:
    # Many small matrices: a CPU is done before a GPU has begun.
    memory = memory_of(state).to("cpu")
    gram = memory.gram.double()
    scale = relative_scale(layer.relative_ridge, gram, memory.key_energy.double())
    ridge = layer.ridge.double().cpu() if isinstance(layer.ridge, Tensor) else layer.ridge * scale
    ridge = ridge.expand(scale.shape)
    # Sums that are not finite have no eigenvalues; the next step says what is wrong.
    unknown = Conditioning(*[torch.full_like(ridge, torch.nan)] * 2)
    found = conditioning(gram, ridge) if bool(gram.isfinite().all()) else unknown
    fading = {} if layer.decay is None else {"decay": _rounded(layer.decay)}
    return {
        "lambda_min": float(found.smallest.min()),
        "condition": float(found.condition.max()),
        "ridge": _rounded(ridge.mean(0)),
        "coefficients": _rounded(layer.coefficients),
        **fading,
    }


def _rounded(values: Tensor) -> Any:
    """Four digits: curves of these are for reading."""
    nested = values.detach().float().cpu().tolist()
    return [[_four(c) for c in row] if isinstance(row, list) else _four(row) for row in nested]


def _four(value: float) -> float:
    return float(f"{value:.4g}")
