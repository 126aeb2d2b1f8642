"""A step's inputs and spans of tokens, by the Triton kernels and by their reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernel_device import DEVICE, MARKS
from nvcli.core.messages import NOT_FINITE
from nvcli.kernels import prepare_inputs as reference
from nvcli.kernels.step_tensors import SlotState, StepInputs, StepRows
from nvcli.kernels.triton.elementwise import prepare_inputs as kernels

pytestmark = MARKS

NUM_SLOTS, BLOCK_SIZE, MAX_LEN = 9, 4, 3000
PADDING = NUM_SLOTS


def state(device: torch.device | str) -> SlotState:
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(1, 1000, (NUM_SLOTS + 1, MAX_LEN), generator=generator, dtype=torch.int32)
    block_tables = torch.randint(1, 9000, (2, NUM_SLOTS + 1, MAX_LEN // BLOCK_SIZE), generator=generator).int()
    block_tables[:, PADDING] = 0
    lengths = torch.tensor([0, 3, 4, 47, 48, 2000, 7, 8, 9, 0], dtype=torch.int32)
    return SlotState(
        lengths=lengths.to(device),
        token_ids=token_ids.to(device),
        block_tables=block_tables.to(device),
        block_size=BLOCK_SIZE,
    )


def rows_of(batch: list[tuple[int, int, int, int]], surplus: int, device: torch.device | str) -> StepRows:
    """`batch`: (slot, tokens, logits, rows kept for logits) of each row."""
    slots, num_tokens, num_logits, kept = map(list, zip(*batch, strict=True))
    slots.append(PADDING)
    num_tokens.append(surplus)
    num_logits.append(0)
    kept.append(0)

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StepRows(
        slots=ints(slots),
        num_tokens=ints(num_tokens),
        num_logits=ints(num_logits),
        query_start_loc=ints([0, *np.cumsum(num_tokens).tolist()]),
        logits_start_loc=ints([0, *np.cumsum(kept).tolist()]),
    )


def buffers(device: torch.device | str) -> StepInputs:
    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, -1, dtype=dtype, device=device)

    return StepInputs(
        input_ids=ints(3000),
        positions=ints(3000),
        slot_mapping=ints(2, 3000, dtype=torch.int64),
        slots=ints(20, dtype=torch.int64),
        seq_lens=ints(20),
        logits_rows=ints(40, dtype=torch.int64),
        sample_slots=ints(40, dtype=torch.int64),
        sample_positions=ints(40),
    )


BATCH = [
    (4, 1, 1, 1),  # decode rows, one of them padding
    (2, 1, 1, 1),
    (PADDING, 1, 1, 1),
    (0, 1300, 1, 1),  # a prompt from its first token on
    (1, 5, 0, 1),  # a chunk that does not end its prompt, with a row kept for it all the same
    (5, 3, 3, 3),  # a row whose every token needs logits
    (3, 1, 1, 1),
    (PADDING, 0, 0, 1),
]


def call(function: Callable[..., None], device: torch.device | str) -> tuple[StepInputs, Tensor]:
    table, out = state(device), buffers(device)
    function(rows_of(BATCH, 11, device), table, out)
    return out, table.lengths.cpu()


def test_kernel_and_reference_prepare_the_same_inputs() -> None:
    """Padding, several groups, chunks longer than what a program takes at once."""
    (actual, actual_lengths), (expected, expected_lengths) = (
        call(kernels.prepare_inputs, DEVICE),
        call(reference.prepare_inputs, "cpu"),
    )
    assert torch.equal(actual_lengths, expected_lengths)
    for name, found, wanted in zip(StepInputs._fields, actual, expected, strict=True):
        assert torch.equal(found.cpu(), wanted), name


def test_the_reference_looks_up_tokens_blocks_and_rows() -> None:
    table = state("cpu")
    out, lengths = call(reference.prepare_inputs, "cpu")
    assert lengths.tolist() == [1300, 8, 5, 48, 49, 2003, 7, 8, 9, 0]
    assert out.slots.tolist()[:9] == [4, 2, PADDING, 0, 1, 5, 3, PADDING, PADDING]
    assert out.seq_lens.tolist()[:9] == [49, 5, 1, 1300, 8, 2003, 48, 0, 11]
    assert out.positions[:4].tolist() == [48, 4, 0, 0]
    assert out.positions[3:1303].tolist() == list(range(1300))
    assert out.input_ids[1303:1308].tolist() == table.token_ids[1, 3:8].tolist()
    assert out.input_ids[0] == table.token_ids[4, 48]
    for group in range(2):
        assert out.slot_mapping[group, 0] == table.block_tables[group, 4, 12] * BLOCK_SIZE
        assert out.slot_mapping[group, 1308] == table.block_tables[group, 5, 500] * BLOCK_SIZE
    # The surplus goes to the null block.
    assert out.slot_mapping[:, 1312:1323].unique().tolist() == [0]
    assert out.input_ids[1323] == -1
    assert out.logits_rows[:10].tolist() == [0, 1, 2, 1302, 0, 1308, 1309, 1310, 1311, 0]
    assert out.sample_slots[:10].tolist() == [4, 2, PADDING, 0, PADDING, 5, 5, 5, 3, PADDING]
    assert out.sample_positions[:10].tolist() == [49, 5, 1, 1300, 0, 2001, 2002, 2003, 48, 0]
    assert out.logits_rows[10] == -1


def test_every_kept_id_is_a_token() -> None:
    """One that was sampled goes to its place; where none could be, and for padding, it is token 0."""
    num_rows = 200  # more than one program's share
    slots = torch.arange(num_rows) % NUM_SLOTS
    slots[7] = slots[150] = PADDING
    positions = 10 + torch.arange(num_rows, dtype=torch.int32)
    ids = 5000 + torch.arange(num_rows, dtype=torch.int32)
    ids[40] = NOT_FINITE

    def keep(function: Callable[..., None], device: torch.device | str) -> Tensor:
        table = state(device).token_ids
        function(table, slots.to(device), positions.to(device), ids.to(device))
        return table.cpu()

    actual, expected = keep(kernels.keep_tokens, DEVICE), keep(reference.keep_tokens, "cpu")
    assert torch.equal(actual, expected)
    untouched = state("cpu").token_ids
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        untouched[slot, position] = 0 if row in (7, 40, 150) else 5000 + row
    assert torch.equal(expected, untouched)


def test_spans_of_tokens() -> None:
    slots, starts, offsets = [3, 0, 8], [5, 0, 2999], [0, 2, 1502, 1503]
    ids = torch.arange(5000, 6503, dtype=torch.int32)

    def write(function: Callable[..., None], device: torch.device | str) -> Tensor:
        table = state(device).token_ids
        ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (slots, starts, offsets)]
        function(table, *ints, ids.to(device))
        return table.cpu()

    actual, expected = write(kernels.write_tokens, DEVICE), write(reference.write_tokens, "cpu")
    assert torch.equal(actual, expected)
    untouched = state("cpu").token_ids
    assert expected[3, 5:7].tolist() == [5000, 5001]
    assert expected[8, 2999] == 6502
    assert torch.equal(expected[0, :1500], ids[2:1502])
    untouched[3, 5:7], untouched[8, 2999], untouched[0, :1500] = expected[3, 5:7], expected[8, 2999], expected[0, :1500]
    assert torch.equal(expected, untouched)
