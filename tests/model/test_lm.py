from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.model import EchoConfig, EchoLM
from echo_lm.model.config import DeltaConfig, Mamba2Config, Mamba3Config, SKAConfig
from echo_lm.ops import debug

from .families import (
    AS_THEY_ARE,
    FAMILIES,
    SHRUNK,
    TOLERATED,
    assert_close,
    assert_same_state,
    in_pieces,
    padded,
    random_cuts,
    random_tokens,
    read,
    refused,
    rounding,
    small_config,
    small_model,
    wake,
    worst_token,
)

SOME = ["echo-50m", "echo-50m-paper", "mamba2-attention-50m", "mamba3-50m"]
"""Every kind of mixer, both kinds of SKA."""


def length_for(name: str) -> int:
    """Beyond a chunk, and not a whole number of them."""
    return 75 if name in AS_THEY_ARE else 37


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_pass_equals_pieces_equals_steps(name: str, dtype: torch.dtype) -> None:
    model = small_model(name, dtype)
    tokens = random_tokens(model, 2, length_for(name))
    last = tokens.shape[1] - 1
    exact = copy.deepcopy(model).double()(tokens).logits
    whole = model(tokens).logits
    # Each bf16 block rounds several times; 8 of them one after the other are more than enough.
    allowed = rounding(model.config, dtype) * (8 if dtype == torch.bfloat16 else TOLERATED)
    assert worst_token(whole, exact) <= allowed
    for cuts in (random_cuts(last + 1, 5), random_cuts(last + 1, 3), list(range(1, last + 1))):
        pieces, _ = in_pieces(model, tokens, cuts)
        assert pieces.dtype == whole.dtype == dtype
        if dtype == torch.bfloat16:
            # As near to the truth as one pass, and nearer to that than rounding itself.
            assert worst_token(pieces, exact) <= 1.5 * worst_token(whole, exact)
            assert worst_token(pieces, whole) <= 1.5 * worst_token(whole, exact)
        else:
            assert worst_token(pieces, exact) <= allowed


@pytest.mark.parametrize("name", SHRUNK)
def test_gradients_flow_from_piece_to_piece(name: str) -> None:
    model = small_model(name, grad=True)
    tokens = random_tokens(model, 2, 21)
    whole = model(tokens).logits
    weights = torch.randn_like(whole)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(whole, parameters, weights)
    for cuts in ([6, 13], list(range(1, 21))):
        pieces, _ = in_pieces(model, tokens, cuts)
        got = torch.autograd.grad(pieces, parameters, weights)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7 * theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_future_moves_nothing_not_even_a_bit(name: str, dtype: torch.dtype) -> None:
    """Exact and chunk mode alike: a later token adds zeros to an earlier one, nothing cancels."""
    model = small_model(name, dtype)
    tokens = random_tokens(model, 2, length_for(name))
    logits = model(tokens).logits
    for t in (1, tokens.shape[1] // 2, tokens.shape[1] - 1):
        other = tokens.clone()
        other[:, t:] = (tokens[:, t:] + 1) % model.config.vocab_size
        moved = model(other).logits
        assert torch.equal(moved[:, :t], logits[:, :t])
        assert not torch.equal(moved[:, t], logits[:, t])


def test_the_full_mode_looks_ahead() -> None:
    """So that the test of causality is known to be able to fail."""
    config = EchoConfig(dim=16, mixers=("ska",), heads=2, ska=SKAConfig(rank=4, causal=False))
    model, tokens = wake(EchoLM(config)), torch.arange(9)[None]
    other = tokens.clone()
    other[:, -1] = 20
    assert not torch.equal(model(tokens).logits[:, 0], model(other).logits[:, 0])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Of the next token, written out; labels that are negative do not count."""
    terms = [
        logits[b, t].logsumexp(-1) - logits[b, t, labels[b, t + 1]]
        for b, t in (labels[:, 1:] >= 0).nonzero().tolist()
    ]
    return torch.stack(terms).mean()


def test_the_loss_is_that_of_the_next_token() -> None:
    model = small_model("echo-50m")
    tokens = random_tokens(model, 3, 12)
    out = model(tokens, labels=tokens)
    torch.testing.assert_close(out.loss, cross_entropy(out.logits, tokens), rtol=1e-12, atol=0)
    labels = tokens.masked_fill(torch.rand(3, 12) < 0.4, -100)
    loss = model(tokens, labels=labels).loss
    torch.testing.assert_close(loss, cross_entropy(out.logits, labels), rtol=1e-12, atol=0)
    assert loss != out.loss


def test_the_first_label_is_nobodys_target() -> None:
    model = small_model("echo-50m")
    tokens = random_tokens(model, 2, 8)
    labels = tokens.clone()
    labels[:, 0] = -100
    assert torch.equal(model(tokens, labels=labels).loss, model(tokens, labels=tokens).loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_loss_is_at_least_fp32(dtype: torch.dtype) -> None:
    model = small_model("mamba2-50m", dtype)
    tokens = random_tokens(model, 2, 8)
    out = model(tokens, labels=tokens)
    wide = torch.promote_types(dtype, torch.float32)
    assert out.loss.dtype == wide
    wanted = cross_entropy(out.logits.to(wide), tokens)
    torch.testing.assert_close(out.loss, wanted, rtol=8 * torch.finfo(wide).eps, atol=0)


@pytest.mark.parametrize("kind", ["left", "right", "anywhere"])
@pytest.mark.parametrize("name", SHRUNK)
def test_padded_rows_equal_each_row_alone(name: str, kind: str) -> None:
    model = small_model(name)
    tokens, more = random_tokens(model, 4, 29), random_tokens(model, 4, 6)
    mask, more_mask = padded(kind, 4, 29), padded(kind, 4, 6).flip(0)
    more_mask[0] = 0
    one = random_tokens(model, 4, 1)
    first = model(tokens, labels=tokens, attention_mask=mask, return_state=True)
    second = model(more, state=first.state, attention_mask=more_mask, return_state=True)
    third = model(one, state=second.state, return_state=True)
    assert third.state.count.tolist() == (mask.sum(1) + more_mask.sum(1) + 1).tolist()

    losses, targets = [], []
    for row in range(4):
        parts = [tokens[row][mask[row] > 0], more[row][more_mask[row] > 0], one[row]]
        got = [
            first.logits[row][mask[row] > 0],
            second.logits[row][more_mask[row] > 0],
            third.logits[row],
        ]
        alone = model(torch.cat(parts)[None]).logits
        assert_close(torch.cat(got)[None], alone, model.config)
        losses.append(model(parts[0][None], labels=parts[0][None]).loss)
        targets.append(len(parts[0]) - 1)
    mean = sum(loss * n for loss, n in zip(losses, targets, strict=True)) / sum(targets)
    torch.testing.assert_close(first.loss, mean, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", SOME)
def test_what_padding_holds_does_not_matter(name: str) -> None:
    model = small_model(name)
    tokens, mask = random_tokens(model, 3, 20), padded("anywhere", 3, 20)
    out = model(tokens, labels=tokens, attention_mask=mask, return_state=True)
    assert out.logits.isfinite().all()
    other = torch.where(mask > 0, tokens, random_tokens(model, 3, 20))
    again = model(other, labels=other, attention_mask=mask, return_state=True)
    assert torch.equal(again.logits[mask > 0], out.logits[mask > 0])
    assert torch.equal(again.loss, out.loss)
    next_tokens = random_tokens(model, 3, 1)
    assert torch.equal(
        model(next_tokens, state=again.state).logits, model(next_tokens, state=out.state).logits
    )


@pytest.mark.parametrize("name", SOME)
def test_a_row_of_padding_alone_keeps_its_memory(name: str) -> None:
    model = small_model(name)
    state = read(model, random_tokens(model, 2, 11))
    mask = torch.tensor([[0] * 5, [1] * 5])
    out = model(random_tokens(model, 2, 5), state=state, attention_mask=mask, return_state=True)
    assert out.logits.isfinite().all()
    assert out.state.count.tolist() == [11, 16]
    one = random_tokens(model, 2, 1)
    kept = model(one, state=state).logits[0]
    assert_close(model(one, state=out.state).logits[0], kept, model.config)


def test_a_mask_without_padding_changes_nothing() -> None:
    model = small_model("echo-50m")
    tokens = random_tokens(model, 2, 9)
    for dtype in (torch.int64, torch.bool, torch.float32):
        mask = torch.ones(2, 9, dtype=dtype)
        assert torch.equal(model(tokens, attention_mask=mask).logits, model(tokens).logits)


@pytest.mark.parametrize("name", ["echo-50m", "echo-50m-paper"])
def test_tokens_left_out_of_the_statistics_cannot_be_recalled(name: str) -> None:
    config = replace(small_config(name), mixers=("ska", "ska"))
    model = wake(EchoLM(config)).double()
    tokens = random_tokens(model, 2, 27)
    keep = torch.rand(2, 27) < 0.6
    logits = model(tokens, statistics_mask=keep).logits
    other = torch.where(keep, tokens, random_tokens(model, 2, 27))
    assert torch.equal(model(other, statistics_mask=keep).logits[keep], logits[keep])
    assert not torch.equal(model(other).logits[keep], model(tokens).logits[keep])
    first = model(tokens[:, :10], statistics_mask=keep[:, :10], return_state=True)
    rest = model(tokens[:, 10:], statistics_mask=keep[:, 10:], state=first.state)
    assert_close(torch.cat([first.logits, rest.logits], 1), logits, config)


def test_without_statistics_ska_is_silent() -> None:
    model = small_model("echo-50m")
    tokens = random_tokens(model, 2, 14)
    nothing = torch.zeros(2, 14, dtype=torch.bool)
    logits = model(tokens, statistics_mask=nothing).logits
    silent = copy.deepcopy(model)
    for module in silent.modules():
        if isinstance(module, SpectralKoopmanAttention):
            nn.init.zeros_(module.out_proj.weight)
    assert torch.equal(logits, silent(tokens).logits)
    assert not torch.equal(logits, model(tokens).logits)


def test_a_statistics_mask_moves_with_its_tokens() -> None:
    model = small_model("echo-50m")
    tokens, mask = random_tokens(model, 2, 20), padded("anywhere", 2, 20)
    keep = torch.rand(2, 20) < 0.6
    logits = model(tokens, attention_mask=mask, statistics_mask=keep).logits
    real = mask[0] > 0
    alone = model(tokens[:1, real], statistics_mask=keep[:1, real]).logits
    assert_close(logits[:1, real], alone, model.config)


@pytest.mark.parametrize("name", SOME)
def test_a_call_leaves_its_arguments_as_they_are(name: str) -> None:
    model = small_model(name)
    state = read(model, random_tokens(model, 2, 13))
    kept = state.clone()
    for time in (1, 9):
        tokens, mask = random_tokens(model, 2, time), torch.ones(2, time)
        mask[0, 0] = 0
        arguments = [tokens, mask]
        copies = [t.clone() for t in arguments]
        model(tokens, labels=None, state=state, attention_mask=mask, return_state=True)
        assert_same_state(state, kept)
        assert all(map(torch.equal, arguments, copies))


def test_any_integers_will_do() -> None:
    model = small_model("echo-50m")
    tokens = random_tokens(model, 2, 9)
    wanted = model(tokens, labels=tokens, return_state=True)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        got = model(tokens.to(dtype), labels=tokens.to(dtype), return_state=True)
        assert torch.equal(got.logits, wanted.logits)
        assert torch.equal(got.loss, wanted.loss)
        assert_same_state(got.state, wanted.state)


def test_state_and_loss_come_when_asked_for() -> None:
    model = small_model("echo-50m")
    out = model(random_tokens(model, 2, 5))
    assert out.loss is None
    assert out.state is None
    assert out.logits.shape == (2, 5, model.config.vocab_size)


IDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_ids": IDS[0]}, ["input_ids", "[5]"]),
        ({"input_ids": IDS[:, :0]}, ["input_ids", "[2, 0]"]),
        ({"input_ids": IDS.float()}, ["input_ids", "torch.float32"]),
        ({"input_ids": IDS + 60}, ["input_ids", "60", "69"]),
        ({"input_ids": IDS - 3}, ["input_ids", "-3"]),
        ({"labels": IDS[:, :4]}, ["labels", "[2, 5]", "[2, 4]"]),
        ({"labels": IDS + 60}, ["labels", "69"]),
        ({"labels": IDS - 3}, ["labels", "-3"]),
        ({"input_ids": IDS[:, :1], "labels": IDS[:, :1]}, ["labels", "at least two tokens"]),
        ({"attention_mask": torch.ones(2, 6)}, ["attention_mask", "[2, 6]"]),
        ({"attention_mask": torch.ones(5)}, ["attention_mask", "[5]"]),
        ({"statistics_mask": torch.ones(1, 5).bool()}, ["statistics_mask", "[1, 5]"]),
        ({"statistics_mask": torch.ones(2, 5)}, ["mask", "bool", "torch.float32"]),
        ({"state": {"gram": 1}}, ["state", "EchoState", "dict"]),
    ],
    ids=str,
)
def test_a_bad_argument_is_named(arguments: dict[str, Any], words: list[str]) -> None:
    model = small_model("echo-50m")
    with refused(*words):
        model(**{"input_ids": IDS} | arguments)


def test_nan_is_named_when_debugging_and_never_made_finite() -> None:
    model = wake(EchoLM(replace(small_config("echo-50m"), tie_embeddings=False)))
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.no_grad():
        model.embedding.weight[3] = torch.nan
    logits = model(tokens).logits
    assert logits[0, 2:].isnan().all()
    assert logits[1].isfinite().all()
    with debug(), refused("nan"):
        model(tokens)


def test_tied_weights_are_one_and_counted_once() -> None:
    tied = EchoLM(small_config("echo-50m"))
    free = EchoLM(replace(small_config("echo-50m"), tie_embeddings=False))
    assert tied.head.weight is tied.embedding.weight
    assert free.head.weight is not free.embedding.weight
    assert free.num_parameters() - tied.num_parameters() == 61 * 32


def test_embeddings_drop_out_in_training_alone() -> None:
    torch.manual_seed(0)
    model = EchoLM(replace(small_config("mamba2-50m"), embedding_dropout=0.25, dim=32))
    tokens = random_tokens(model, 8, 50)

    def entering() -> Tensor:
        return model.read(model.embedding(tokens), return_stream=True).stream[0]

    whole = model.embedding(tokens)
    assert torch.equal(model.eval() and entering(), whole)
    kept = model.train() and entering()
    assert (kept == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(kept, (kept != 0) * whole / 0.75)


def test_every_setting_reaches_its_layer() -> None:
    config = EchoConfig(
        dim=24,
        mixers=("ska", "mamba2", "mamba3", "delta", "attention"),
        vocab_size=7,
        heads=3,
        mlp="koopman-gated",
        mlp_hidden=10,
        norm_eps=1e-3,
        rope_theta=77.0,
        ska=SKAConfig(5, "power", 1, "chunk", 9, 0.2, True, 2.5, 6),
        mamba2=Mamba2Config(state_dim=5, head_dim=6, expand=3, groups=4, conv_kernel=3),
        mamba3=Mamba3Config(6, 8, 3, rank=2, rope_fraction=1.0, gate=False, conv_kernel=5),
        delta=DeltaConfig(key_dim=4, conv_kernel=2),
    )
    model = EchoLM(config)
    ska, mamba2, mamba3, delta, attention = model.mixers()
    assert (ska.heads, ska.rank, ska.filter, ska.order, ska.causal) == (3, 5, "power", 1, "chunk")
    assert (ska.chunk_size, ska.ridge, ska.eta.item()) == (9, 0.2, 2.5)
    assert ska.q_proj.weight.shape == (3 * 6, 24)
    assert (mamba2.heads, mamba2.head_dim, mamba2.state_dim, mamba2.groups) == (12, 6, 5, 4)
    assert mamba2.conv.kernel_size == 3
    assert (mamba3.heads, mamba3.head_dim, mamba3.state_dim, mamba3.rank) == (9, 8, 6, 2)
    assert (mamba3.angles, mamba3.gate, mamba3.conv.kernel_size) == (3, False, 5)
    assert (delta.heads, delta.key_dim, delta.value_dim) == (3, 4, 8)
    assert (delta.conv.kernel_size, delta.norm.eps) == (2, 1e-3)
    assert (attention.heads, attention.rope_theta) == (3, 77.0)
    for block in model.blocks:
        assert block.mlp.hidden == 10
        assert block.mlp.gate_proj is not None
        assert block.mlp_norm.eps == block.mixer_norms[0].eps == 1e-3
    assert model.norm.eps == 1e-3
    assert model.head.weight.shape == (7, 24)


@pytest.mark.parametrize("mlp", ["koopman", "koopman-gated", "swiglu", "none"])
def test_every_feed_forward_layer(mlp: str) -> None:
    model = wake(EchoLM(replace(small_config("echo-50m"), mlp=mlp))).double()
    tokens = random_tokens(model, 2, 15)
    assert_close(in_pieces(model, tokens, [4, 9])[0], model(tokens).logits, model.config)


@pytest.mark.parametrize("name", SOME)
def test_autocast(name: str) -> None:
    model = small_model(name, torch.float32)
    tokens = random_tokens(model, 2, 20)
    exact = model(tokens, labels=tokens)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, labels=tokens)
        pieces, _ = in_pieces(model, tokens, [7, 8])
    assert out.loss.dtype == torch.float32
    allowed = 8 * rounding(model.config, torch.bfloat16)
    assert worst_token(out.logits, exact.logits) <= allowed
    assert worst_token(pieces, out.logits) <= allowed


@pytest.mark.parametrize("name", ["echo-50m", "echo-50m-paper"])
def test_compiles_to_one_graph_that_is_the_same_map(name: str) -> None:
    config = replace(small_config(name), mixers=("mamba2", "ska"))
    model = wake(EchoLM(config))
    tokens = random_tokens(model, 2, 11)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    parameters = list(model.parameters())
    ours, theirs = compiled(tokens, labels=tokens), model(tokens, labels=tokens)
    assert_close(ours.logits, theirs.logits, config)
    torch.testing.assert_close(ours.loss, theirs.loss)
    for got, wanted in zip(
        torch.autograd.grad(ours.loss, parameters),
        torch.autograd.grad(theirs.loss, parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_the_stream_can_be_watched_and_begun_by_hand(name: str) -> None:
    model = small_model(name)
    tokens, mask = random_tokens(model, 3, 14), padded("left", 3, 14)
    whole = model(tokens, attention_mask=mask, return_state=True)
    x = model.embedding(tokens)
    reading = model.read(x, attention_mask=mask, return_stream=True)
    assert torch.equal(model.head(reading.hidden), whole.logits)
    assert_same_state(reading.state, whole.state)
    assert len(reading.stream) == len(model.blocks)
    assert torch.equal(reading.stream[0], x)
    last = model.blocks[-1](
        reading.stream[-1], None, lengths=None, statistics_mask=None, return_state=False
    )[0]
    unpadded = mask.bool().all(1)
    assert unpadded.any()
    assert torch.equal(model.norm(last)[unpadded], reading.hidden[unpadded])


def kept_for_the_way_back(model: EchoLM, tokens: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """Bytes that autograd keeps beside the parameters, and the gradients."""
    ours = {p.data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.data_ptr() not in ours:
            sizes[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens, labels=tokens).loss
        kept = sum(sizes.values())
    return kept, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("name", SOME)
def test_blocks_computed_again_give_the_same_gradients_and_keep_less(name: str) -> None:
    model = small_model(name, grad=True).train()
    tokens = random_tokens(model, 2, 40)
    kept, wanted = kept_for_the_way_back(model, tokens)
    model.recompute_blocks()
    kept_again, got = kept_for_the_way_back(model, tokens)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert kept_again < kept / 3
    model.recompute_blocks(False)
    assert kept_for_the_way_back(model, tokens)[0] == kept
