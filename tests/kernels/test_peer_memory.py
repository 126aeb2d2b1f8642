"""Sums through shared memory: every rank's kernel by itself, the others' words and flags set beforehand.

The blocks of all ranks are on one device here, so that what a rank writes to the others can be looked at. How ranks
wait for each other, and what happens when one runs ahead, is for `test_peer_memory_gpu.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.peer_memory import PeerLayout, PeerMemory
from nvcli.kernels.triton.elementwise import fp8 as kernels
from nvcli.kernels.weight_formats import FP8Scaling

pytestmark = MARKS

EPS = 1e-6
MAX_ROWS = 9
SIZES = [2, 4, 8]


def make_ranks(num_ranks: int, hidden_size: int, dtype: torch.dtype) -> tuple[list[PeerMemory], list[torch.Tensor]]:
    layout = PeerLayout(num_ranks=num_ranks, max_rows=MAX_ROWS, hidden_size=hidden_size, dtype=dtype)
    blocks = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(num_ranks)]
    return [PeerMemory(layout, blocks, rank) for rank in range(num_ranks)], blocks


def flags(memory: PeerMemory, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a block: [rows, ranks] part flags and [rows] done flags."""
    layout = memory.layout
    words = block.view(torch.int32)
    part, done = layout.flags_offset // 4, layout.done_offset // 4
    shape = (MAX_ROWS, layout.num_ranks)
    return words[part : part + MAX_ROWS * layout.num_ranks].view(shape), words[done : done + MAX_ROWS]


def let_pass(memories: list[PeerMemory], blocks: list[torch.Tensor]) -> None:
    """Set all flags as if everybody had come already."""
    for memory, block in zip(memories, blocks, strict=True):
        for kind in flags(memory, block):
            kind.fill_(1000)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [64, 72])  # as large as a block of columns, and not
@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("two_shot", [False, True])
def test_add_rms_norm_of_the_sum(num_ranks: int, hidden_size: int, dtype: torch.dtype, two_shot: bool) -> None:
    """Over several sums of different sizes; the residual as far as the next sum will read it."""
    generator = torch.Generator().manual_seed(num_ranks)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    memories, blocks = make_ranks(num_ranks, hidden_size, dtype)
    for memory in memories:
        memory.two_shot_rows = 1 if two_shot else MAX_ROWS + 1
    weight = random(hidden_size)
    for num_rows in (1, MAX_ROWS, 5):
        residual = random(num_rows, hidden_size)
        residuals = [residual.to(DEVICE, copy=True) for _ in memories]
        for _ in range(3):
            parts = [random(num_rows, hidden_size) for _ in memories]
            places = [memory.part(num_rows) for memory in memories]
            for place, part in zip(places, parts, strict=True):
                place.copy_(part)
            outs = []
            for memory, place, there in zip(memories, places, residuals, strict=True):
                let_pass(memories, blocks)  # also what the rank before this one has set: it is further now
                out = memory.add_rms_norm(place, there, weight.to(DEVICE), EPS)
                assert isinstance(out, torch.Tensor)
                outs.append(out)
            residual_32 = residual.float()
            expected = add_rms_norm(torch.stack(parts).float().sum(dim=0), residual_32, weight.float(), EPS)
            residual = residual_32.to(dtype)
            for rank, (out, there) in enumerate(zip(outs, residuals, strict=True)):
                torch.testing.assert_close(out.float().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
                assert torch.equal(out, outs[0]), "all ranks get the same bits"
                rows = slice(rank, None, num_ranks) if two_shot else slice(None)
                torch.testing.assert_close(there[rows].cpu(), residual[rows], rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("scaling", ["channel", "block"])
@pytest.mark.parametrize("two_shot", [False, True])
def test_a_quantised_result_is_that_of_two_steps(two_shot: bool, scaling: FP8Scaling) -> None:
    size, num_rows = 192, 5  # one and a half groups of 128
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, num_rows, size, generator=generator).to(dtype)
    weight = torch.rand(size, generator=generator).to(DEVICE, dtype)

    def sums(scaling: FP8Scaling | None) -> list[Activations]:
        memories, blocks = make_ranks(4, size, dtype)
        outs = []
        for memory, part in zip(memories, parts, strict=True):
            memory.two_shot_rows = 1 if two_shot else MAX_ROWS + 1
            memory.part(num_rows).copy_(part)
            memory.part(num_rows)  # the next one's place; `memory.part` below is the first's again
        for memory in memories:
            let_pass(memories, blocks)
            residual = torch.zeros(num_rows, size, dtype=dtype, device=DEVICE)
            outs.append(memory.add_rms_norm(memory.part(num_rows), residual, weight, EPS, scaling))
        return outs

    for plain, quantised in zip(sums(None), sums(scaling), strict=True):
        assert isinstance(plain, torch.Tensor)
        assert not isinstance(quantised, torch.Tensor)
        expected = kernels.quantise(plain, scaling)
        assert torch.equal(quantised.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(quantised.scales, expected.scales)
        assert quantised.scaling == scaling


@pytest.mark.parametrize("num_ranks", SIZES)
def test_the_first_sum_of_a_pass(num_ranks: int) -> None:
    memories, blocks = make_ranks(num_ranks, 64, torch.float32)
    let_pass(memories, blocks)
    parts = [torch.randn(3, 64) for _ in memories]
    places = [memory.part(3, first=True) for memory in memories]
    for place, part in zip(places, parts, strict=True):
        place.copy_(part)
    for memory, place in zip(memories, places, strict=True):
        torch.testing.assert_close(memory.sum(place).cpu(), torch.stack(parts).sum(dim=0))


@pytest.mark.parametrize("num_ranks", SIZES)
def test_rows_of_a_shared_out_residual_reach_all_ranks(num_ranks: int) -> None:
    """Each rank has its own rows of the stream only; the others are as wrong as can be."""
    memories, blocks = make_ranks(num_ranks, 64, torch.float32)
    let_pass(memories, blocks)
    residual = torch.randn(MAX_ROWS, 64)
    rows = torch.tensor([8, 0, 3, 3, 5])
    places = []
    for memory in memories:
        is_own = torch.arange(MAX_ROWS) % num_ranks == memory.rank
        known = torch.where(is_own[:, None], residual, torch.nan).to(DEVICE)
        places.append(memory.own_rows(known, rows.to(DEVICE)))
    for memory, place in zip(memories, places, strict=True):
        assert torch.equal(memory.sum(place).cpu(), residual[rows])


def test_a_part_from_elsewhere_is_copied() -> None:
    memories, blocks = make_ranks(2, 64, torch.float32)
    let_pass(memories, blocks)
    place = memories[1].part(4)
    mine, theirs = torch.randn(4, 64).to(DEVICE), torch.randn(4, 64).to(DEVICE)
    place.copy_(theirs)
    residual = torch.zeros(4, 64, device=DEVICE)
    memories[0].add_rms_norm(mine, residual, torch.ones(64, device=DEVICE), EPS)
    torch.testing.assert_close(residual, mine + theirs)


def test_no_two_sums_that_follow_each_other_share_a_buffer() -> None:
    (memory, _), _ = make_ranks(2, 64, torch.float32)
    for num_sums in (1, 2, 3, 6, 7):
        passes = [[memory.part(4, first=True), *(memory.part(4) for _ in range(num_sums))] for _ in range(3)]
        places = [part.data_ptr() for one_pass in passes for part in one_pass]
        assert all(a != b for a, b in itertools.pairwise(places))
        assert [part.data_ptr() for part in passes[0]] == [part.data_ptr() for part in passes[1]]


@pytest.mark.parametrize("two_shot", [False, True])
def test_what_is_signalled(two_shot: bool) -> None:
    """A rank tells its epoch to those who wait for it, row by row, and to nobody else."""
    memories, blocks = make_ranks(4, 64, torch.float32)
    for memory in memories:
        memory.two_shot_rows = 1 if two_shot else MAX_ROWS + 1
    residual, weight = torch.zeros(6, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    for num_rows in (6, 3):  # rows 0 to 2 come to their second epoch
        let_pass(memories[2:3], blocks[2:3])
        memories[2].add_rms_norm(memories[2].part(num_rows), residual[:num_rows], weight, EPS)
    epochs = torch.tensor([2, 2, 2, 1, 1, 1, 0, 0, 0], dtype=torch.int32)
    for rank in (0, 1, 3):
        part_flags, done_flags = (kind.cpu() for kind in flags(memories[rank], blocks[rank]))
        rows = torch.arange(MAX_ROWS)
        waits_for_part = (rows % 4 == rank) if two_shot else torch.ones(MAX_ROWS, dtype=torch.bool)
        assert torch.equal(part_flags[:, 2], torch.where(waits_for_part, epochs, 0).int())
        assert not part_flags[:, [0, 1, 3]].any()
        waits_for_result = (rows % 4 == 2) & two_shot
        assert torch.equal(done_flags, torch.where(waits_for_result, epochs, 0).int())


@pytest.mark.parametrize("num_ranks", SIZES)
def test_largest_keys(num_ranks: int) -> None:
    """Of every rank the same; what each sends is what the others need to see."""
    memories, blocks = make_ranks(num_ranks, 64, torch.float32)
    generator = torch.Generator().manual_seed(0)
    layout = memories[0].layout
    epoch = torch.zeros(MAX_ROWS, dtype=torch.int64)
    for num_rows in (MAX_ROWS, 2, 5):
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (num_ranks, num_rows), generator=generator)
        keys[:, 0] = torch.tensor([-(1 << 63), -1, 5, 7, 0, 3, 2, 1])[:num_ranks]
        epoch[:num_rows] += 1
        stamps = epoch[:num_rows] << 32
        sent = torch.stack([stamps | (keys & 0xFFFFFFFF), stamps | ((keys >> 32) & 0xFFFFFFFF)], dim=-1)
        sent = sent.transpose(0, 1)  # [rows, ranks, 2]
        words = [
            block.view(torch.int64)[layout.words_offset // 8 :][: MAX_ROWS * num_ranks * 4].view(MAX_ROWS, 2, -1, 2)
            for block in blocks
        ]
        at = torch.arange(num_rows, device=DEVICE), (epoch[:num_rows] % 2).to(DEVICE)
        for rank, memory in enumerate(memories):
            for view in words:
                view[at] = sent.to(DEVICE)
                view[*at, rank] = 0
            others = [view[at[0], 1 - at[1]].clone() for view in words]
            assert torch.equal(memory.max(keys[rank].to(DEVICE)).cpu(), keys.max(dim=0).values)
            for view, other in zip(words, others, strict=True):
                assert torch.equal(view[at].cpu(), sent)
                assert torch.equal(view[at[0], 1 - at[1]], other), "what a slower rank may still be reading"
