"""The language model: embeddings, a stack of blocks, and a head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echo_lm.layers import (
    Attention,
    DeltaNet,
    Mamba2,
    Mamba3,
    SpectralKoopmanAttention,
    SpectralKoopmanMLP,
    SwiGLU,
)
from echo_lm.layers.documents import Documents
from echo_lm.model.config import EchoConfig
from echo_lm.model.generate import GenerationOptions, TokenStream
from echo_lm.model.loss import IGNORED_LABEL, next_token_loss, next_token_loss_in_pieces
from echo_lm.model.padding import Alignment
from echo_lm.model.pretrained import load_pretrained, save_pretrained
from echo_lm.model.state import EchoState
from echo_lm.ops.checks import debugging
from echo_lm.ops.state import TensorState


@dataclass
class EchoOutput:
    logits: Float[Tensor, "b kept vocab"]
    """Of every place, or of the last ones if fewer were asked for."""
    loss: Float[Tensor, ""] | None = None
    """Mean cross-entropy of the next token, over the labels that are not -100."""
    state: EchoState | None = None


@dataclass
class Reading:
    """What the blocks made of a text."""

    hidden: Float[Tensor, "b t d"]
    """Behind the last norm; the head makes logits of it."""
    state: EchoState | None
    stream: tuple[Float[Tensor, "b t d"], ...]
    """What went into each block, if asked for."""


class Block(nn.Module):
    """A sequence layer (or several) and a feed-forward layer, each behind a norm."""

    checkpoint: Callable[..., Any] | None = None
    """Runs a function so that its insides are computed again on the way back, not kept."""

    def __init__(self, config: EchoConfig, kind: str) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(build_mixer(config, one) for one in kind.split("+"))
        self.mixer_norms = nn.ModuleList(
            nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in self.mixers
        )
        self.mlp = build_mlp(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if self.mlp else None

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        states: list[TensorState] | None,
        *,
        lengths: Int[Tensor, " b"] | None,
        statistics_mask: Bool[Tensor, "b t"] | None,
        return_state: bool,
        documents: Documents | None = None,
        in_place: bool = False,
    ) -> tuple[Float[Tensor, "b t d"], list[TensorState]]:
        run = partial(
            self._run,
            lengths=lengths,
            documents=documents,
            statistics_mask=statistics_mask,
            return_state=return_state,
            in_place=in_place,
        )
        if self.checkpoint is None or not (self.training and torch.is_grad_enabled()):
            return run(x, states)
        return self.checkpoint(run, x, states)

    def _run(
        self,
        x: Float[Tensor, "b t d"],
        states: list[TensorState] | None,
        *,
        lengths: Int[Tensor, " b"] | None,
        documents: Documents | None,
        statistics_mask: Bool[Tensor, "b t"] | None,
        return_state: bool,
        in_place: bool,
    ) -> tuple[Float[Tensor, "b t d"], list[TensorState]]:
        new_states = []
        for i, (norm, mixer) in enumerate(zip(self.mixer_norms, self.mixers, strict=True)):
            options: dict[str, Any] = {}
            if isinstance(mixer, SpectralKoopmanAttention):
                options["mask"] = statistics_mask
            if isinstance(mixer, IN_PLACE):
                options["in_place"] = in_place
            y, state = mixer(
                norm(x),
                None if states is None else states[i],
                lengths=lengths,
                documents=documents,
                return_state=return_state,
                **options,
            )
            x = x + y
            new_states.append(state)
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, new_states


class EchoLM(nn.Module):
    """A language model whose memory does not grow.

    >>> model = EchoLM(EchoConfig.preset("synthetic-ska"))
    >>> out = model(input_ids, labels=input_ids)
    >>> out = model(more_ids, state=model(input_ids, return_state=True).state)
    """

    def __init__(self, config: EchoConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, kind) for kind in config.mixers)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._init_weights()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Layers have initialised themselves; what they add to the stream shrinks with depth."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        outputs = [m.out_proj for m in self.modules() if isinstance(m, LAYERS)]
        for out_proj in outputs:
            out_proj.weight.div_(math.sqrt(len(outputs)))

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        labels: Int[Tensor, "b t"] | None = None,
        state: EchoState | None = None,
        return_state: bool = False,
        attention_mask: Int[Tensor, "b t"] | None = None,
        statistics_mask: Bool[Tensor, "b t"] | None = None,
        logits_to_keep: int | None = None,
        document_starts: Bool[Tensor, "b t"] | None = None,
        in_place: bool = False,
    ) -> EchoOutput:
        """Predict the token after each one.

        Args:
            input_ids: Tokens.
            labels: The same tokens; each is the target of the one before it, -100 is none.
            state: Continue after what was read before.
            return_state: Also return the state after the last token.
            attention_mask: 0 at padding, which may lie anywhere and influences nothing.
            statistics_mask: False leaves a token out of SKA's memory (the paper's action mask).
            logits_to_keep: Give the logits of so many last places only. The loss then takes the
                logits in pieces, so that those of a long sequence never exist at once.
            document_starts: True at the first token of a document packed into a row with others
                (where `position_ids` would begin again at 0). It is read as if nothing stood before
                it, and what `state` holds is known to the tokens before a row's first one alone.
                The state returned is of each row's last document. Labels stay as they are: give the
                first token -100 unless, as a separator does, it also ends the document before it.
            in_place: `state` may be written over and is worth nothing afterwards: go on with the
                one that is returned. Takes no gradients. `Decoder` does this with care.
        """
        self._check(input_ids, labels, attention_mask, statistics_mask, document_starts)
        if logits_to_keep is not None and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be 0 or more, got {logits_to_keep}.")
        reading = self.read(
            self.embedding(input_ids.long()),
            state,
            attention_mask=attention_mask,
            statistics_mask=statistics_mask,
            document_starts=document_starts,
            return_state=return_state,
            in_place=in_place,
        )
        logits, loss = self._predict(reading.hidden, labels, attention_mask, logits_to_keep)
        return EchoOutput(logits, loss, reading.state)

    def read(
        self,
        x: Float[Tensor, "b t d"],
        state: EchoState | None = None,
        *,
        attention_mask: Int[Tensor, "b t"] | None = None,
        statistics_mask: Bool[Tensor, "b t"] | None = None,
        document_starts: Bool[Tensor, "b t"] | None = None,
        return_state: bool = True,
        return_stream: bool = False,
        in_place: bool = False,
    ) -> Reading:
        """Run the blocks on tokens that are embedded already; the rest is as in `forward`."""
        if state is not None:
            self._check_state(state, len(x))
        x = F.dropout(x, self.config.embedding_dropout, self.training)
        rows = None if attention_mask is None else Alignment.of(attention_mask)
        lengths = None
        if rows is not None:
            lengths, x = rows.lengths, rows.align(x)
            if statistics_mask is not None:
                statistics_mask = rows.align(statistics_mask)
            if document_starts is not None:
                # Of a start at padding, the next real token is the first.
                number = rows.align(document_starts.cumsum(1))
                before = F.pad(number[:, :-1], (1, 0))
                document_starts = number > before
        documents = None if document_starts is None else Documents.of(document_starts, lengths)
        past = None if state is None else list(state.layers)
        new_states: list[TensorState] = []
        stream: list[Tensor] = []
        for block in self.blocks:
            here = None
            if past is not None:
                depth = len(cast(Block, block).mixers)
                here, past = past[:depth], past[depth:]
            if return_stream:
                stream.append(x if rows is None else rows.restore(x))
            x, states = block(
                x,
                here,
                lengths=lengths,
                documents=documents,
                statistics_mask=statistics_mask,
                return_state=return_state,
                in_place=in_place,
            )
            new_states += states
        hidden = self.norm(x) if rows is None else rows.restore(self.norm(x))
        if not return_state:
            return Reading(hidden, None, tuple(stream))
        before = torch.zeros_like(x[:, 0, 0], dtype=torch.int64) if state is None else state.count
        count = before + (x.shape[1] if lengths is None else lengths)
        count = count if documents is None else documents.count(before)
        return Reading(hidden, EchoState(tuple(new_states), count), tuple(stream))

    def _predict(
        self,
        x: Float[Tensor, "b t d"],
        labels: Int[Tensor, "b t"] | None,
        attention_mask: Int[Tensor, "b t"] | None,
        keep: int | None,
    ) -> tuple[Float[Tensor, "b kept vocab"], Float[Tensor, ""] | None]:
        """Logits and loss. Where there is padding, a token's next one is the next that is none."""
        logits = self.head(x if keep is None else x[:, max(0, x.shape[1] - keep) :])
        if labels is None:
            return logits, None
        rows = None if attention_mask is None else Alignment.of(attention_mask)
        if rows is not None:
            labels = rows.align(labels).masked_fill(rows.padding, IGNORED_LABEL)
        if keep is None:
            return logits, next_token_loss(logits if rows is None else rows.align(logits), labels)
        x = x if rows is None else rows.align(x)
        return logits, next_token_loss_in_pieces(x, self.head.weight, labels)

    def stream(
        self, input_ids: Int[Tensor, "b t"], **options: Unpack[GenerationOptions]
    ) -> TokenStream:
        """Read the prompt; new tokens `[B]` come as the result is iterated over."""
        return TokenStream(self, input_ids, **options)

    def generate(
        self, input_ids: Int[Tensor, "b t"], **options: Unpack[GenerationOptions]
    ) -> Int[Tensor, "b total"]:
        """The prompt followed by new tokens; greedy unless `do_sample=True`."""
        new = list(self.stream(input_ids, **options))
        return torch.cat([input_ids, torch.stack(new, dim=1)], dim=1)

    def recompute_blocks(self, on: bool = True) -> None:
        """In training, keep only what goes into each block and compute the rest again on the way
        back: less memory, more time."""
        for block in self.blocks:
            cast(Block, block).checkpoint = partial(checkpoint, use_reentrant=False) if on else None

    def mixers(self) -> list[Any]:
        """The sequence layers in order: one for each layer of an `EchoState`."""
        return [mixer for block in self.blocks for mixer in cast(Block, block).mixers]

    def init_state(self, batch: int = 1) -> EchoState:
        """The state of someone who has read nothing."""
        count = torch.zeros(batch, dtype=torch.int64, device=self.embedding.weight.device)
        return EchoState(tuple(mixer.init_state(batch) for mixer in self.mixers()), count)

    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(p.numel() for p in self.parameters())

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        save_pretrained(self.config, self.state_dict(), directory)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> EchoLM:
        """Read a model written by `save_pretrained`, or one of the box by its name: "echo-tiny"."""
        return load_pretrained(cls, directory, device=device, dtype=dtype)

    def _check(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        *masks: Tensor | None,
    ) -> None:
        if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids must be integers [B, T] with at least one token, got "
                f"{input_ids.dtype} {list(input_ids.shape)}."
            )
        names = ("labels", "attention_mask", "statistics_mask", "document_starts")
        for name, other in zip(names, (labels, *masks), strict=True):
            if other is not None and other.shape != input_ids.shape:
                raise ValueError(
                    f"{name} must have the shape of input_ids {list(input_ids.shape)}, got "
                    f"{list(other.shape)}."
                )
        starts = masks[-1]
        if starts is not None and starts.dtype != torch.bool:
            raise ValueError(
                f"document_starts must be bool, True at the first token of a document, got "
                f"{starts.dtype}."
            )
        self._check_vocabulary("input_ids", input_ids)
        if labels is not None:
            self._check_vocabulary("labels", labels.masked_fill(labels == IGNORED_LABEL, 0))

    def _check_vocabulary(self, name: str, tokens: Tensor) -> None:
        """Without waiting for a device, unless in debug mode."""
        on_host = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (on_host or debugging()):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"{name} must lie between 0 and {self.config.vocab_size - 1}, got "
                f"{low if low < 0 else high}; is the tokenizer that of this model?"
            )

    def _check_state(self, state: EchoState, batch: int) -> None:
        if not isinstance(state, EchoState):
            raise ValueError(f"state must be an EchoState, got {type(state).__name__}.")
        wanted = kinds_of_state(self.config)
        got = tuple(type(layer).__name__ for layer in state.layers)
        if wanted != got:
            raise ValueError(
                f"The state is of another model: its layers are {', '.join(got)}; this model has "
                f"{', '.join(wanted)}."
            )
        if len(state.count) != batch:
            raise ValueError(
                f"The state holds {len(state.count)} rows and what is read {batch}; use "
                "state.reorder(rows) to pick rows."
            )


@lru_cache
def kinds_of_state(config: EchoConfig) -> tuple[str, ...]:
    """What the sequence layers of such a model remember, by name; found without its weights."""
    with torch.device("meta"):
        return tuple(type(layer).__name__ for layer in EchoLM(config).init_state(1).layers)


LAYERS = (
    Attention,
    DeltaNet,
    Mamba2,
    Mamba3,
    SpectralKoopmanAttention,
    SpectralKoopmanMLP,
    SwiGLU,
)


IN_PLACE = (Mamba2, Mamba3, SpectralKoopmanAttention)
"""Those that can write over their state."""


def build_mixer(config: EchoConfig, kind: str) -> nn.Module:
    """The sequence layer of that name."""
    if kind == "ska":
        return SpectralKoopmanAttention(config.dim, heads=config.heads, **asdict(config.ska))
    if kind == "mamba2":
        return Mamba2(config.dim, norm_eps=config.norm_eps, **asdict(config.mamba2))
    if kind == "mamba3":
        return Mamba3(config.dim, norm_eps=config.norm_eps, **asdict(config.mamba3))
    if kind == "delta":
        return DeltaNet(
            config.dim, heads=config.heads, norm_eps=config.norm_eps, **asdict(config.delta)
        )
    return Attention(config.dim, heads=config.heads, rope_theta=config.rope_theta)


def build_mlp(config: EchoConfig) -> nn.Module | None:
    """The feed-forward layer, if there is one."""
    options: dict[str, Any] = {"hidden": config.mlp_hidden}
    if config.mlp == "none":
        return None
    if config.mlp == "swiglu":
        return SwiGLU(config.dim, **options)
    return SpectralKoopmanMLP(config.dim, gated=config.mlp == "koopman-gated", **options)
