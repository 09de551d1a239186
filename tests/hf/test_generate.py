"""`generate`: from nothing, from a cache, in every mode."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import pipeline

from echo_lm.hf import EchoCache

from .small import FAMILIES, SOME, both, left_padded, letters, random_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_what_echo_writes(name: str, tmp_path: Path) -> None:
    ours, theirs = both(name, tmp_path)
    tokens = random_tokens(ours, 2, 9)
    got = theirs.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, ours.generate(tokens, max_new_tokens=8))


@pytest.mark.parametrize("name", SOME)
def test_left_padded_rows_are_as_each_row_alone(name: str, tmp_path: Path) -> None:
    ours, theirs = both(name, tmp_path)
    mask = left_padded([4, 11, 7])
    tokens = random_tokens(ours, 3, 11) * mask
    got = theirs.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row in range(3):
        alone = tokens[row][mask[row] > 0][None]
        wanted = ours.generate(alone, max_new_tokens=8)[0, alone.shape[1] :]
        assert torch.equal(got[row, 11:], wanted)


def test_padding_may_lie_between_turns(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    mask = torch.cat([left_padded([2, 5]), left_padded([4, 3])], 1)
    tokens = random_tokens(ours, 2, 9) * mask
    got = theirs.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, ours.generate(tokens, attention_mask=mask, max_new_tokens=6))


@pytest.mark.parametrize("name", SOME)
def test_beams_are_those_of_reading_everything_anew(name: str, tmp_path: Path) -> None:
    ours, theirs = both(name, tmp_path)
    mask = left_padded([6, 9])
    tokens = random_tokens(ours, 2, 9) * mask
    how = dict(attention_mask=mask, max_new_tokens=7, num_beams=4, do_sample=False)
    how |= dict(num_return_sequences=3, return_dict_in_generate=True, output_scores=True)
    got = theirs.generate(tokens, use_cache=True, **how)
    anew = theirs.generate(tokens, use_cache=False, **how)
    assert torch.equal(got.sequences, anew.sequences)
    torch.testing.assert_close(got.sequences_scores, anew.sequences_scores)
    greedy = ours.generate(tokens, attention_mask=mask, max_new_tokens=7)
    assert not torch.equal(got.sequences[::3], greedy)


def test_samples_are_those_of_a_seed_with_and_without_a_cache(tmp_path: Path) -> None:
    _, theirs = both("echo-50m", tmp_path)
    tokens = random_tokens(theirs.lm, 2, 5)
    written = []
    for seed, use_cache in ((1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        how = dict(do_sample=True, top_k=20, top_p=0.9, temperature=0.8, num_return_sequences=2)
        written.append(theirs.generate(tokens, max_new_tokens=12, use_cache=use_cache, **how))
    assert torch.equal(written[0], written[1])
    assert not torch.equal(written[0], written[2])


@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_a_prompt_may_be_read_in_pieces(chunk: int, tmp_path: Path) -> None:
    """Among them some that are only padding in one of the rows."""
    _, theirs = both("echo-50m", tmp_path)
    mask = left_padded([3, 17])
    tokens = random_tokens(theirs.lm, 2, 17) * mask
    how = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    got = theirs.generate(tokens, prefill_chunk_size=chunk, **how)
    assert torch.equal(got, theirs.generate(tokens, **how))


@pytest.mark.parametrize("name", SOME)
def test_a_conversation_goes_on_from_its_cache(name: str, tmp_path: Path) -> None:
    """With all that was said given again, or with what is new; twice from one moment."""
    _, theirs = both(name, tmp_path)
    mask = left_padded([4, 8])
    tokens = random_tokens(theirs.lm, 2, 8) * mask
    how = dict(max_new_tokens=5, do_sample=False)
    begun = theirs.generate(tokens, attention_mask=mask, return_dict_in_generate=True, **how)
    cache = begun.past_key_values
    assert isinstance(cache, EchoCache)
    assert cache.get_seq_length() == 12
    said = torch.cat([begun.sequences, random_tokens(theirs.lm, 2, 3)], 1)
    whole_mask = torch.cat([mask, torch.ones(2, 8, dtype=torch.int64)], 1)
    wanted = theirs.generate(said, attention_mask=whole_mask, **how)

    kept = copy.deepcopy(cache)
    got = theirs.generate(said, attention_mask=whole_mask, past_key_values=cache, **how)
    assert torch.equal(got, wanted)
    new = said[:, kept.get_seq_length() :]
    got = theirs.generate(new, attention_mask=whole_mask, past_key_values=kept, **how)
    assert torch.equal(got[:, new.shape[1] :], wanted[:, said.shape[1] :])


def test_from_embeddings(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    tokens = random_tokens(ours, 2, 6)
    embeds = theirs.get_input_embeddings()(tokens)
    got = theirs.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, ours.generate(tokens, max_new_tokens=5)[:, 6:])


def test_a_stop_token_ends_a_row(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    tokens = random_tokens(ours, 3, 6)
    stop = int(ours.generate(tokens[:1], max_new_tokens=3)[0, -1])
    how = dict(max_new_tokens=9, eos_token_id=stop, pad_token_id=0)
    wanted = ours.generate(tokens, **how)
    assert torch.equal(theirs.generate(tokens, do_sample=False, **how), wanted)


def test_another_kind_of_cache_is_refused(tmp_path: Path) -> None:
    _, theirs = both("echo-50m", tmp_path)
    tokens = random_tokens(theirs.lm, 1, 3)
    with pytest.raises(ValueError, match=r"cache_implementation must be one of .* got 'static'"):
        theirs.generate(tokens, max_new_tokens=2, cache_implementation="static")


def test_the_pipeline_speaks(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    letters(tmp_path)
    theirs.generation_config.pad_token_id = 0
    theirs.save_pretrained(tmp_path)
    speak = pipeline("text-generation", model=str(tmp_path))
    tokenizer = speak.tokenizer
    prompts = ["HELLO", "WORLDWIDE"]
    how = dict(max_new_tokens=6, do_sample=False, return_full_text=False)
    alone = [speak(prompt, **how)[0]["generated_text"] for prompt in prompts]
    for prompt, text in zip(prompts, alone, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = ours.generate(ids, max_new_tokens=6)[0, ids.shape[1] :]
        assert text == tokenizer.decode(wanted)
    tokenizer.pad_token = " "
    together = speak(prompts, batch_size=2, **how)
    assert [one[0]["generated_text"] for one in together] == alone
