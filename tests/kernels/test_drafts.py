"""Drafts and the check which of them are right, by the Triton kernels and by their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE, MARKS
from nvcli.core.messages import NOT_FINITE
from nvcli.kernels import drafts as reference
from nvcli.kernels.prepare_inputs import prepare_inputs
from nvcli.kernels.step_tensors import DraftRows, SlotState, StepInputs, StepRows
from nvcli.kernels.triton.elementwise import drafts as kernels

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
        limits=ints(limits or [NO_LIMIT] * 8), most=ints(most), num_drafts=ints([-1] * 8), counts=ints([-1] * 8)
    )


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
    return [tensor.to(DEVICE) for tensor in tensors]


def state_on_device(state: SlotState) -> SlotState:
    tables = on_device((state.lengths, state.token_ids, state.block_tables))
    return SlotState(lengths=tables[0], token_ids=tables[1], block_tables=tables[2], block_size=BLOCK_SIZE)


@pytest.mark.parametrize("for_all", [False, True])
@pytest.mark.parametrize("width", [2, 5, 16])
def test_what_followed_the_last_tokens_is_drafted(width: int, for_all: bool) -> None:
    state, rows, drafts = make_state(), make_rows(width), make_drafts(width)
    expected = make_state()
    reference.find_drafts(rows, expected, drafts, for_all=for_all)
    there, found = state_on_device(state), DraftRows(*on_device(make_drafts(width)))
    kernels.find_drafts(StepRows(*on_device(rows)), there, found, for_all=for_all, longest=8, least=2)
    assert torch.equal(there.token_ids.cpu(), expected.token_ids)
    assert found.num_drafts.tolist() == drafts.num_drafts.tolist()
    n = width - 1
    if not for_all:
        assert drafts.num_drafts.tolist() == [n, n, n, 0, 0, 0, 0, 0]
    before = make_state().token_ids
    assert torch.equal(expected.token_ids[0, 2000 : 2000 + n], before[0, 17 : 17 + n])
    assert torch.equal(expected.token_ids[1, 501 : 501 + n], before[1, 93 : 93 + n]), "the longest run"
    assert expected.token_ids[2, 40 : 40 + n].tolist() == ([1, 2, 3, 4] * 4)[:n], "the loop goes on"


@pytest.mark.parametrize("accepted", [-1, 0, reference.accepted_of(0.7), reference.accepted_of(1.0)])
@pytest.mark.parametrize("held", [False, True])
def test_drafts_are_accepted_while_they_are_what_was_sampled(held: bool, accepted: int) -> None:
    width = 5
    rows, limits = make_rows(width), [NO_LIMIT, 501 + 1, NO_LIMIT, NO_LIMIT, 2, NO_LIMIT, NO_LIMIT, NO_LIMIT]
    drafts, state, inputs = make_drafts(width, limits), make_state(), make_inputs()
    reference.find_drafts(rows, state, drafts, for_all=True)
    prepare_inputs(rows, state, inputs)
    # Slot 0: two are right; 1: all, and a limit; 2: all; 3: none; 4: the limit; 5: a chunk.
    ids = inputs.input_ids[inputs.logits_rows[:26] + 1].clone()
    ids[2], ids[15], ids[25] = 7, NOT_FINITE, 9
    held_rows = ints([1 if place == 10 else 0 for place in range(26)]) if held else None
    there, found = state_on_device(state), DraftRows(*on_device(drafts))
    args = StepRows(*on_device(rows)), there, StepInputs(*on_device(inputs)), found, ids.to(DEVICE)
    held_there = None if held_rows is None else held_rows.to(DEVICE)
    for _ in range(2):  # once more changes nothing
        reference.accept_drafts(rows, state, inputs, drafts, ids, held_rows, accepted=accepted)
        kernels.accept_drafts(*args, held_there, accepted=accepted)
    assert found.counts.tolist() == drafts.counts.tolist()
    assert torch.equal(there.lengths.cpu(), state.lengths)
    assert torch.equal(there.token_ids.cpu(), state.token_ids)
    if accepted == -1:
        assert drafts.counts.tolist() == [3, 2, 0 if held else 5, 1, 2, 0, 1, 0]
        assert state.lengths.tolist()[:6] == [2002, 502, 39 if held else 44, 71, 2, 4]
        assert state.token_ids[3, 71] == 0, "no token of the vocabulary"
    elif accepted == 0:
        assert drafts.counts.tolist() == [1, 1, 0 if held else 1, 1, 1, 0, 1, 0]


def test_about_as_many_drafts_are_accepted_as_asked_for() -> None:
    coins = [reference._coin(slot, position) for slot in range(30) for position in range(300)]
    share = sum(coin < reference.accepted_of(0.7) for coin in coins) / len(coins)
    assert share == pytest.approx(0.7, abs=0.02)
