"""What an Echo model is made of. Free of torch, so that reading a configuration is instant."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from echo_lm.settings import build, is_number, one_of, positive, share, whole

Mixer = Literal["ska", "mamba2", "mamba3", "delta", "attention", "mamba3+ska"]
MLP = Literal["koopman", "koopman-gated", "swiglu", "none"]

MODEL_TYPE = "echo"
BESIDE = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
)
"""What transformers notes in the same file; it says nothing of what the model is made of."""


@dataclass(frozen=True)
class SKAConfig:
    """Settings of `SpectralKoopmanAttention`, which describes them."""

    rank: int = 48
    filter: Literal["bank", "power"] = "bank"
    order: int = 2
    causal: Literal["exact", "chunk", False] = "exact"
    chunk_size: int = 64
    ridge: float | None = None
    relative_ridge: Literal[False, True, "trace"] = False
    eta: float = 1.5
    lift: int = 0
    half_life: float | tuple[float, ...] | None = None
    conv_kernel: int = 0
    conv_silu: bool = True
    key_norm: bool = False
    sees_itself: bool = True
    tied_start: bool = False

    def __post_init__(self) -> None:
        whole(self, "rank", "chunk_size")
        whole(self, "order", "lift", "conv_kernel", least=0)
        positive(self, "eta")
        one_of(self, "filter", "bank", "power")
        one_of(self, "causal", "exact", "chunk", False)
        one_of(self, "relative_ridge", False, True, "trace")
        one_of(self, "conv_silu", False, True)
        one_of(self, "key_norm", False, True)
        one_of(self, "sees_itself", False, True)
        one_of(self, "tied_start", False, True)
        if self.ridge is not None:
            positive(self, "ridge")
        self._check_half_life()
        if self.lift % 2:
            raise ValueError(f"lift must be 0 or an even width, got {self.lift}.")
        if self.relative_ridge and self.causal == "exact":
            raise ValueError(
                f'relative_ridge={self.relative_ridge!r} needs causal="chunk" or False, got '
                '"exact", which takes an absolute ridge.'
            )
        if self.half_life is not None and self.causal is False:
            raise ValueError(
                f'half_life={self.half_life} needs causal="exact" or "chunk", got False, in which '
                "no token is older than another."
            )
        if not self.sees_itself and self.causal != "exact":
            raise ValueError(
                f'sees_itself=False needs causal="exact", got {self.causal!r}, in which a token '
                "sees all of a chunk or nothing."
            )

    def _check_half_life(self) -> None:
        """One number, several, or none; JSON has lists."""
        given: Any = self.half_life
        if given is None:
            return
        lives = tuple(given) if isinstance(given, list | tuple) else (given,)
        if isinstance(given, list):
            object.__setattr__(self, "half_life", lives)
        if not lives or not all(is_number(life) and 0 < life < math.inf for life in lives):
            raise ValueError(
                f"half_life must be a positive number or several, got {self.half_life!r}."
            )


@dataclass(frozen=True)
class Mamba2Config:
    """Settings of `Mamba2`, which describes them."""

    state_dim: int = 64
    head_dim: int = 64
    expand: int = 2
    groups: int = 1
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        whole(self, *(f.name for f in fields(self)))


@dataclass(frozen=True)
class Mamba3Config:
    """Settings of `Mamba3`, which describes them."""

    state_dim: int = 64
    head_dim: int = 64
    expand: int = 2
    rank: int = 1
    rope_fraction: float = 0.5
    gate: bool = True
    conv_kernel: int = 0

    def __post_init__(self) -> None:
        whole(self, "state_dim", "head_dim", "expand", "rank")
        whole(self, "conv_kernel", least=0)
        one_of(self, "gate", False, True)
        if not is_number(self.rope_fraction) or not 0 <= self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction must lie between 0 and 1, got {self.rope_fraction!r}.")


@dataclass(frozen=True)
class DeltaConfig:
    """Settings of `DeltaNet`, which describes them."""

    key_dim: int | None = None
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        whole(self, "conv_kernel")
        if self.key_dim is not None:
            whole(self, "key_dim")


PARTS = {
    "ska": SKAConfig,
    "mamba2": Mamba2Config,
    "mamba3": Mamba3Config,
    "delta": DeltaConfig,
}
"""Settings of one kind of layer, by the name of their field."""


@dataclass(frozen=True)
class EchoConfig:
    """A stack of blocks, each a sequence mixer and a feed-forward layer."""

    dim: int
    """Width of the residual stream."""
    mixers: tuple[Mixer, ...]
    """The sequence layer of each block; "mamba3+ska" is one after the other."""
    vocab_size: int = 32_000
    heads: int = 12
    """Heads of SKA, attention and the delta rule."""
    mlp: MLP = "koopman"
    mlp_hidden: int | None = None
    """Hidden width of the feed-forward layer; 8/3 dim rounded up to 64s if None."""
    tie_embeddings: bool = True
    embedding_dropout: float = 0.0
    """Share of the embeddings' numbers that are left out at random in training."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    ska: SKAConfig = field(default_factory=SKAConfig)
    mamba2: Mamba2Config = field(default_factory=Mamba2Config)
    mamba3: Mamba3Config = field(default_factory=Mamba3Config)
    delta: DeltaConfig = field(default_factory=DeltaConfig)

    def __post_init__(self) -> None:
        whole(self, "dim", "vocab_size", "heads")
        positive(self, "norm_eps", "rope_theta")
        share(self, "embedding_dropout")
        if not isinstance(self.mixers, list | tuple) or not self.mixers:
            raise ValueError(
                f"mixers must list the sequence layer of at least one block, got {self.mixers!r}."
            )
        object.__setattr__(self, "mixers", tuple(self.mixers))
        for mixer in self.mixers:
            if mixer not in get_args(Mixer):
                known = ", ".join(get_args(Mixer))
                raise ValueError(f"mixers may hold {known}; got {mixer!r}.")
        one_of(self, "mlp", *get_args(MLP))
        one_of(self, "tie_embeddings", False, True)
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got {self.dim} and {self.heads}.")
        if self.mlp_hidden is not None:
            whole(self, "mlp_hidden")
        for name, part in PARTS.items():
            if not isinstance(getattr(self, name), part):
                raise ValueError(f"{name} must be a {part.__name__}, got {getattr(self, name)!r}.")

    @classmethod
    def preset(cls, name: str) -> EchoConfig:
        """A configuration by name; `presets()` lists them."""
        from echo_lm.model.presets import PRESETS

        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; there are {', '.join(PRESETS)}.")
        return PRESETS[name]

    @classmethod
    def presets(cls) -> list[str]:
        from echo_lm.model.presets import PRESETS

        return list(PRESETS)

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, **asdict(self), "mixers": list(self.mixers)}

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> EchoConfig:
        entries = dict(entries)
        kind = entries.pop("model_type", MODEL_TYPE)
        if kind != MODEL_TYPE:
            raise ValueError(
                f"This is the configuration of a {kind!r} model, not of an Echo model."
            )
        entries = {name: entry for name, entry in entries.items() if name not in BESIDE}
        for name, part in PARTS.items():
            if name in entries:
                entries[name] = build(part, entries[name], f"{name}.")
        return build(cls, entries, "")

    def save(self, path: str | Path) -> None:
        """Write the configuration as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> EchoConfig:
        """Read a configuration written by `save`."""
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"There is no configuration at {path}.") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a JSON configuration: {error}.") from None
        if not isinstance(entries, dict):
            raise ValueError(f"{path} must hold a JSON object, not a {type(entries).__name__}.")
        return cls.from_dict(entries)
