"""What the tables of slots take in when requests enter: the kernels write what the plain torch writes."""

from __future__ import annotations

import torch

from kernel_device import DEVICE, MARKS
from nvcli.kernels import slot_filling as reference
from nvcli.kernels.step_tensors import SlotState
from nvcli.kernels.triton.elementwise import slot_filling as kernels

pytestmark = MARKS

S = 7
SLOTS = torch.tensor([5, 0, 3], dtype=torch.int32)


def test_slots_begin_with_their_length_and_no_blocks() -> None:
    """The others stay as they are, in tables of more columns than are written at once."""

    def begin(device: torch.device | str, module: object) -> SlotState:
        state = SlotState(
            lengths=torch.arange(1, S + 1, dtype=torch.int32, device=device),
            token_ids=torch.zeros(S, 4, dtype=torch.int32, device=device),
            block_tables=torch.full((2, S, 1030), 9, dtype=torch.int32, device=device),
            block_size=4,
        )
        lengths = torch.tensor([70, 0, 90], dtype=torch.int32, device=device)
        module.begin_slots(state, SLOTS.to(device), lengths, null_block=2)  # type: ignore[attr-defined]
        return state

    actual, expected = begin(DEVICE, kernels), begin("cpu", reference)
    assert expected.lengths.tolist() == [0, 2, 3, 90, 5, 70, 7]
    assert (expected.block_tables == 2).all(dim=2).tolist() == [[True, False, False, True, False, True, False]] * 2
    assert (expected.block_tables[:, [1, 2, 4, 6]] == 9).all()
    assert torch.equal(actual.lengths.cpu(), expected.lengths)
    assert torch.equal(actual.block_tables.cpu(), expected.block_tables)


def test_columns_are_filled_with_words_and_longs() -> None:
    values = torch.randint(-(2**31), 2**31, (3, 9 + 2 * 3), generator=torch.Generator().manual_seed(1)).int()
    words, longs = torch.full((9, S), 4, dtype=torch.int32), torch.full((3, S), 5, dtype=torch.int64)
    there = words.to(DEVICE, copy=True), longs.to(DEVICE, copy=True)
    reference.fill_columns(words, longs, SLOTS, values)
    assert words[:, [5, 0, 3]].tolist() == values[:, :9].T.tolist()
    assert words[:, [1, 2, 4, 6]].eq(4).all()
    low, high = values[1, 9].item() & 0xFFFFFFFF, values[1, 10].item()
    assert longs[0, 0] == (high << 32) + low
    assert longs[:, [1, 2, 4, 6]].eq(5).all()
    for filled in (SLOTS[:1], SLOTS):
        kernels.fill_columns(*there, filled.to(DEVICE), values[: len(filled)].to(DEVICE))
        reference.fill_columns(words, longs, filled, values[: len(filled)])
    assert torch.equal(there[0].cpu(), words)
    assert torch.equal(there[1].cpu(), longs)


def test_entries_are_filled_and_those_behind_them_are_nothing() -> None:
    """In tables of more columns than are written at once."""
    ids, values = torch.full((S, 1030), 4, dtype=torch.int32), torch.full((S, 1030), 2.5)
    there = ids.to(DEVICE, copy=True), values.to(DEVICE, copy=True)
    generator = torch.Generator().manual_seed(2)
    for count in (1030, 3, 0, 1025):
        new_ids = torch.randint(0, 1000, (3, count), generator=generator, dtype=torch.int32)
        new_values = torch.randn(3, count, generator=generator)
        entries = torch.stack([new_ids, new_values.view(torch.int32)], dim=1)
        reference.fill_entries(ids, values, SLOTS, entries)
        kernels.fill_entries(*there, SLOTS.to(DEVICE), entries.to(DEVICE))
        assert torch.equal(values[3, :count], new_values[2])
        assert not values[SLOTS.long(), count:].any()
        assert torch.equal(there[0].cpu(), ids)
        assert torch.equal(there[1].cpu(), values)
    assert values[[1, 2, 4, 6]].eq(2.5).all()
