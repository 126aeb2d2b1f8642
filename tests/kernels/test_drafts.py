"""Drafts and the check which of them are right, by the Triton kernels and by their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE, MARKS
from nvcli.core.messages import NOT_FINITE
from nvcli.kernels import drafts as reference
from nvcli.kernels.answer_table import (
    empty_answer_table,
    enter_answer,
    follow_answers,
    forget_answers,
    refill_answers,
)
from nvcli.kernels.prepare_inputs import prepare_inputs
from nvcli.kernels.step_tensors import AnswerTable, DraftRows, SlotState, StepInputs, StepRows
from nvcli.kernels.triton.elementwise import drafts as kernels
from nvcli.kernels.triton.elementwise.answer_table import refill_answers as refill_kernel

pytestmark = MARKS

PADDING, MAX_LEN, BLOCK_SIZE = 6, 3000, 16
NO_LIMIT = 2**31 - 1


def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def make_state() -> SlotState:
    """Slots whose tokens end in a run that came up before: long ago, often, in a loop, never, and not at all."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(100, 30_000, (PADDING + 1, MAX_LEN), generator=generator, dtype=torch.int32)
    token_ids[0, 1990:2000] = token_ids[0, 7:17]
    token_ids[1, [50, 51, 90, 91, 92, 498, 499, 500]] = ints([5, 6, 4, 5, 6, 4, 5, 6])
    token_ids[2, :40] = ints([1, 2, 3, 4] * 10)
    token_ids[4, :2] = ints([8, 8])
    lengths = ints([1999, 500, 39, 70, 0, 1, 0])
    return SlotState(
        lengths=lengths,
        token_ids=token_ids,
        block_tables=torch.ones(1, PADDING + 1, MAX_LEN // BLOCK_SIZE, dtype=torch.int32),
        block_size=BLOCK_SIZE,
    )


def make_rows(width: int) -> StepRows:
    """A row for each slot, one of padding, a chunk without logits and the surplus."""
    slots = [0, 1, 2, 3, 4, PADDING, 5, PADDING]
    num_tokens = [width] * 6 + [3, 0]
    num_logits = [width] * 5 + [0, 1, 0]
    return StepRows(
        slots=ints(slots),
        num_tokens=ints(num_tokens),
        num_logits=ints(num_logits),
        query_start_loc=ints([0, *torch.tensor(num_tokens).cumsum(0).tolist()]),
        logits_start_loc=ints([0, *torch.tensor(num_logits).cumsum(0).tolist()]),
    )


def make_drafts(width: int, limits: list[int] | None = None) -> DraftRows:
    most = [width - 1] * 5 + [0] * 3
    return DraftRows(
        limits=ints(limits or [NO_LIMIT] * 8),
        most=ints(most),
        num_drafts=ints([-1] * 8),
        sources=ints([-1] * 8),
        matches=ints([-1] * 8),
        counts=ints([-1] * 8),
    )


def make_answers() -> AnswerTable:
    """What followed 7, 8, 9 in an answer, and the rows' tokens as far as they are entered: a slot's prompt is not."""
    answers = empty_answer_table(1 << 13, PADDING + 1, torch.device("cpu"))
    state = make_state()
    state.token_ids[5, :9] = ints([6, 7, 8, 9, 31, 32, 33, 34, 35])
    state.lengths[5] = 8
    enter_answer(answers, state, 5, 0)
    answers.ends[:] = ints([1995, 400, 10, NO_LIMIT, 0, 0, 0])
    return answers


def make_inputs() -> StepInputs:
    return StepInputs(
        input_ids=ints([0] * 200),
        positions=ints([0] * 200),
        slot_mapping=torch.zeros(1, 200, dtype=torch.int64),
        slots=ints([0] * 20, torch.int64),
        seq_lens=ints([0] * 20),
        logits_rows=ints([0] * 100, torch.int64),
        sample_slots=ints([0] * 100, torch.int64),
        sample_positions=ints([0] * 100),
    )


def on_device(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.clone().to(DEVICE) for tensor in tensors]


def state_on_device(state: SlotState) -> SlotState:
    tables = on_device((state.lengths, state.token_ids, state.block_tables))
    return SlotState(lengths=tables[0], token_ids=tables[1], block_tables=tables[2], block_size=BLOCK_SIZE)


@pytest.mark.parametrize("for_all", [False, True])
@pytest.mark.parametrize("width", [2, 5, 16])
def test_what_followed_the_last_tokens_is_drafted(width: int, for_all: bool) -> None:
    state, rows, drafts, answers = make_state(), make_rows(width), make_drafts(width), make_answers()
    for slot in (2, 3):  # slot 2 has a longer run of its own
        state.token_ids[slot, state.lengths[slot] - 2 : state.lengths[slot] + 1] = ints([7, 8, 9])
    state.token_ids[2, 4:7] = ints([7, 8, 9])
    there, found, table = state_on_device(state), DraftRows(*on_device(drafts)), AnswerTable(*on_device(answers))
    kernels.find_drafts(StepRows(*on_device(rows)), there, found, table, for_all=for_all)
    before = state.token_ids.clone()
    reference.find_drafts(rows, state, drafts, answers, for_all=for_all)
    assert torch.equal(there.token_ids.cpu(), state.token_ids)
    assert found.num_drafts.tolist() == drafts.num_drafts.tolist()
    assert found.sources.tolist() == drafts.sources.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert found.matches.tolist() == drafts.matches.tolist()
    assert max(drafts.matches) == 8
    assert int(table.time) == int(answers.time) == 2
    n = width - 1
    if not for_all:
        assert drafts.num_drafts.tolist() == [n, n, n, min(n, 5), 0, 0, 0, 0]
    assert torch.equal(state.token_ids[0, 2000 : 2000 + n], before[0, 17 : 17 + n])
    assert torch.equal(state.token_ids[1, 501 : 501 + n], before[1, 93 : 93 + n]), "the longest run"
    assert torch.equal(state.token_ids[2, 40 : 40 + n], before[2, 7 : 7 + n]), "its own text comes first"
    assert state.token_ids[3, 71 : 71 + min(n, 5)].tolist() == [31, 32, 33, 34, 35][:n], "another answer"


def test_own_text_alone() -> None:
    state, rows, drafts, inputs = make_state(), make_rows(5), make_drafts(5), make_inputs()
    there, found = state_on_device(state), DraftRows(*on_device(drafts))
    moved = StepRows(*on_device(rows))
    kernels.find_drafts(moved, there, found, None, for_all=False)
    reference.find_drafts(rows, state, drafts, None)
    assert torch.equal(there.token_ids.cpu(), state.token_ids)
    prepare_inputs(rows, state, inputs)
    ids = inputs.input_ids[inputs.logits_rows[:26] + 1].clone()
    kernels.accept_drafts(moved, there, StepInputs(*on_device(inputs)), found, None, ids.to(DEVICE))
    reference.accept_drafts(rows, state, inputs, drafts, None, ids)
    assert found.counts.tolist() == drafts.counts.tolist()
    assert torch.equal(there.token_ids.cpu(), state.token_ids)


def test_a_loop_goes_on() -> None:
    state, rows, drafts = make_state(), make_rows(16), make_drafts(16)
    reference.find_drafts(rows, state, drafts, make_answers())
    assert state.token_ids[2, 40:55].tolist() == ([1, 2, 3, 4] * 4)[:15]


@pytest.mark.parametrize("accepted", [-1, 0, reference.accepted_of(0.7), reference.accepted_of(1.0)])
@pytest.mark.parametrize("held", [False, True])
def test_drafts_are_accepted_while_they_are_what_was_sampled(held: bool, accepted: int) -> None:
    width = 5
    rows, limits = make_rows(width), [NO_LIMIT, 501 + 1, NO_LIMIT, NO_LIMIT, 2, NO_LIMIT, NO_LIMIT, NO_LIMIT]
    drafts, state, inputs, answers = make_drafts(width, limits), make_state(), make_inputs(), make_answers()
    reference.find_drafts(rows, state, drafts, answers, for_all=True)
    prepare_inputs(rows, state, inputs)
    # Slot 0: two are right; 1: all, and a limit; 2: all; 3: none; 4: the limit; 5: a chunk.
    ids = inputs.input_ids[inputs.logits_rows[:26] + 1].clone()
    ids[2], ids[15], ids[25] = 7, NOT_FINITE, 9
    held_rows = ints([1 if place == 10 else 0 for place in range(26)]) if held else None
    there, found, table = state_on_device(state), DraftRows(*on_device(drafts)), AnswerTable(*on_device(answers))
    args = StepRows(*on_device(rows)), there, StepInputs(*on_device(inputs)), found, table, ids.to(DEVICE)
    held_there = None if held_rows is None else held_rows.to(DEVICE)
    for _ in range(2):  # once more changes nothing
        reference.accept_drafts(rows, state, inputs, drafts, answers, ids, held_rows, accepted=accepted)
        kernels.accept_drafts(*args, held_there, accepted=accepted)
    assert found.counts.tolist() == drafts.counts.tolist()
    assert torch.equal(there.lengths.cpu(), state.lengths)
    assert torch.equal(there.token_ids.cpu(), state.token_ids)
    assert torch.equal(table.entries.cpu(), answers.entries)
    assert table.ends.tolist() == answers.ends.tolist()
    if accepted == -1:
        assert drafts.counts.tolist() == [3, 2, 0 if held else 5, 1, 2, 0, 1, 0]
        assert state.lengths.tolist()[:6] == [2002, 502, 39 if held else 44, 71, 2, 4]
        assert answers.ends.tolist() == [2003, 503, 40 if held else 45, 72, 0, 5, 0]
        assert state.token_ids[3, 71] == 0, "no token of the vocabulary"
    elif accepted == 0:
        assert drafts.counts.tolist() == [1, 1, 0 if held else 1, 1, 1, 0, 1, 0]


def test_a_slot_that_is_filled_anew_leaves_its_answer() -> None:
    state, answers, slots, prompt_lens = make_state(), make_answers(), ints([1, 4, 0]), ints([5, 6, 7])
    there, table = state_on_device(state), AnswerTable(*on_device(answers))
    refill_kernel(table, there, slots.to(DEVICE), prompt_lens.to(DEVICE))
    refill_answers(answers, state, slots, prompt_lens)
    assert torch.equal(table.entries.cpu(), answers.entries)
    assert table.ends.tolist() == answers.ends.tolist()
    assert answers.ends.tolist()[:5] == [7, 5, 10, NO_LIMIT, 6]
    for slot, place in ((0, 1995), (1, 450)):
        run = state.token_ids[slot, place - 3 : place]
        assert follow_answers(answers, run, 4) == state.token_ids[slot, place : place + 4].tolist()
    assert follow_answers(answers, state.token_ids[1, 200:203], 4) == [], "a prompt"
    forget_answers(answers)
    assert follow_answers(answers, run, 4) == []


def test_later_entries_replace_earlier_ones() -> None:
    state, answers = make_state(), empty_answer_table(1 << 13, PADDING + 1, torch.device("cpu"))
    for number, following in enumerate((50, 90, 20)):
        state.token_ids[3, :4] = ints([1, 2, 3, following])
        state.lengths[3] = 3
        enter_answer(answers, state, 3, 0)
        answers.time.add_(number % 2)  # the first two are made at one time, when the larger stays
        expected = (50, 90, 20)[number]
        assert follow_answers(answers, ints([1, 2, 3]), 1) == [expected]


def test_about_as_many_drafts_are_accepted_as_asked_for() -> None:
    coins = [reference._coin(slot, position) for slot in range(30) for position in range(300)]
    share = sum(coin < reference.accepted_of(0.7) for coin in coins) / len(coins)
    assert share == pytest.approx(0.7, abs=0.02)
