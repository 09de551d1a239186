"""`EchoLM` as transformers wants it: its modules and names, behind the calls others know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from echo_lm.hf.cache import EchoCache
from echo_lm.hf.config import EchoHFConfig
from echo_lm.model.lm import Block, EchoLM
from echo_lm.model.loss import IGNORED_LABEL

INITIALISED = "_is_hf_initialized"
"""Where transformers notes that a parameter has its values."""
WHOLE = ["Block"]
"""Modules that stay on one device."""
TIED = {"head.weight": "embedding.weight"}
CACHES = (None, "dynamic")
"""What may be asked for as `cache_implementation`."""


class EchoForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model for transformers.

    It holds the modules of an `EchoLM` under their own names, so that files, optimisers and
    adapters know them by the same name on either side.
    """

    config_class = EchoHFConfig
    _no_split_modules = WHOLE
    _tied_weights_keys = TIED
    _is_stateful = True
    supports_gradient_checkpointing = True

    embedding: nn.Module
    blocks: nn.ModuleList
    head: nn.Module

    def __init__(self, config: EchoHFConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self._settings = config.to_echo()
        for name, module in EchoLM(self._settings).named_children():
            self.add_module(name, module)
        for parameter in self.parameters():
            # What is made on the meta device gets its values from a file, or lacks them.
            setattr(parameter, INITIALISED, not parameter.is_meta)
        self.post_init()

    @property
    def lm(self) -> EchoLM:
        """The model these modules make, whatever has taken the place of one since."""
        if self._settings.vocab_size != self.config.vocab_size:
            self._settings = self.config.to_echo()
        lm = EchoLM.__new__(EchoLM)
        nn.Module.__init__(lm)
        lm.config, lm.training, lm._modules = self._settings, self.training, self._modules
        return lm

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b t"] | None = None,
        attention_mask: Int[Tensor, "b places"] | None = None,
        past_key_values: EchoCache | None = None,
        inputs_embeds: Float[Tensor, "b t d"] | None = None,
        labels: Int[Tensor, "b t"] | None = None,
        position_ids: Int[Tensor, "b t"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Int[Tensor, " n"] = 0,
        cu_seq_lens_q: Int[Tensor, " n"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        **loss_options: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the token after each one.

        Args:
            input_ids: Tokens.
            attention_mask: 0 at padding, which may lie anywhere; of these tokens, or of all that
                the cache has read and then these.
            past_key_values: An `EchoCache` to continue, which changes in place.
            inputs_embeds: Embeddings in the place of tokens.
            labels: The same tokens; each is the target of the one before it, -100 is none.
            position_ids: Positions follow from the cache and the mask. Where these do not rise
                from one token to the next, another text begins, which is read as if it were alone
                (as `DataCollatorWithFlattening` packs them); -100 is the label of its first token.
            use_cache: Return a cache even if none came; so it is by default, except in training.
            output_hidden_states: Also return what went into each block, and what came out.
            logits_to_keep: Give the logits of so many last places only, or of these places.
            cu_seq_lens_q: The bounds `[0, ..., t]` of texts packed into one row; says the same.
            seq_idx: The number of each token's text, which says the same.
            loss_options: Passed on to the loss.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds, and not both.")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        mask = _mask_of(attention_mask, x.shape[1], 0 if cache is None else cache.places)
        starts = _text_starts(x, mask, position_ids, cu_seq_lens_q, seq_idx)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        reading = self.lm.read(
            x,
            None if cache is None else cache.state,
            attention_mask=mask,
            document_starts=starts,
            return_state=cache is not None,
            return_stream=bool(output_hidden_states),
        )
        if cache is not None:
            cache.advance(reading.state, x.shape[1])
        logits = self.head(_keep(reading.hidden, logits_to_keep))
        loss = None
        if labels is not None:
            targets = _without_padding(labels, mask)
            loss = self.loss_function(logits, targets, self.config.vocab_size, **loss_options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=(*reading.stream, reading.hidden) if output_hidden_states else None,
        )

    def _cache(self, given: EchoCache | None, wanted: bool | None) -> EchoCache | None:
        if given is None:
            wanted = self.config.use_cache and not self.training if wanted is None else wanted
            return EchoCache() if wanted else None
        if not isinstance(given, EchoCache):
            raise ValueError(
                f"past_key_values must be an EchoCache, got {type(given).__name__}; begin with "
                "echo_lm.hf.EchoCache()."
            )
        return given

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """`generate` asks for the cache it will hand from step to step."""
        if generation_config.cache_implementation not in CACHES:
            raise ValueError(
                f"cache_implementation must be one of {CACHES}, got "
                f"{generation_config.cache_implementation!r}: an Echo model has its own cache."
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = EchoCache()

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        self.gradient_checkpointing = enable
        for i, block in enumerate(self.blocks):
            chosen = enable and i % every_n_layers == 0
            assert isinstance(block, Block)
            block.checkpoint = gradient_checkpointing_func if chosen else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """`EchoLM` has drawn them; only what a file lacks, or an embedding that grows, comes here.

        Linear maps and embeddings are drawn as transformers does; for the rest there is no rule.
        """
        own = module.named_parameters(recurse=False)
        missing = [name for name, parameter in own if not getattr(parameter, INITIALISED, False)]
        if missing and not isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(
                f"The weights lack {', '.join(missing)} of a {type(module).__name__}; are they "
                "of another model?"
            )
        super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings


def _mask_of(
    attention_mask: Int[Tensor, "b places"] | None, tokens: int, before: int
) -> Int[Tensor, "b t"] | None:
    """The columns of what is read now; the cache knows what was padding before."""
    if attention_mask is None:
        return None
    shape = list(attention_mask.shape)
    if len(shape) != 2 or shape[1] not in (tokens, before + tokens):
        raise ValueError(
            f"attention_mask must be [B, {tokens}] for these tokens, or [B, {before + tokens}] "
            f"with what the cache has read; got {shape}."
        )
    return attention_mask[:, -tokens:]


def _text_starts(
    x: Float[Tensor, "b t d"],
    mask: Int[Tensor, "b t"] | None,
    position_ids: Int[Tensor, "#b t"] | None,
    cu_seq_lens: Int[Tensor, " n"] | None,
    seq_idx: Int[Tensor, "#b t"] | None,
) -> Bool[Tensor, "b t"] | None:
    """Where another text begins within a row, in any of the ways that transformers packs texts.

    None if none does.
    """
    shape = x.shape[:2]
    if shape[1] < 2 or (position_ids is None and cu_seq_lens is None and seq_idx is None):
        return None
    for name, numbers in {"position_ids": position_ids, "seq_idx": seq_idx}.items():
        if numbers is not None and tuple(numbers.shape) not in (tuple(shape), (1, shape[1])):
            raise ValueError(
                f"{name} must have the shape of the tokens {list(shape)}, got "
                f"{list(numbers.shape)}."
            )
    starts = torch.zeros(shape, dtype=torch.bool, device=x.device)
    if cu_seq_lens is not None:
        if shape[0] != 1 or int(cu_seq_lens[0]) != 0 or int(cu_seq_lens[-1]) != shape[1]:
            raise ValueError(
                f"cu_seq_lens_q must go from 0 to {shape[1]} over a single row, got "
                f"{cu_seq_lens.tolist()} over {shape[0]} row(s)."
            )
        starts[0, cu_seq_lens[1:-1][cu_seq_lens[1:-1] < shape[1]].long()] = True
    if seq_idx is not None:
        starts |= _changes(seq_idx.expand(shape), mask, torch.ne)
    if position_ids is not None:
        starts |= _changes(position_ids.expand(shape), mask, torch.le)
    return starts if bool(starts.any()) else None


def _changes(
    numbers: Int[Tensor, "b t"],
    mask: Int[Tensor, "b t"] | None,
    differs: Callable[[Tensor, Tensor], Tensor],
) -> Bool[Tensor, "b t"]:
    """Real tokens whose number differs so from that of the real token before them."""
    real = torch.ones_like(numbers, dtype=torch.bool) if mask is None else mask.bool()
    places = torch.arange(numbers.shape[1], device=numbers.device)
    last = torch.where(real, places, -1).cummax(1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    told = numbers.gather(1, before.clamp_min(0))
    return real & (before >= 0) & differs(numbers, told)


def _keep(x: Float[Tensor, "b t d"], places: int | Int[Tensor, " n"]) -> Float[Tensor, "b kept d"]:
    if isinstance(places, Tensor):
        return x[:, places]
    return x[:, -places:] if places else x


def _without_padding(
    labels: Int[Tensor, "b t"], mask: Int[Tensor, "b t"] | None
) -> Int[Tensor, "b t"]:
    """Padding is nobody's target, and a token behind padding has nothing to be told from."""
    if mask is None:
        return labels
    real = mask.bool()
    told = real.clone()
    told[:, 1:] &= real[:, :-1]
    return labels.masked_fill(~told, IGNORED_LABEL)
