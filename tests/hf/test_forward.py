"""One call: the same map as `EchoLM`, in one pass and through the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache

from echo_lm.hf import EchoCache
from echo_lm.model import EchoState

from .small import SHRUNK, SOME, both, close, padded, random_tokens


@pytest.mark.parametrize("name", SHRUNK)
def test_pieces_and_steps_through_the_cache_equal_the_one_pass(name: str, tmp_path: Path) -> None:
    ours, theirs = both(name, tmp_path)
    tokens = random_tokens(ours, 2, 21)
    whole = ours(tokens).logits
    cache = EchoCache()
    got = []
    for begin, end in ((0, 9), (9, 10), (10, 17), (17, 18), (18, 21)):
        out = theirs(tokens[:, begin:end], past_key_values=cache)
        assert out.past_key_values is cache
        assert cache.get_seq_length() == end
        got.append(out.logits)
    close(torch.cat(got, 1), whole)


@pytest.mark.parametrize("kind", ["left", "right", "anywhere"])
@pytest.mark.parametrize("name", SOME)
def test_padding_leaks_nothing(name: str, kind: str, tmp_path: Path) -> None:
    """The mask may be of these tokens, or of everything read."""
    ours, theirs = both(name, tmp_path)
    tokens, mask = random_tokens(ours, 3, 18), padded(kind, 3, 18)
    first, second = slice(0, 11), slice(11, 18)
    for whole_mask in (True, False):
        out = theirs(tokens[:, first], attention_mask=mask[:, first])
        cache = out.past_key_values
        more = theirs(
            tokens[:, second],
            attention_mask=mask if whole_mask else mask[:, second],
            past_key_values=cache,
        )
        got = torch.cat([out.logits, more.logits], 1)
        for row in range(3):
            real = mask[row] > 0
            close(got[row][real], ours(tokens[row][real][None]).logits[0])


@pytest.mark.parametrize("name", SOME)
def test_hidden_states_and_embeddings(name: str, tmp_path: Path) -> None:
    ours, theirs = both(name, tmp_path)
    tokens, mask = random_tokens(ours, 2, 12), padded("left", 2, 12)
    out = theirs(tokens, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == theirs.config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[0], ours.embedding(tokens))
    assert torch.equal(ours.head(out.hidden_states[-1]), out.logits)
    embeds = theirs.get_input_embeddings()(tokens)
    assert torch.equal(theirs(inputs_embeds=embeds, attention_mask=mask).logits, out.logits)
    assert theirs(tokens).hidden_states is None


def test_only_the_logits_asked_for(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    tokens, mask = random_tokens(ours, 3, 12), padded("right", 3, 12)
    whole = theirs(tokens, attention_mask=mask).logits
    for keep in (1, 5, 12):
        got = theirs(tokens, attention_mask=mask, logits_to_keep=keep).logits
        assert got.shape[1] == keep
        close(got, whole[:, -keep:])
    places = torch.tensor([3, 7])
    close(theirs(tokens, attention_mask=mask, logits_to_keep=places).logits, whole[:, places])


@pytest.mark.parametrize("kind", ["left", "right"])
def test_the_loss_is_ours_and_padding_is_nobodys_target(kind: str, tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    tokens, mask = random_tokens(ours, 3, 12), padded(kind, 3, 12)
    wanted = ours(tokens, labels=tokens, attention_mask=mask).loss
    got = theirs(tokens, labels=tokens, attention_mask=mask)
    # transformers takes logits to fp32.
    torch.testing.assert_close(got.loss.double(), wanted, rtol=1e-6, atol=0)
    # What a trainer that accumulates gradients asks for: the sum over so many tokens.
    targets = int((mask[:, 1:] * mask[:, :-1]).sum())
    summed = theirs(tokens, labels=tokens, attention_mask=mask, num_items_in_batch=2 * targets)
    torch.testing.assert_close(2 * summed.loss, got.loss)
    assert theirs(tokens, labels=tokens, return_dict=False)[0].shape == ()


@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("name", SOME)
def test_flattened_texts_are_read_as_if_alone(name: str, told_by: str, tmp_path: Path) -> None:
    """As transformers' own collator packs them, in whichever way it says so."""
    ours, theirs = both(name, tmp_path)
    texts = [random_tokens(ours, size) for size in (5, 1, 9, 2, 1)]
    collator = DataCollatorWithFlattening(
        return_position_ids=told_by == "position_ids",
        return_flash_attn_kwargs=told_by == "cu_seq_lens_q",
        return_seq_idx=told_by == "seq_idx",
    )
    batch = collator([{"input_ids": text} for text in texts], return_tensors="pt")
    out = theirs(**batch)
    alone = torch.cat([ours(text[None]).logits for text in texts], dim=1)
    close(out.logits, alone)
    losses = [ours(t[None], labels=t[None]).loss * (len(t) - 1) for t in texts if len(t) > 1]
    wanted = torch.stack(losses).sum() / (sum(map(len, texts)) - len(texts))
    torch.testing.assert_close(out.loss.double(), wanted, rtol=1e-6, atol=0)
    # What is read next goes on with the last one.
    more = random_tokens(ours, 1, 4)
    got = theirs(more, past_key_values=out.past_key_values).logits
    close(got, ours(torch.cat([texts[-1][None], more], 1)).logits[:, 1:])


def test_positions_that_rise_begin_nothing(tmp_path: Path) -> None:
    """Those of padding among them, and those that go on where a cache is."""
    ours, theirs = both("mamba2-attention-50m", tmp_path)
    tokens, mask = random_tokens(ours, 3, 12), padded("left", 3, 12)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    wanted = theirs(tokens, attention_mask=mask)
    assert torch.equal(
        theirs(tokens, attention_mask=mask, position_ids=positions).logits, wanted.logits
    )
    more, ones = random_tokens(ours, 3, 4), torch.ones(3, 4, dtype=torch.int64)
    after = positions[:, -1:] + torch.arange(1, 5)
    got = theirs(
        more, attention_mask=ones, position_ids=after, past_key_values=wanted.past_key_values
    ).logits
    for row in range(3):
        read = torch.cat([tokens[row][mask[row] > 0], more[row]])[None]
        close(got[row], ours(read).logits[0, -4:])
    # Within padding, packed texts still begin where positions do.
    halves = torch.arange(12) % 6
    out = theirs(tokens, attention_mask=mask, position_ids=halves[None].expand(3, -1))
    for row in range(3):
        second = slice(6, 12)
        real = mask[row, second] > 0
        close(out.logits[row, second][real], ours(tokens[row, second][real][None]).logits[0])


def test_the_cache_comes_when_it_is_of_use(tmp_path: Path) -> None:
    _, theirs = both("echo-50m", tmp_path)
    tokens = random_tokens(theirs.lm, 2, 5)
    assert theirs(tokens).past_key_values.places == 5
    assert theirs(tokens, use_cache=False).past_key_values is None
    theirs.config.use_cache = False
    assert theirs(tokens).past_key_values is None
    theirs.config.use_cache = True
    assert theirs.train()(tokens).past_key_values is None
    assert theirs(tokens, use_cache=True).past_key_values.places == 5


def test_a_cache_is_a_state_and_a_state_a_cache(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    tokens = random_tokens(ours, 2, 20)
    cache = theirs(tokens[:, :12]).past_key_values
    cache.state.save(tmp_path / "memory")
    kept = EchoState.load(tmp_path / "memory")
    wanted = ours(tokens).logits[:, 12:]
    close(ours(tokens[:, 12:], state=kept).logits, wanted)
    close(theirs(tokens[:, 12:], past_key_values=EchoCache(kept)).logits, wanted)


def test_what_can_be_done_with_a_cache(tmp_path: Path) -> None:
    ours, theirs = both("mamba2-attention-50m", tmp_path)
    tokens, one = random_tokens(ours, 3, 7), random_tokens(ours, 6, 1)

    def cache() -> EchoCache:
        return theirs(tokens).past_key_values

    def answer(held: EchoCache) -> torch.Tensor:
        return theirs(one[: held.batch_size], past_key_values=held).logits

    def wanted(rows: list[int]) -> torch.Tensor:
        read = torch.cat([tokens[rows], one[: len(rows)]], 1)
        return ours(read).logits[:, -1:]

    close(answer(cache()), wanted([0, 1, 2]))
    held = cache()
    held.reorder_cache(torch.tensor([2, 0, 0]))
    close(answer(held), wanted([2, 0, 0]))
    held = cache()
    held.batch_repeat_interleave(2)
    close(answer(held), wanted([0, 0, 1, 1, 2, 2]))
    for rows in (torch.tensor([True, False, True]), torch.tensor([0, 2])):
        held = cache()
        held.batch_select_indices(rows)
        close(answer(held), wanted([0, 2]))
    held.reset()
    assert (held.get_seq_length(), held.batch_size, held.is_initialized) == (0, -1, False)
    close(theirs(tokens, past_key_values=held).logits, ours(tokens).logits)
    held.crop(0)
    with pytest.raises(ValueError, match="cannot forget its last 2 tokens"):
        held.crop(-2)
    assert "7 places" in repr(held)
    assert len(held) == 3


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    tokens = random_tokens(ours, 2, 6)
    with pytest.raises(ValueError, match="must be an EchoCache, got DynamicCache"):
        theirs(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        theirs()
    with pytest.raises(ValueError, match=r"must be \[B, 6\] .* or \[B, 12\] .* got \[2, 9\]"):
        theirs(
            tokens,
            attention_mask=torch.ones(2, 9),
            past_key_values=theirs(tokens).past_key_values,
        )
    with pytest.raises(ValueError, match=r"seq_idx must have the shape of the tokens \[2, 6\]"):
        theirs(tokens, seq_idx=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="cu_seq_lens_q must go from 0 to 6 over a single row"):
        theirs(tokens, cu_seq_lens_q=torch.tensor([0, 3, 6]))
    other = small_state(tmp_path / "other")
    with pytest.raises(ValueError, match="The state is of another model"):
        theirs(tokens[:1], past_key_values=EchoCache(other))


def small_state(folder: Path) -> EchoState:
    _, theirs = both("mamba3-50m", folder)
    return theirs(torch.tensor([[1, 2]])).past_key_values.state
