"""Chunks over an FP8 cache that attend to copies of its keys in 16 bits, and those whose keys find no room there."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_setup import Bench as AnyBench
from attention_setup import History

from combinations import full
from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.attention import triton_kernels
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention import prefill_choice, prefill_scratch
from nvcli.kernels.triton.attention.attention_launch import AttentionShape
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention
from nvcli.kernels.triton.attention.prefill_scratch import UNIT as UNIT_KEYS
from nvcli.kernels.triton.attention.prefill_scratch import ScratchPrefillAttention, ScratchTiles
from nvcli.kernels.triton.attention.prefill_tiles import Chunks, TileKey

pytestmark = MARKS
__all__ = ["exact_conversions"]
UNIT: int = UNIT_KEYS.value
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


def scratch_kernel(
    shape: AttentionShape, *, has_window: bool, scratch_tokens: int, **options: object
) -> tuple[Any, list[str]]:
    """Make the kernel that a Hopper GPU takes. Without a GPU the usual one attends to the copies."""
    if has_window:
        return PrefillAttention(shape), []
    usual = patch.object(prefill_scratch, "PrefillAttention", lambda shape, kind=None: PrefillAttention(shape))
    with nullcontext() if HAS_GPU else usual:
        return ScratchPrefillAttention(shape, scratch_tokens=scratch_tokens), []


@pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "ratio", "block_size", "options", "scratch_tokens"),
    [
        full((64, 3, 1, 64, {"soft_cap": 0.7}, 6 * UNIT), in_parts=True),
        (64, 3, 1, 64, {"soft_cap": 0.7}, 64 * UNIT),
        (128, 2, 4, 128, {"windows": (40, None), "has_sinks": True}, 6 * UNIT),
        full((128, 2, 4, 128, {"windows": (40, None), "has_sinks": True}, 64 * UNIT), in_parts=True),
    ],
)
def test_steps(
    head_dim: int, num_kv_heads: int, ratio: int, block_size: int, options: dict[str, Any], scratch_tokens: int
) -> None:
    """All kinds of steps, with room for some of their keys or for all; the garbage of earlier owners does not count."""
    with (
        patch.object(prefill_choice, "prefill_kernel", scratch_kernel),
        patch.object(triton_kernels, "scratch_tokens", return_value=scratch_tokens),
    ):
        bench = AnyBench(
            TritonBackend, head_dim=head_dim, num_kv_heads=num_kv_heads, ratio=ratio, block_size=block_size,
            dtype=DTYPE, kv_dtype=FP8, device=str(DEVICE), **options,
        )  # fmt: skip
    bench.leave_garbage(float("nan"))
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 70))
    bench.fill(c, 150)
    bench.step((a, 1), (c, 1), (b, 20))
    shape = BatchShape(decode_rows=4, prefill_rows=4, prefill_tokens=147)
    bench.step((a, 1), (b, 1), (c, 40), (d, 100), shape=shape)  # 5 units, and 2
    bench.step((a, 4), (b, 4), shape=BatchShape(decode_rows=2, tokens_per_row=4))


@pytest.mark.parametrize(("num_chunks", "longest"), [(1, 900), full((5, 700), in_parts=True), (40, 90)])
def test_plan(num_chunks: int, longest: int) -> None:
    """Copied tiles are those at the head of the list, every one as it stands there but for the place of its keys; units
    are listed once for each chunk, side by side; who is left out would have found no room."""
    rng = random.Random(num_chunks)
    group, rows = 4, 32
    counts = [rng.randint(1, longest) for _ in range(num_chunks)] + [0]
    lens = [count + rng.choice([0, rng.randint(0, 900)]) for count in counts[:-1]] + [0]
    slots = torch.tensor(rng.sample(range(1000), len(counts)), device=DEVICE)
    needed = sum(-(-keys // UNIT) for keys in lens)
    padding = 45
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=DEVICE)
    seq_lens, num_tokens = torch.tensor(lens, dtype=torch.int32, device=DEVICE), sum(counts) + padding
    chunks = Chunks(query_start_loc=starts, seq_lens=seq_lens, slots=slots, first=0, num_tokens=num_tokens)
    for num_units in (1, needed - 1, needed):
        key = TileKey(group, rows, scratch_units=max(num_units, 1))
        tiles = ScratchTiles(key, max_tokens=num_tokens, max_chunks=len(counts), device=DEVICE)
        for _ in range(2):  # nothing remains of a step before
            tiles.plan(chunks)
        assert tiles.num_before is not None
        num_copied, num_listed = int(tiles.num_before), int(tiles.num_units)
        listed, copied = tiles.items.tolist(), tiles.copied.items.tolist()
        held, place = [], 0
        for i in sorted(range(len(counts)), key=lambda i: (-lens[i], i)):
            own = -(-lens[i] // UNIT)
            if place + own > num_units:
                break
            held += [[int(slots[i]), unit] for unit in range(own)]
            place += own
        assert num_listed == len(held)
        assert tiles.units[:num_listed].tolist() == held
        assert (num_copied == int(tiles.num_items)) == (num_units >= needed), "padding comes last"
        moved = [[held.index([tile[0], 0]) if tile[4] else 0, *tile[1:]] for tile in listed[:num_copied]]
        assert sorted(copied[:num_copied]) == sorted(moved)
        if num_copied < int(tiles.num_items):
            left = listed[num_copied]
            assert left[4] == 0 or place + -(-left[4] // UNIT) > num_units
