"""Write on from a prompt, one token at a time, with the model's state as the only memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.model.decoder import Decoder

if TYPE_CHECKING:
    from echo_lm.model.lm import EchoLM
    from echo_lm.model.state import EchoState


GRAPH_PAYS_FROM = 8
"""Recording a CUDA graph takes as long as a step without one: fewer tokens are not worth it."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be positive, got {self.temperature}; for greedy decoding use "
                "do_sample=False."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}.")

    def choose(
        self,
        logits: Float[Tensor, "b vocab"],
        seen: Bool[Tensor, "b vocab"],
        generator: torch.Generator | None,
    ) -> Int[Tensor, " b"]:
        """The next token of each row; `seen` marks tokens the row already holds."""
        logits = penalise(logits.float(), seen, self.repetition_penalty)
        if not self.do_sample:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def penalise(
    logits: Float[Tensor, "b vocab"], seen: Bool[Tensor, "b vocab"], penalty: float
) -> Float[Tensor, "b vocab"]:
    """Make tokens seen before less likely, whatever the sign of their logit."""
    if penalty == 1:
        return logits
    weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, weaker, logits)


def keep_top_k(logits: Float[Tensor, "b vocab"], k: int) -> Float[Tensor, "b vocab"]:
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Float[Tensor, "b vocab"], p: float) -> Float[Tensor, "b vocab"]:
    """Keep the fewest tokens whose probabilities add up to p; always the likeliest one."""
    ordered, order = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= p)
    return logits.masked_fill(drop, -torch.inf)


class GenerationOptions(TypedDict, total=False):
    """What `EchoLM.stream` and `EchoLM.generate` take."""

    max_new_tokens: int
    """How many tokens to write at most; 128 if not given."""
    do_sample: bool
    """Sample rather than take the likeliest token."""
    temperature: float
    top_k: int | None
    top_p: float | None
    """Shape what is sampled from."""
    repetition_penalty: float
    """Above 1 makes tokens that the row already holds less likely."""
    eos_token_id: int | Sequence[int] | None
    """One or several tokens that end a row."""
    pad_token_id: int | None
    """Fills rows that have ended; the first stop token if not given."""
    attention_mask: Int[Tensor, "b t"] | None
    """0 at padding, which may lie anywhere; each row is as if it were alone."""
    state: EchoState | None
    """Continue a memory; the prompt is read after it."""
    generator: torch.Generator | None
    """Source of randomness, on the model's device."""


class TokenStream(Iterator[Tensor]):
    """Tokens `[B]` as they are chosen. They are read by a `Decoder`: on a CUDA device, as a graph.

    A row that has met a stop token yields the pad token from then on; the stream ends when all
    rows have, or after as many tokens as were asked for.
    """

    def __init__(
        self,
        model: EchoLM,
        input_ids: Int[Tensor, "b t"],
        *,
        max_new_tokens: int = 128,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        attention_mask: Int[Tensor, "b t"] | None = None,
        state: EchoState | None = None,
        generator: torch.Generator | None = None,
        **sampling: Any,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
        if attention_mask is not None and not bool(attention_mask.any(-1).all()):
            raise ValueError("Every row of attention_mask needs at least one token to go on from.")
        stop = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
        if pad_token_id is not None and not 0 <= pad_token_id < model.config.vocab_size:
            raise ValueError(
                f"pad_token_id must lie between 0 and {model.config.vocab_size - 1}, got "
                f"{pad_token_id}: a row that has ended reads it until all have."
            )
        device = input_ids.device
        self.generator, self.sampling = generator, Sampling(**sampling)
        self.left = max_new_tokens
        self.stop = torch.tensor(stop, device=device, dtype=torch.int64)
        self.pad_token_id = (stop[0] if stop else 0) if pad_token_id is None else pad_token_id
        self.finished = torch.zeros(len(input_ids), dtype=torch.bool, device=device)

        out = read(model, input_ids, state, attention_mask)
        self._decoder = Decoder(model, out.state, capture=max_new_tokens >= GRAPH_PAYS_FROM)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        last = 0 if attention_mask is None else last_places(attention_mask)
        self.logits = out.logits[torch.arange(len(input_ids), device=device), last]
        self.seen = tokens_seen(input_ids, real, model.config.vocab_size)
        self.unread: Int[Tensor, " b"] | None = None

    @property
    def state(self) -> EchoState:
        """A copy of the memory: it has read the prompt and all tokens but the last one chosen."""
        return self._decoder.state

    def __next__(self) -> Int[Tensor, " b"]:
        # Without stop tokens nobody finishes, and to ask would be to wait for the device.
        if self.left == 0 or (len(self.stop) > 0 and bool(self.finished.all())):
            raise StopIteration
        if self.unread is not None:
            self.logits = self._decoder.read(self.unread)
        chosen = self.sampling.choose(self.logits, self.seen, self.generator)
        chosen = chosen.masked_fill(self.finished, self.pad_token_id)
        self.unread = chosen
        self.seen = self.seen.scatter(1, chosen.unsqueeze(1), True)
        self.finished = self.finished | torch.isin(chosen, self.stop)
        self.left -= 1
        return chosen


@torch.no_grad()
def read(
    model: EchoLM,
    tokens: Int[Tensor, "b t"],
    state: EchoState | None,
    attention_mask: Int[Tensor, "b t"] | None = None,
) -> Any:
    """Take tokens in. The logits are those of the last place, or of all where some are padding."""
    keep = 1 if attention_mask is None else None
    return model(
        tokens,
        state=state,
        return_state=True,
        attention_mask=attention_mask,
        logits_to_keep=keep,
    )


def last_places(real: Int[Tensor, "b t"]) -> Int[Tensor, " b"]:
    """Where the last real token of each row is."""
    return (real.bool() * torch.arange(real.shape[1], device=real.device)).amax(1)


def tokens_seen(
    input_ids: Int[Tensor, "b t"], real: Int[Tensor, "b t"], vocab_size: int
) -> Bool[Tensor, "b vocab"]:
    """Which tokens each row holds, padding left aside."""
    counts = torch.zeros(len(input_ids), vocab_size, device=input_ids.device)
    return counts.scatter_add(1, input_ids.long(), real.bool().to(counts.dtype)) > 0
