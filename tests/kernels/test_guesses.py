"""What a head guesses and where its passes compute, by the Triton kernels and by their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE, MARKS
from nvcli.kernels import guesses as reference
from nvcli.kernels.drafts import HEAD
from nvcli.kernels.step_tensors import DraftRows, KeptGuesses, LastTokens, SlotState, StepRows
from nvcli.kernels.triton.elementwise import guesses as kernels

pytestmark = MARKS

PADDING, MAX_LEN, BLOCK_SIZE, HIDDEN = 5, 64, 4, 1100


def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def make_state() -> SlotState:
    generator = torch.Generator().manual_seed(0)
    return SlotState(
        lengths=ints([20, 31, 55, 7, 9, 0]),
        token_ids=torch.randint(600, (PADDING + 1, MAX_LEN), generator=generator, dtype=torch.int32),
        block_tables=torch.randint(50, (2, PADDING + 1, MAX_LEN // BLOCK_SIZE), generator=generator).int(),
        block_size=BLOCK_SIZE,
    )


def make_kept() -> KeptGuesses:
    """Guesses for the next token of slots 0, 1 and 2, an old one of slot 3, and one that is no token."""
    states = torch.randn(PADDING + 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    return KeptGuesses(ints([11, -1, 13, 14, 15, 0]), ints([21, 32, 56, 7, 10, 0]), states, torch.zeros(PADDING + 1))


def make_rows(width: int) -> StepRows:
    """Rows with drafts, one of padding, a chunk and the surplus."""
    num_tokens = [width] * 5 + [9, 2]
    starts = [0, *torch.tensor(num_tokens).cumsum(0).tolist()]
    return StepRows(
        slots=ints([0, 1, 2, 3, PADDING, 4, PADDING]),
        num_tokens=ints(num_tokens),
        num_logits=ints([width] * 5 + [1, 0]),
        query_start_loc=ints(starts),
        logits_start_loc=ints(starts),
    )


def make_drafts(width: int) -> DraftRows:
    """Drafts that were looked up, those of slot 2 behind a long match."""
    most = [width - 1] * 4 + [0] * 3
    return DraftRows(*(ints(values) for values in ([99] * 7, most, most, [0] * 7, [2, 0, 8, 3, 0, 0, 0], [0] * 7)))


def moved(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.clone().to(DEVICE) for tensor in tensors]


def on_device(state: SlotState) -> SlotState:
    lengths, token_ids, block_tables = moved((state.lengths, state.token_ids, state.block_tables))
    return SlotState(lengths=lengths, token_ids=token_ids, block_tables=block_tables, block_size=BLOCK_SIZE)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here.dtype == there.dtype
        assert torch.equal(here.cpu(), there)


@pytest.mark.parametrize("for_all", [False, True])
@pytest.mark.parametrize("ahead", [1, 0])
@pytest.mark.parametrize("width", [2, 5])
def test_passes_go_on_from_what_was_kept(width: int, ahead: int, for_all: bool) -> None:
    state, kept, rows, drafts = make_state(), make_kept(), make_rows(width), make_drafts(width)
    there, drafts_there, passes_rows = on_device(state), DraftRows(*moved(drafts)), StepRows(*moved(rows))
    begun = reference.begin_passes(kept, rows, state, drafts, 5, for_all=for_all)
    found = kernels.begin_passes(KeptGuesses(*moved(kept)), passes_rows, there, drafts_there, 5, for_all=for_all)
    assert_same(drafts_there, drafts)
    assert_same(found, begun)
    n = width - 1
    assert begun.most.tolist() == ([n, n, n, n, 0] if for_all else [n, n, 0, 0, 0])
    assert drafts.sources[:4].tolist() == ([HEAD] * 4 if for_all else [HEAD, HEAD, 0, 0])
    guesses = kept.tokens[begun.slots] if ahead else None
    for number in range(1, width - ahead):
        of_device = None if guesses is None else guesses.to(DEVICE)
        expected = reference.next_pass(begun, state, number, guesses, ahead=ahead, max_positions=57)
        assert_same(kernels.next_pass(found, there, number, of_device, ahead=ahead, max_positions=57), expected)
        guesses = ints([100 * number + row for row in range(5)])
    assert guesses is not None
    reference.write_drafts(begun, state, n, guesses)
    kernels.next_pass(found, there, n + 1, guesses.to(DEVICE), ahead=0, max_positions=1)
    assert torch.equal(there.token_ids.cpu(), state.token_ids)
    assert state.token_ids[0, 20 + n] == guesses[0]


@pytest.mark.parametrize("width", [1, 5])
def test_the_last_tokens_that_count_are_kept(width: int) -> None:
    state, kept, rows = make_state(), make_kept(), make_rows(width)
    num_tokens = int(rows.query_start_loc[-1])
    counts = ints([1, width, 0, width // 2 + 1, 0, 9])
    seq_lens = state.lengths[rows.slots[:6].long()] + rows.num_tokens[:6]
    state.lengths[:5] += counts[[0, 1, 2, 3, 5]]
    there, rows_there, kept_there = on_device(state), StepRows(*moved(rows)), KeptGuesses(*moved(kept))
    positions = torch.arange(num_tokens, dtype=torch.int32) * 3
    tokens = reference.following_tokens(rows, state, positions)
    assert torch.equal(kernels.following_tokens(rows_there, there, positions.to(DEVICE)).cpu(), tokens)
    assert tokens[width] == state.token_ids[1, 3 * width + 1]
    last = reference.last_tokens(rows, state, seq_lens, 6, num_tokens)
    found = kernels.last_tokens(rows_there, there, seq_lens.to(DEVICE), 6, num_tokens)
    assert_same(found, last)
    assert last.slots.tolist() == [0, 1, PADDING, 3, PADDING, 4]
    assert last.places.tolist()[1] == 2 * width - 1
    rows_of_padding = last.slots == PADDING
    guesses = ints([5, -1, 7, 8, 9, 10]).masked_fill(rows_of_padding, 3)
    states = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(2))
    states[rows_of_padding] = 1.0
    last = LastTokens(last.places, last.slots, last.following.masked_fill(rows_of_padding, 1))
    for value in ((guesses, states), (None, None)):
        reference.keep_guesses(kept, last, *value)
        on_gpu = [None if tensor is None else tensor.to(DEVICE) for tensor in value]
        kernels.keep_guesses(kept_there, LastTokens(*moved(last)), *on_gpu)
        assert_same(kept_there, kept)
    assert kept.tokens.tolist() == [5, 0, 13, 8, 10, 3]


@pytest.mark.parametrize(("num_rows", "most", "mean"), [(3, 5, 2.0), (70, 5, 1.5), (70, 2, 2.9), (256, 7, 3.0)])
def test_the_surest_drafts_are_kept(num_rows: int, most: int, mean: float) -> None:
    """Of rows with fewer drafts than they may have, with drafts that were looked up, and with equal odds; the last two
    rows are padding."""
    generator = torch.Generator().manual_seed(num_rows)
    num_real = num_rows - 2
    odds = torch.rand(most, num_rows, generator=generator).mul_(1.2).clamp_(max=1).cumprod(0)
    odds[:, ::7] = 0.5
    odds[0, 1] = torch.nan
    widths = torch.arange(num_real + 1).mul(mean).int().diff()
    num_tokens = torch.cat([widths, ints([2, 1, 4])])
    starts = torch.cat([ints([0]), num_tokens.cumsum(0).int()])
    slots = torch.cat([torch.arange(num_real).int(), torch.full((3,), num_rows).int()])
    num_logits = torch.cat([widths, ints([0, 0, 0])])
    rows = StepRows(slots, num_tokens, num_logits, starts, torch.cat([ints([0]), num_logits.cumsum(0).int()]))
    sources = torch.randint(3, (num_rows + 1,), generator=generator).int()
    found = torch.randint(most + 1, (num_rows + 1,), generator=generator).int()
    nothing = torch.zeros_like(found)
    drafts = DraftRows(nothing, torch.full_like(found, most), found, sources, nothing.clone(), nothing.clone())
    there, drafts_there = StepRows(*moved(rows)), DraftRows(*moved(drafts))
    looked_up = 0.9 ** torch.arange(1, most + 1)[:, None]
    values = torch.where(sources[:num_real] == HEAD, odds[:, :num_real].nan_to_num(0), looked_up)
    values *= torch.arange(most)[:, None] < found[:num_real]
    state = SlotState(
        lengths=torch.zeros(num_rows + 1).int(),
        token_ids=ints([[0]]),
        block_tables=ints([[[0]]]),
        block_size=1,
    )
    reference.share_drafts(rows, state, drafts, odds)
    kernels.share_drafts(there, on_device(state), drafts_there, odds.to(DEVICE))
    assert_same(there, rows)
    assert_same(drafts_there, drafts)
    kept = rows.num_tokens[:num_real] - 1
    assert rows.query_start_loc[-2:].tolist() == starts[-2:].tolist()
    assert rows.num_tokens[num_real:].tolist() == [2, 1, 4]
    assert int(kept.sum()) == int(widths.sum()) - num_real
    is_kept = torch.arange(most)[:, None] < kept
    assert values[is_kept].sum() == pytest.approx(values.flatten().sort(descending=True).values[: kept.sum()].sum())
