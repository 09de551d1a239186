"""Documents packed into the rows of a model: each is read, and costs, what it would alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echo_lm.model import EchoLM, EchoState

from .families import (
    FAMILIES,
    SHRUNK,
    assert_close,
    in_pieces,
    padded,
    random_tokens,
    read,
    refused,
    small_model,
)

SIZES = [[3, 1, 30, 4, 2], [40], [1, 1, 38], [19, 21]]
"""Of the documents of each row; those of rows 1 and 3 begin with what a state holds."""
TOKENS = 40
GOES_ON = (1, 3)

Document = tuple[int, slice]


def documents() -> list[Document]:
    """Each one's row and place."""
    found = []
    for row, sizes in enumerate(SIZES):
        end = 0
        for size in sizes:
            found.append((row, slice(end, end + size)))
            end += size
    return found


def starts(goes_on: tuple[int, ...] = GOES_ON) -> Tensor:
    marks = torch.zeros(len(SIZES), TOKENS, dtype=torch.bool)
    for row, place in documents():
        marks[row, place.start] = place.start > 0 or row not in goes_on
    return marks


def own_state(state: EchoState | None, row: int, place: slice) -> EchoState | None:
    """What a document goes on with."""
    if state is None or place.start or row not in GOES_ON:
        return None
    return state.reorder(torch.tensor([row]))


def rows_of(state: EchoState) -> list[EchoState]:
    return [state.reorder(torch.tensor([row])) for row in range(len(SIZES))]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_alone(name: str) -> None:
    """From a state in use, and the states that are left answer alike."""
    model = small_model(name)
    tokens, more = random_tokens(model, len(SIZES), TOKENS), random_tokens(model, 1, 9)
    state = read(model, random_tokens(model, len(SIZES), 13))
    out = model(tokens, state=state, document_starts=starts(), return_state=True)
    for row, place in documents():
        alone = model(
            tokens[row : row + 1, place], state=own_state(state, row, place), return_state=True
        )
        assert_close(out.logits[row : row + 1, place], alone.logits, model.config)
        if place.stop == TOKENS:
            left = rows_of(out.state)[row]
            assert left.count.tolist() == alone.state.count.tolist()
            follow = model(more, state=left).logits
            assert_close(follow, model(more, state=alone.state).logits, model.config)


@pytest.mark.parametrize("name", SHRUNK)
def test_the_loss_and_its_gradients_are_those_of_documents_alone(name: str) -> None:
    """Whose first tokens are nobody's target, and ends are where a label says so."""
    model = small_model(name, grad=True)
    tokens = random_tokens(model, len(SIZES), TOKENS)
    begins = starts(goes_on=())
    labels = tokens.masked_fill(begins, -100)
    parameters = list(model.parameters())
    total = 0
    targets = int((labels[:, 1:] != -100).sum())
    for row, place in documents():
        some = tokens[row : row + 1, place]
        if some.shape[1] > 1:
            total = total + model(some, labels=some).loss * (some.shape[1] - 1) / targets
    wanted = torch.autograd.grad(total, parameters)
    for keep in (None, 0):
        loss = model(tokens, labels=labels, document_starts=begins, logits_to_keep=keep).loss
        torch.testing.assert_close(loss, total, rtol=1e-10, atol=0)
        got = torch.autograd.grad(loss, parameters)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8 * theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHRUNK)
def test_no_document_moves_a_bit_of_another(name: str, dtype: torch.dtype) -> None:
    model = small_model(name, dtype)
    tokens, begins = random_tokens(model, len(SIZES), TOKENS), starts(goes_on=())
    number = begins.cumsum(1)
    logits = model(tokens, document_starts=begins).logits
    for touched in (number == 1, number == 2, number == 3):
        other = torch.where(touched, (tokens + 1) % model.config.vocab_size, tokens)
        moved = model(other, document_starts=begins).logits
        assert torch.equal(moved[~touched], logits[~touched])
        assert not torch.equal(moved[touched], logits[touched])


def test_without_starts_they_do_move_each_other() -> None:
    """So that the test above is known to be able to fail."""
    model = small_model("echo-50m")
    tokens = random_tokens(model, 1, TOKENS)
    other = tokens.clone()
    other[:, 0] = (tokens[:, 0] + 1) % model.config.vocab_size
    assert not torch.equal(model(other).logits[:, 30:], model(tokens).logits[:, 30:])


@pytest.mark.parametrize("name", SHRUNK)
def test_pieces_equal_the_one_pass(name: str) -> None:
    """Cut at a start, before one, behind one, and down to steps."""
    model = small_model(name)
    tokens, begins = random_tokens(model, len(SIZES), TOKENS), starts(goes_on=())
    whole = model(tokens, document_starts=begins, return_state=True)
    for cuts in ([1, 4, 19, 38], list(range(1, TOKENS))):
        state, logits = None, []
        for first, stop in zip([0, *cuts], [*cuts, TOKENS], strict=True):
            here = slice(first, stop)
            out = model(
                tokens[:, here], state=state, document_starts=begins[:, here], return_state=True
            )
            state = out.state
            logits.append(out.logits)
        assert_close(torch.cat(logits, 1), whole.logits, model.config)
        assert state.count.tolist() == whole.state.count.tolist() == [2, 40, 38, 21]


@pytest.mark.parametrize("kind", ["left", "right", "anywhere"])
@pytest.mark.parametrize("name", SHRUNK)
def test_padding_may_lie_anywhere(name: str, kind: str) -> None:
    """Also where a document begins."""
    model = small_model(name)
    tokens, mask = random_tokens(model, len(SIZES), TOKENS), padded(kind, len(SIZES), TOKENS)
    begins, real = starts(goes_on=()), mask > 0
    out = model(tokens, attention_mask=mask, document_starts=begins, return_state=True)
    other = torch.where(real, tokens, (tokens + 1) % model.config.vocab_size)
    moved = model(other, attention_mask=mask, document_starts=begins).logits
    number = begins.cumsum(1)
    for row in range(len(SIZES)):
        assert torch.equal(moved[row][real[row]], out.logits[row][real[row]])
        for document in number[row][real[row]].unique():
            own = (number[row] == document) & real[row]
            alone = model(tokens[row][own][None], return_state=True)
            assert_close(out.logits[row][own][None], alone.logits, model.config)
        assert out.state.count[row] == alone.state.count[0]


@pytest.mark.parametrize("name", ["echo-50m", "mamba3-50m"])
def test_blocks_computed_again_are_the_same(name: str) -> None:
    model = small_model(name, grad=True).train()
    tokens, begins = random_tokens(model, len(SIZES), TOKENS), starts(goes_on=())

    def gradients() -> tuple[Tensor, ...]:
        loss = model(tokens, labels=tokens, document_starts=begins).loss
        return torch.autograd.grad(loss, list(model.parameters()))

    kept = gradients()
    model.recompute_blocks()
    assert all(torch.equal(a, b) for a, b in zip(gradients(), kept, strict=True))


def test_what_is_left_out_of_memory_is_so_in_each_document() -> None:
    model = small_model("echo-50m")
    tokens, mask = random_tokens(model, len(SIZES), TOKENS), torch.rand(len(SIZES), TOKENS) < 0.6
    out = model(tokens, statistics_mask=mask, document_starts=starts(goes_on=()))
    for row, place in documents():
        here = tokens[row : row + 1, place]
        alone = model(here, statistics_mask=mask[row : row + 1, place]).logits
        assert_close(out.logits[row : row + 1, place], alone, model.config)


@pytest.mark.parametrize("name", ["echo-50m", "mamba2-attention-50m"])
def test_a_row_of_one_document_is_one(name: str) -> None:
    model = small_model(name)
    tokens = random_tokens(model, 2, 21)
    none = torch.zeros(2, 21, dtype=torch.bool)
    state = read(model, random_tokens(model, 2, 5))
    got = model(tokens, state=state, document_starts=none).logits
    assert_close(got, in_pieces(model, tokens, [], state)[0], model.config)


def test_what_cannot_be_is_said() -> None:
    model: EchoLM = small_model("echo-50m")
    tokens = random_tokens(model, 2, 6)
    with refused("document_starts must have the shape of input_ids [2, 6], got [2, 5]"):
        model(tokens, document_starts=torch.zeros(2, 5, dtype=torch.bool))
    with refused("document_starts must be bool", "got torch.int64"):
        model(tokens, document_starts=torch.zeros(2, 6, dtype=torch.int64))
