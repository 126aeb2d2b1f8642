"""The triton backend's kernels on the CPU, in Triton's interpreter: float32, small, and exact in what they cover."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("test_gpu_backends runs the compiled kernels here", allow_module_level=True)
from attention_setup import Bench as AnyBench
from attention_setup import History
from simulated_hopper import SimulatedHopper

from combinations import full
from kernel_device import MARKS
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.triton.attention.decode_work_list import SPLIT as SPLIT_KEYS
from nvcli.kernels.triton.attention.decode_work_list import plan_decode_kernel
from nvcli.kernels.triton.attention.prefill_tiles import Chunks, PrefillTiles, TileKey

Bench = partial(AnyBench, TritonBackend)
SPLIT: int = SPLIT_KEYS.value
pytestmark = MARKS


GEOMETRIES: list[Any] = [
    *(
        {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "ratio": ratio, "block_size": block_size}
        for head_dim, num_kv_heads, ratio, block_size in [
            (64, 1, 8, 1), (256, 1, 4, 32), (32, 3, 3, 24),
        ]
    ),
    # Windows of one token, shorter and longer than chunks and prompts, in KV groups with blocks of their own.
    *(
        {"num_kv_heads": 2, "ratio": 2, "windows": windows, "block_size": block_size}
        for windows, block_size in [((1,), 16), ((40, 64, 40), 16), ((33,), 24), ((257,), 64)]
    ),
    # A score of each head's own that belongs to no key, once in each softmax.
    {"num_kv_heads": 2, "ratio": 3, "windows": (40, None), "has_sinks": True, "soft_cap": 0.7},
    # Numbers that each token's heads add to the scores of near keys.
    {"num_kv_heads": 2, "ratio": 3, "windows": (40, None), "bias_extent": 37},
    # Blocks that hold keys of several shapes, so that they do not lie side by side.
    {"num_kv_heads": 2, "ratio": 2, "windows": (40, None), "head_dims": (32, 64), "soft_cap": 0.7},
    # Values that are the first numbers of their keys.
    {"head_dim": 80, "value_dim": 64, "has_values": False, "ratio": 5, "block_size": 16},
    {"head_dim": 64, "value_dim": 64, "has_values": False, "ratio": 5, "windows": (40, None), "has_sinks": True},
    # Values that are smaller than their keys.
    {"head_dim": 48, "value_dim": 32, "num_kv_heads": 2, "ratio": 2, "windows": (40, None), "has_sinks": True},
    full({"head_dim": 64, "num_kv_heads": 2, "ratio": 1, "block_size": 64}),
    full({"head_dim": 64, "num_kv_heads": 1, "ratio": 2, "block_size": 256}),
    full({"head_dim": 576, "value_dim": 512, "has_values": False, "ratio": 20, "block_size": 64}),
    full({"head_dim": 128, "num_kv_heads": 2, "ratio": 2, "block_size": 16}),
    full({"head_dim": 16, "num_kv_heads": 1, "ratio": 16, "block_size": 4}),
    full({"head_dim": 512, "num_kv_heads": 1, "ratio": 2, "block_size": 16}),
    full({"num_kv_heads": 2, "ratio": 2, "windows": (5, None), "block_size": 64}),
    full({"num_kv_heads": 2, "ratio": 2, "windows": (100, 17), "block_size": 32}),
    full({"num_kv_heads": 2, "ratio": 2, "windows": (70,), "block_size": 1}),
    full({"num_kv_heads": 2, "ratio": 8, "windows": (40, None), "has_sinks": True}),
]  # fmt: skip


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_steps_of_all_kinds(geometry: dict[str, Any]) -> None:
    """Prompts, chunks behind a cached prefix, decode rows of all lengths, also of one that is cut into many chunks, all
    of them at once, decode rows of several tokens, and padding, which disturbs no other row."""
    bench = Bench(**geometry, num_tokens=3000)
    bench.leave_garbage(float("nan"))  # what an earlier owner left must not be read
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 33), (d, 90), shape=BatchShape(prefill_rows=6, prefill_tokens=150))
    bench.step((a, 1), (c, 1), (b, 20), (d, 31))
    bench.fill(d, 600)
    bench.step((d, 1))
    bench.step((d, 1), (c, 1), (a, 1), (b, 2), shape=BatchShape(decode_rows=4, prefill_rows=3, prefill_tokens=11))
    bench.step((a, 1), (b, 1), (c, 1), (d, 1), shape=BatchShape(decode_rows=5))
    bench.step((a, 1), (c, 70), (d, 5))
    shape = BatchShape(decode_rows=4, tokens_per_row=4, prefill_rows=2, prefill_tokens=30)
    bench.step((a, 4), (b, 4), (c, 25), shape=shape)


def test_prompts_that_attend_both_ways() -> None:
    """Prompts shorter and longer than tiles and windows, and padding."""
    bench = Bench(num_kv_heads=2, ratio=2, windows=(None, 1, 70), both_ways=True, block_size=24)
    bench.leave_garbage(float("nan"))
    work = [(History(), count) for count in (1, 15, 41, 250)]
    bench.step(*work, shape=BatchShape(decode_rows=1, prefill_rows=4, prefill_tokens=330))


def test_more_heads_than_a_tile_has_rows() -> None:
    """All heads of latents, which share one key, are attended to, also where chunks are reduced."""
    bench = Bench(head_dim=32, value_dim=16, has_values=False, ratio=70, max_decode_width=1)
    a, b = History(), History()
    bench.fill(a, 400)
    bench.step((a, 1))
    bench.step((a, 1), (b, 1), shape=BatchShape(decode_rows=3))


def test_a_row_of_many_chunks() -> None:
    """A lone sequence is cut as far as the list allows, and its parts are put together again, layer after layer."""
    bench = Bench(ratio=2, block_size=32, num_tokens=3000, windows=(None, 700))
    history = History()
    bench.fill(history, 2500)
    for _ in range(2):
        step = bench.batch((history, 1))
        for _ in range(2):
            step.check(step.forward())


@pytest.mark.parametrize("windows", [(None,), (300,)], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_chunks_behind_a_long_prefix(block_size: int, windows: tuple[int | None, ...]) -> None:
    """Long enough that the keys which all of a tile's rows see are attended without masks."""
    bench = Bench(num_kv_heads=2, ratio=2, block_size=block_size, num_tokens=3000, windows=windows)
    bench.leave_garbage(float("nan"))
    a, b = History(), History()
    bench.fill(a, 700)
    bench.fill(b, 1001)
    bench.step((a, 40), (b, 3))


@pytest.mark.parametrize(
    ("num_kv_heads", "ratio", "head_dim", "block_size", "options"),
    [
        (2, 4, 128, 64, {}),
        (4, 1, 64, 256, {"soft_cap": 0.7, "has_sinks": True}),
        (1, 5, 128, 128, {}),
        (1, 8, 256, 192, {"windows": (None, None), "head_dims": (256, 128)}),  # blocks that lie apart
    ],
    ids=str,
)
def test_the_kernel_for_hopper(
    num_kv_heads: int, ratio: int, head_dim: int, block_size: int, options: dict[str, Any]
) -> None:
    """Chunks with and without a past, tiles of keys that some rows see and that all do, and padding."""
    bench = AnyBench(
        SimulatedHopper, num_kv_heads=num_kv_heads, ratio=ratio, head_dim=head_dim, block_size=block_size,
        num_tokens=3000, **options,
    )  # fmt: skip
    bench.leave_garbage(float("nan"))
    a, b, c = (History() for _ in range(3))
    bench.fill(a, 930)
    bench.fill(b, 450)
    bench.step((a, 70), (b, 200), (c, 33), shape=BatchShape(prefill_rows=5, prefill_tokens=348))


@pytest.mark.parametrize(
    ("window", "align"), [(0, 1), (1, 1), (100, 32), (900, 32), (333, 1), (0, SPLIT), (100, SPLIT), (1300, SPLIT)]
)
@pytest.mark.parametrize(("num_rows", "longest"), [(1, 5000), (7, 0), (40, 3000), (270, 3000)])
def test_the_work_list_covers_every_key_once_longest_first(
    num_rows: int, longest: int, window: int, align: int
) -> None:
    """Window 0 stands for none. With `align` SPLIT, rows are cut into splits or not at all."""
    has_splits = align == SPLIT
    rng = random.Random(num_rows)
    lens = [rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(num_rows)]
    slots = rng.sample(range(2 * num_rows), num_rows)
    num_kv_heads, target, tile = 2, 24, 32
    most_cut = 20 if has_splits else target // num_kv_heads
    items = torch.full((most_cut + num_rows, 8), -1, dtype=torch.int32)
    num_items = torch.zeros(1, dtype=torch.int32)
    plan_decode_kernel[(-(-num_rows // 16),)](
        torch.tensor(lens, dtype=torch.int32), None, torch.tensor(slots), items, num_items, None, num_rows, target,
        window, most_cut, NUM_KV_HEADS=num_kv_heads, HAS_WINDOW=window > 0, ALIGN=align, TILE=tile,
        HAS_SPLITS=has_splits, SHORT_DIVISOR=1,
    )  # fmt: skip
    listed = items[: int(num_items)].tolist()
    assert (items[int(num_items) :] == -1).all()
    assert sorted({row for row, *_ in listed}) == list(range(num_rows))
    partials = []
    for row, length in enumerate(lens):
        chunks = [item for item in listed if item[0] == row]
        assert [item[5] for item in chunks] == list(range(len(chunks)))
        assert all(item[3] == len(chunks) for item in chunks)
        assert all(item[6] == slots[row] for item in chunks)
        ends = [begin for _, begin, *_ in chunks] + [length]
        first_seen = max(0, length - window) if window else 0
        assert ends[0] == first_seen // align * align
        assert [item[2] for item in chunks] == ends[1:]
        assert all((begin - ends[0]) % tile == 0 for begin in ends[:-1])
        assert not has_splits or ends[1:-1] in ([], list(range(ends[0] + SPLIT, length, SPLIT)))
        if window:
            assert all(item[7] == first_seen for item in chunks)
        if len(chunks) > 1:
            partials += [item[4] + item[5] for item in chunks]
    assert sorted(partials) == list(range(len(partials)))
    assert len(partials) <= (1 if has_splits else 2) * most_cut
    assert num_rows > 1 or partials or (has_splits and window == 100) or window in (1, 100)
    first_of_row = [item[2] - item[1] for item in listed if item[5] == 0]
    rounded = [-(-max(size, 1) // tile) for size in first_of_row]
    assert rounded == sorted(rounded, reverse=True)


@pytest.mark.each
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("num_chunks", "longest"), [(1, 3000), (3, 40), (300, 20), (17, 500)])
def test_the_tiles_cover_every_row_once_longest_requests_first(num_chunks: int, longest: int, is_sorted: bool) -> None:
    """A sorted list has those first that see the most groups of 128 keys, and else the same order."""
    rng = random.Random(num_chunks)
    group, rows, num_decodes = 4, 64, 5
    counts = [rng.randint(1, longest) for _ in range(num_chunks)] + [0, 0]
    lens = [count + rng.choice([0, 0, rng.randint(0, 900)]) for count in counts[:num_chunks]] + [0, 0]
    padding = rng.choice([0, 7, 100])
    num_tokens = sum(counts) + padding
    starts = torch.tensor([*range(num_decodes), *(num_decodes + sum(counts[:i]) for i in range(len(counts) + 1))])
    slots = torch.tensor(rng.sample(range(1000), num_decodes + len(counts)))
    tiles = PrefillTiles(
        TileKey(group, rows, is_sorted=is_sorted),
        max_tokens=num_tokens,
        max_chunks=len(counts),
        device=torch.device("cpu"),
    )
    seq_lens = torch.tensor([9] * num_decodes + lens, dtype=torch.int32)
    tiles.plan(
        Chunks(query_start_loc=starts.int(), seq_lens=seq_lens, slots=slots, first=num_decodes, num_tokens=num_tokens)
    )
    num_tiles = int(tiles.num_items)
    assert num_tiles <= tiles.capacity <= tiles.items.shape[0]
    assert (tiles.items[num_tiles:] == 0).all()
    expected = []
    for i in sorted(range(len(counts)), key=lambda i: (-lens[i], i)):
        first_token = sum(counts[:i])
        own_tiles = -(-counts[i] * group // rows)
        fields = [int(slots[num_decodes + i]), first_token, counts[i], lens[i]]
        expected += [[fields[0], rows * tile, *fields[1:]] for tile in reversed(range(own_tiles))]
    expected += [[0, rows * tile, sum(counts), padding, 0] for tile in reversed(range(-(-padding * group // rows)))]
    if is_sorted:
        expected.sort(key=lambda tile: -groups_of_keys(tile, group, rows))
    assert tiles.items[:num_tiles, :5].tolist() == expected


def groups_of_keys(tile: list[int], group: int, rows: int) -> int:
    """How many groups of 128 keys the last row of a tile sees."""
    _, first_row, _, num_tokens, num_keys = tile[:5]
    last = min((first_row + rows - 1) // group, num_tokens - 1)
    return -(-max(num_keys - num_tokens + last + 1, 0) // 128)


@pytest.mark.parametrize("counts", [[1024] * 8, [1900, 2800, 1200, 2292]])
def test_programs_that_take_sorted_tiles_in_turns_have_equally_much_to_do(counts: list[int]) -> None:
    """132 programs take tiles as the kernel for Hopper does: in one direction, and then in the other. A tile costs as
    much as 4 groups of keys beside those that it sees."""
    key = TileKey(4, 128, is_sorted=True)
    tiles = PrefillTiles(key, max_tokens=sum(counts), max_chunks=len(counts), device=torch.device("cpu"))
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
    lens = torch.tensor(counts, dtype=torch.int32)
    slots = torch.arange(len(counts))
    tiles.plan(Chunks(query_start_loc=starts, seq_lens=lens, slots=slots, first=0, num_tokens=sum(counts)))
    costs = [
        groups_of_keys(tile, 4, 128) + 4 for tile in tiles.items[: int(tiles.num_items)].tolist() for _ in range(8)
    ]
    work = [0] * 132
    for item, cost in enumerate(costs):
        step, place = divmod(item, 132)
        work[place if step % 2 == 0 else 131 - place] += cost
    assert max(work) <= 1.05 * sum(costs) / 132
