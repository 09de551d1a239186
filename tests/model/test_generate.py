from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.model import EchoLM
from echo_lm.model.generate import keep_top_k, keep_top_p, last_places, penalise, tokens_seen

from .families import SHRUNK, assert_same_state, random_tokens, read, refused, small_model


def sharpened(name: str, dtype: torch.dtype = torch.float64) -> EchoLM:
    """Logits with a spread of about one, so that no choice hangs on rounding nor is it uniform."""
    model = small_model(name, dtype)
    model.norm.weight.fill_(8)
    return model


def greedy(model: EchoLM, prompt: Tensor, new: int, penalty: float = 1.0) -> Tensor:
    """The likeliest token again and again, each time reading everything anew."""
    tokens = prompt.clone()
    for _ in range(new):
        logits = model(tokens).logits[:, -1]
        for row, held in enumerate(tokens.tolist()):
            for token in set(held):
                score = logits[row, token]
                logits[row, token] = score / penalty if score > 0 else score * penalty
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens


def left_padded(model: EchoLM, lengths: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Prompts, the batch of them, and its attention mask; padding holds any token."""
    prompts = [random_tokens(model, n) for n in lengths]
    batch = random_tokens(model, len(lengths), max(lengths))
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(prompts):
        batch[row, -len(prompt) :] = prompt
        mask[row, -len(prompt) :] = 1
    return prompts, batch, mask


@pytest.mark.parametrize("name", SHRUNK)
@pytest.mark.parametrize("penalty", [1.0, 1.4, 0.7])
def test_greedy_is_the_argmax_of_reading_everything_anew(name: str, penalty: float) -> None:
    model = sharpened(name)
    prompt = random_tokens(model, 2, 7)
    got = model.generate(prompt, max_new_tokens=12, repetition_penalty=penalty)
    assert torch.equal(got, greedy(model, prompt, 12, penalty))


@pytest.mark.parametrize("name", SHRUNK)
def test_left_padded_rows_write_what_each_writes_alone(name: str) -> None:
    model = sharpened(name)
    prompts, batch, mask = left_padded(model, [3, 11, 1, 8])
    options: dict[str, Any] = {"max_new_tokens": 10, "repetition_penalty": 1.3}
    together = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(together[:, :11], batch)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], **options)
        assert torch.equal(together[row, 11:], alone[0, len(prompt) :])


def test_padding_may_lie_anywhere() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 1, 9)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0]])
    got = model.generate(prompt, attention_mask=mask, max_new_tokens=6)
    alone = model.generate(prompt[:, mask[0] > 0], max_new_tokens=6)
    assert torch.equal(got[:, 9:], alone[:, 5:])


@pytest.mark.parametrize("name", ["echo-50m", "echo-50m-paper", "mamba2-attention-50m"])
def test_samples_of_a_padded_batch_come_from_each_rows_own_distribution(name: str) -> None:
    model = sharpened(name)
    prompts, batch, mask = left_padded(model, [3, 11, 1, 8])
    kept = torch.arange(4).repeat_interleave(16)
    got = model.generate(
        batch[kept], attention_mask=mask[kept], do_sample=True, top_k=3, max_new_tokens=4
    )[:, 11:]
    for row, prompt in enumerate(prompts):
        written = got[kept == row]
        for step in range(4):
            read = torch.cat([prompt.expand(16, -1), written[:, :step]], 1)
            likeliest = model(read).logits[:, -1].topk(3).indices
            assert (likeliest == written[:, step, None]).any(-1).all()
        assert len(written[:, 0].unique()) > 1


LOGITS = torch.tensor([[1.0, 3.0, -1.0, 2.0, 0.0], [0.0, 0.0, 5.0, -2.0, 4.0]])


def kept(logits: Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def test_top_k_keeps_the_k_likeliest() -> None:
    assert kept(keep_top_k(LOGITS, 1)) == [{1}, {2}]
    assert kept(keep_top_k(LOGITS, 2)) == [{1, 3}, {2, 4}]
    assert kept(keep_top_k(LOGITS, 5)) == kept(keep_top_k(LOGITS, 50)) == [set(range(5))] * 2
    assert torch.equal(keep_top_k(LOGITS, 50), LOGITS)


def test_top_p_keeps_the_fewest_that_add_up() -> None:
    probabilities = torch.tensor([[0.15, 0.5, 0.05, 0.3], [0.1, 0.2, 0.3, 0.4]])
    logits = probabilities.log()
    for p, wanted in (
        (0.01, [{1}, {3}]),
        (0.35, [{1}, {3}]),
        (0.45, [{1}, {2, 3}]),
        (0.75, [{1, 3}, {1, 2, 3}]),
        (0.85, [{0, 1, 3}, {1, 2, 3}]),
        (0.99, [set(range(4))] * 2),
    ):
        assert kept(keep_top_p(logits, p)) == wanted


def test_top_p_sees_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two that are left the first holds 4/7.
    assert kept(keep_top_p(keep_top_k(logits, 2), 0.55)) == [{0}]
    assert kept(keep_top_p(logits, 0.55)) == [{0, 1}]


def test_a_penalty_weakens_whatever_the_sign() -> None:
    seen = torch.tensor([[True, True, True, False]])
    logits = torch.tensor([[2.0, -2.0, 0.0, 3.0]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.0, -4.0, 0.0, 3.0]]
    assert penalise(logits, seen, 0.5).tolist() == [[4.0, -1.0, 0.0, 3.0]]
    assert torch.equal(penalise(logits, seen, 1.0), logits)


def test_padding_is_not_seen() -> None:
    tokens = torch.tensor([[3, 3, 1], [2, 0, 4]])
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    seen = tokens_seen(tokens, mask, 5)
    assert [row.nonzero().flatten().tolist() for row in seen] == [[1, 3], [2, 4]]
    assert last_places(torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]])).tolist() == [1, 2, 0]


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Distance of counts from what was expected, in standard deviations (Wilson-Hilferty)."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected).square() / expected).sum()
    spread = 2 / (9 * (len(counts) - 1))
    return float(((statistic / (len(counts) - 1)) ** (1 / 3) - 1 + spread) / spread**0.5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    model = sharpened("mamba2-50m", torch.float32)
    prompt = random_tokens(model, 1, 3)
    probabilities = (model(prompt).logits[0, -1] / temperature).softmax(-1)
    drawn = model.generate(
        prompt.expand(20_000, -1),
        max_new_tokens=1,
        do_sample=True,
        temperature=temperature,
        generator=torch.Generator().manual_seed(1),
    )[:, -1]
    counts = torch.bincount(drawn, minlength=len(probabilities)).float()
    # Rare tokens are counted together: the statistic wants about five of each.
    rare = probabilities < 5 / len(drawn)
    counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True) + 1e-9])
    shares = torch.cat([probabilities[~rare], probabilities[rare].sum(0, keepdim=True) + 1e-9])
    assert len(counts) > 10
    assert abs(chi_square(counts, shares)) < 4
    assert chi_square(counts, shares.sqrt() / shares.sqrt().sum()) > 20


def test_narrow_sampling_is_greedy() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 3, 6)
    wanted = model.generate(prompt, max_new_tokens=8)
    narrow: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}]
    for options in narrow:
        assert torch.equal(
            model.generate(prompt, max_new_tokens=8, do_sample=True, **options), wanted
        )


def test_top_p_of_one_keeps_everything() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 2, 6)

    def write(**options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return model.generate(
            prompt, max_new_tokens=20, do_sample=True, generator=generator, **options
        )

    assert torch.equal(write(top_p=1.0), write())


def test_a_generator_makes_it_reproducible_and_leaves_the_global_one_alone() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 2, 6)

    def write(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, max_new_tokens=20, do_sample=True, generator=generator)

    before = torch.get_rng_state()
    assert torch.equal(write(5), write(5))
    assert not torch.equal(write(5), write(6))
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_end_at_a_stop_token_and_wait_for_the_others() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 3, 6)
    free = model.generate(prompt, max_new_tokens=12)[:, 6:]
    stop = int(free[0, 4])
    firsts = [row.index(stop) if stop in row else None for row in free.tolist()]
    assert firsts[0] is not None
    written = model.generate(
        prompt, max_new_tokens=12, eos_token_id=stop, pad_token_id=0, repetition_penalty=1.0
    )[:, 6:]
    for row, first in enumerate(firsts):
        end = written.shape[1] if first is None else first + 1
        assert torch.equal(written[row, :end], free[row, :end])
        assert (written[row, end:] == 0).all()
    by_default = model.generate(prompt, max_new_tokens=12, eos_token_id=stop)[:, 6:]
    assert (by_default[0, firsts[0] :] == stop).all()


def test_writing_ends_when_every_row_has() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 2, 6)
    free = model.generate(prompt, max_new_tokens=12)[:, 6:]
    stops = [int(free[0, 3]), int(free[1, 5])]
    last = max(min(row.index(stop) for stop in stops if stop in row) for row in free.tolist())
    written = model.generate(prompt, max_new_tokens=12, eos_token_id=stops)[:, 6:]
    assert written.shape[1] == last + 1


def test_a_stop_token_in_the_prompt_does_not_stop() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 1, 6)
    free = model.generate(prompt, max_new_tokens=5)
    unwritten = next(t for t in prompt[0].tolist() if t not in free[0, 6:].tolist())
    assert torch.equal(model.generate(prompt, max_new_tokens=5, eos_token_id=unwritten), free)


@pytest.mark.parametrize("name", ["echo-50m", "echo-50m-paper", "transformer-50m"])
def test_a_stream_yields_what_generate_returns_and_leaves_a_state_to_go_on_from(name: str) -> None:
    model = sharpened(name)
    prompts, batch, mask = left_padded(model, [5, 9])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6}
    stream = model.stream(batch, **options)
    assert stream.state.count.tolist() == [5, 9]
    first = next(stream)
    assert first.shape == (2,)
    assert stream.state.count.tolist() == [5, 9]
    tokens = torch.stack([first, *stream], 1)
    assert torch.equal(tokens, model.generate(batch, **options)[:, 9:])
    assert stream.state.count.tolist() == [10, 14]
    with pytest.raises(StopIteration):
        next(stream)
    more = model.generate(tokens[:, -1:], state=stream.state, max_new_tokens=4)
    for row, prompt in enumerate(prompts):
        whole = model.generate(prompt[None], max_new_tokens=10)[0, len(prompt) :]
        assert torch.equal(torch.cat([tokens[row], more[row, 1:]]), whole)


def test_a_memory_is_continued_and_left_as_it_was() -> None:
    model = sharpened("echo-50m")
    before, prompt = random_tokens(model, 2, 15), random_tokens(model, 2, 4)
    state = read(model, before)
    kept = state.clone()
    got = model.generate(prompt, state=state, max_new_tokens=7)
    assert_same_state(state, kept)
    wanted = model.generate(torch.cat([before, prompt], 1), max_new_tokens=7)
    assert torch.equal(got, wanted[:, 15:])


def test_no_graph_is_kept() -> None:
    model = sharpened("echo-50m").requires_grad_()
    stream = model.stream(random_tokens(model, 1, 5), max_new_tokens=3)
    next(stream)
    next(stream)
    assert not stream.logits.requires_grad
    held = stream.state.to_dict().values()
    assert not any(entry.requires_grad for entry in held if isinstance(entry, Tensor))
    assert torch.is_grad_enabled()


def test_prompts_of_int32() -> None:
    model = sharpened("echo-50m")
    prompt = random_tokens(model, 2, 5)
    options: dict[str, Any] = {"repetition_penalty": 1.2, "eos_token_id": 3, "max_new_tokens": 5}
    assert torch.equal(
        model.generate(prompt.int(), **options).long(), model.generate(prompt, **options)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, ["max_new_tokens", "got 0"]),
        ({"temperature": 0.0}, ["temperature", "0.0", "do_sample=False"]),
        ({"temperature": -1.0}, ["temperature", "-1.0"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"top_k": 0}, ["top_k", "got 0"]),
        ({"top_p": 0.0}, ["top_p", "0.0"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "0.0"]),
        ({"pad_token_id": -1}, ["pad_token_id", "-1"]),
        ({"pad_token_id": 61}, ["pad_token_id", "61"]),
        ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, ["attention_mask"]),
        ({"attention_mask": torch.ones(2, 4)}, ["attention_mask", "[2, 4]"]),
        ({"attention_mask": torch.ones(3)}, ["attention_mask", "[3]"]),
        ({"state": "memory"}, ["state", "str"]),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], words: list[str]) -> None:
    model = small_model("echo-50m")
    with refused(*words):
        model.generate(torch.tensor([[1, 2, 3], [4, 5, 6]]), **options)


def test_bad_prompts_are_named() -> None:
    model = small_model("echo-50m")
    for prompt in (torch.tensor([1, 2]), torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, 2)):
        with refused("input_ids"):
            model.generate(prompt)
    with refused("61"):
        model.generate(torch.tensor([[61]]))


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="num_beams"):
        small_model("echo-50m").generate(torch.tensor([[1]]), num_beams=3)  # type: ignore[call-arg]
