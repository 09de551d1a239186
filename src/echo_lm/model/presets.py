"""Models by name: the paper's, ours, and the baselines of equal size they are compared with.

`*-paper` is the paper's operator: the power filter of order 2, chunk causality, a relative ridge.
Ours differs in the operator alone: exact causality, the filter bank, a learned ridge. Baselines
share width and depth, and take the MLP width that brings them to Echo's number of parameters.
"""

from __future__ import annotations

from dataclasses import replace

from echo_lm.model.config import EchoConfig, Mamba2Config, Mamba3Config, Mixer, SKAConfig


def _stack(
    depth: int, usual: Mixer, special: Mixer = "ska", at: tuple[int, ...] = ()
) -> tuple[Mixer, ...]:
    return tuple(special if layer in at else usual for layer in range(depth))


def _paper(config: EchoConfig) -> EchoConfig:
    """The same model with the paper's operator."""
    ska = replace(config.ska, filter="power", causal="chunk", ridge=1e-3, relative_ridge=True)
    return replace(config, ska=ska)


def _language_models(
    size: str, echo: EchoConfig, at: tuple[int, ...], hidden: dict[str, int]
) -> dict[str, EchoConfig]:
    """Echo at one size, and its baselines with the MLP widths given."""
    depth = len(echo.mixers)

    def baseline(name: str, mixers: tuple[Mixer, ...]) -> EchoConfig:
        return replace(echo, mlp="swiglu", mlp_hidden=hidden[name], mixers=mixers)

    return {
        f"echo-{size}": echo,
        f"echo-{size}-paper": _paper(echo),
        f"mamba2-ska-swiglu-{size}": baseline("mamba2-ska-swiglu", echo.mixers),
        f"mamba2-{size}": baseline("mamba2", _stack(depth, "mamba2")),
        f"mamba2-attention-{size}": baseline(
            "mamba2-attention", _stack(depth, "mamba2", "attention", at)
        ),
        f"mamba3-{size}": baseline("mamba3", _stack(depth, "mamba3")),
        f"transformer-{size}": baseline("transformer", _stack(depth, "attention")),
    }


def _synthetic(*mixers: Mixer) -> EchoConfig:
    """The paper's trio of about a million parameters: B and C for each head, embeddings apart."""
    return EchoConfig(
        dim=128,
        mixers=mixers,
        vocab_size=128,
        heads=4,
        mlp="swiglu",
        tie_embeddings=False,
        ska=SKAConfig(rank=24),
        mamba2=Mamba2Config(state_dim=16, groups=4),
    )


def _appendix(heads: int, depth: int) -> EchoConfig:
    """The appendix's Mamba-3: no gate, a short convolution on the values, about 400K parameters."""
    head_dim = 96 // heads
    return EchoConfig(
        dim=96,
        mixers=_stack(depth, "mamba3"),
        vocab_size=128,
        heads=heads,
        mlp="swiglu",
        mamba3=Mamba3Config(state_dim=16, head_dim=head_dim, expand=1, gate=False, conv_kernel=4),
    )


def _with_cg_ska(config: EchoConfig, eta: float) -> EchoConfig:
    """SKA on lifted rotary keys added to the last two blocks."""
    mixers = (*config.mixers[:-2], "mamba3+ska", "mamba3+ska")
    ska = SKAConfig(rank=24, eta=eta, lift=16)
    return _paper(replace(config, mixers=mixers, ska=ska))


_ECHO_180M = EchoConfig(
    dim=768,
    mixers=_stack(24, "mamba2", "ska", (8, 16)),
    heads=12,
    ska=SKAConfig(rank=48),
)
_ECHO_50M = EchoConfig(
    dim=448,
    mixers=_stack(16, "mamba2", "ska", (3, 7, 11, 15)),
    heads=7,
    ska=SKAConfig(rank=56),
)
_SYNTHETIC_SKA = _synthetic("mamba2", "mamba2", "ska", "ska")
_TOOL, _COT = _appendix(heads=3, depth=3), _appendix(heads=4, depth=4)

PRESETS: dict[str, EchoConfig] = {
    **_language_models(
        "180m",
        _ECHO_180M,
        (8, 16),
        {
            "mamba2-ska-swiglu": 1344,
            "mamba2": 1280,
            "mamba2-attention": 1344,
            "mamba3": 1280,
            "transformer": 1856,
        },
    ),
    **_language_models(
        "50m",
        _ECHO_50M,
        (3, 7, 11, 15),
        {
            "mamba2-ska-swiglu": 832,
            "mamba2": 704,
            "mamba2-attention": 832,
            "mamba3": 704,
            "transformer": 1088,
        },
    ),
    "synthetic-ssm": _synthetic("mamba2", "mamba2", "mamba2", "mamba2"),
    "synthetic-attention": _synthetic("mamba2", "mamba2", "attention", "attention"),
    "synthetic-ska": _SYNTHETIC_SKA,
    "synthetic-ska-paper": _paper(_SYNTHETIC_SKA),
    "mamba3-tool": _TOOL,
    "mamba3-cg-ska-tool": _with_cg_ska(_TOOL, eta=1.5),
    "mamba3-cg-ska-tool-strong": _with_cg_ska(_TOOL, eta=2.5),
    "mamba3-cot": _COT,
    "mamba3-cg-ska-cot": _with_cg_ska(_COT, eta=1.5),
    "mamba3-cg-ska-cot-strong": _with_cg_ska(_COT, eta=2.5),
}
