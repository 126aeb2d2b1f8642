"""The contents of the work lists of decode attention, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the compiled kernel plans for attention on a GPU", allow_module_level=True)
pytest.importorskip("triton")

from nvcli.kernels.triton.attention.decode_work_list import DecodeWorkList
from nvcli.kernels.triton.attention.segment_work_list import SegmentWorkList

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter


@pytest.mark.parametrize(("num_rows", "lone_warps", "chunks"), [(17, [], 1), (17, [(1, 17)], 2), (16, [(1, 17)], 1)])
def test_rows_for_single_warps_are_cut_into_more_chunks(
    num_rows: int, lone_warps: list[tuple[int, int]], chunks: int
) -> None:
    work_list = DecodeWorkList(
        window=None,
        num_kv_heads=1,
        tile=64,
        align=64,
        max_rows=17,
        device=torch.device("cpu"),
        lone_warps=lone_warps,
    )
    work_list.plan(torch.full((num_rows,), 1000, dtype=torch.int32), torch.arange(num_rows))
    assert work_list.num_items.item() == chunks * num_rows <= work_list.capacity(num_rows)
    rows, begins, ends = work_list.items[: chunks * num_rows, :3].T
    assert rows.bincount().tolist() == [chunks] * num_rows
    assert (ends - begins).sum() == 1000 * num_rows
    assert work_list.max_partials >= (chunks * num_rows if chunks > 1 else 0)


@pytest.mark.parametrize(("keys", "chunks"), [(1000, 2), (24_000, 7)])
def test_one_program_for_short_rows(keys: int, chunks: int) -> None:
    """A ninth of the rows has more than half of all keys, and is cut."""
    device = torch.device("cpu")
    work_list = DecodeWorkList(
        window=None, num_kv_heads=1, tile=64, align=64, max_rows=9, device=device, programs=3, has_one_for_short=True
    )
    work_list.plan(torch.tensor([keys, *[keys // 10] * 8], dtype=torch.int32), torch.arange(9))
    rows = work_list.items[: int(work_list.num_items), 0]
    assert rows.bincount().tolist() == [chunks, *[1] * 8]
    assert chunks <= work_list.max_partials
    assert len(rows) <= work_list.capacity(9)


def plan_segments(planned: SegmentWorkList, last_segments: list[int], own_keys: int) -> None:
    """Plan rows behind no segment (0), behind one of five blocks, or behind another of two or of one block that follows
    it, with so many keys of their own."""
    segments = torch.tensor([(0, 0, 0), (0, 320, 0), (320, 448, 1), (320, 384, 1)], dtype=torch.int32)
    last = torch.tensor(last_segments, dtype=torch.int32)
    planned.plan(segments[last.long(), 1] + own_keys, torch.arange(len(last)), segments, last)


def segment_list(max_rows: int) -> SegmentWorkList:
    return SegmentWorkList(
        window=None, num_kv_heads=2, keys=128, tile_rows=32, max_rows=max_rows, device=torch.device("cpu")
    )


def test_what_there_is_to_do_is_counted() -> None:
    """The multiprocessors are shared out by this count. A tile of few rows counts as any other."""
    planned = segment_list(70)
    for last_segments, own_keys, of_tiles in (([2] * 64, 7, 2 * 448), ([1] * 3 + [3], 1, 320 + 64), ([0] * 5, 9, 0)):
        for _ in range(2):
            plan_segments(planned, last_segments, own_keys)
        num_items = int(planned.lists.num_items)
        assert planned.lists.work.tolist() == [of_tiles + num_items * 256, len(last_segments) * own_keys]


def test_segments_whose_rows_fill_their_tiles_take_the_keys_before_them() -> None:
    """Such rows have one result for both, and the others one for each."""
    last_segments = [2] * 64 + [3] * 33 + [1] * 5  # 33 rows of a tile for 32 would leave 31 of a second one empty
    planned = segment_list(110)
    planned.num_programs = 2
    plan_segments(planned, last_segments, own_keys=5)
    assert planned.lists.num_partials[: len(last_segments)].tolist() == [1] * 64 + [2] * 33 + [1] * 5
    items = planned.lists.items[: int(planned.lists.num_items)].tolist()
    tiles = sorted((num_rows, begin, end) for _, _, num_rows, begin, end, _, _, _ in items)
    joined = [(32, 0, 448)] * 2
    assert tiles == sorted([*joined, (32, 0, 320), (6, 0, 320), (32, 320, 384), (1, 320, 384)])
