"""The kernel for segments on Hopper GPUs: simulated on the CPU over lists of the planning kernels, as the assembler
sees it, how it is launched, and when it is chosen. On a GPU it is held to attention written out by
`tests/attention/test_segments.py`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_shapes import attention_shape
from gluon_simulator import Pointer, Simulator
from torch import Tensor

pytest.importorskip("triton")

from kernel_device import INTERPRETED_MARKS
from nvcli.kernels.segment_tables import SegmentTables
from nvcli.kernels.triton import hopper_prefill_kernel, hopper_segment_kernel
from nvcli.kernels.triton.prefill_choice import attends_segments, prefill_kernel
from nvcli.kernels.triton.segment_attention import SegmentAttention
from nvcli.kernels.triton.segment_work_list import SegmentWorkList

pytestmark = [*INTERPRETED_MARKS, pytest.mark.skipif(torch.cuda.is_available(), reason="it is a simulation")]
CPU = torch.device("cpu")


@dataclass
class Tree:
    """A segment of five blocks, others of two blocks and of one behind it, and rows behind each and behind none."""

    block_size: int
    last_segments: list[int]
    """Of each row; 0: none."""

    @property
    def segments(self) -> Tensor:
        blocks = torch.tensor([(0, 5), (5, 7), (5, 6)]) * self.block_size
        return torch.cat([blocks, torch.tensor([[0], [1], [1]])], dim=1)

    def columns(self, row: int) -> list[int]:
        """The blocks of the row's segments."""
        return {0: [], 1: [1, 2, 3, 4, 5], 2: [1, 2, 3, 4, 5, 6, 7], 3: [1, 2, 3, 4, 5, 8]}[self.last_segments[row]]

    def plan(self, planned: SegmentWorkList, own_keys: int) -> None:
        num_rows = len(self.last_segments)
        tables = SegmentTables.empty(1, 3, num_rows, CPU)
        tables.segments[0, 1:] = self.segments
        tables.slot_segments[0] = torch.tensor(self.last_segments)
        lens = [len(self.columns(row)) * self.block_size + own_keys for row in range(num_rows)]
        lens_tensor = torch.tensor(lens, dtype=torch.int32)
        planned.plan(lens_tensor, torch.arange(num_rows), tables.segments[0], tables.slot_segments[0])


def make_attention(heads: int, kv_heads: int, head_dim: int, block_size: int, max_rows: int) -> SegmentAttention:
    shape = attention_shape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    return SegmentAttention(shape, max_rows=max_rows, on_hopper=True)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "soft_cap", "programs", "work"),
    [(2, 4, 64, 64, 0.0, 5, (1000, 900)), (1, 5, 128, 128, 5.0, 4, (1000, 0)), (1, 64, 64, 192, 0.0, 4, (1, 1000))],
)
def test_attention(
    kv_heads: int, group: int, head_dim: int, block_size: int, soft_cap: float, programs: int, work: tuple[int, int]
) -> None:
    """Rows stand anywhere in the batch. What is not in their segments is NaN."""
    generator = torch.Generator().manual_seed(0)
    heads = kv_heads * group
    tree = Tree(block_size, [0, 1, 2, 3] * 10 + [0, 3])
    num_rows = len(tree.last_segments)
    planned = make_attention(heads, kv_heads, head_dim, block_size, num_rows + 3).work_list(None)
    tree.plan(planned, own_keys=3)
    tables = torch.zeros(num_rows, 9, dtype=torch.int32)
    for row in range(num_rows):
        tables[row, : len(tree.columns(row))] = torch.tensor(tree.columns(row))
    caches = torch.randn(2, 9, block_size, kv_heads, head_dim, generator=generator)
    caches[:, 0] = torch.nan
    q = torch.randn(num_rows, heads, head_dim, generator=generator)
    num_partials = int(planned.num_partials.sum())
    out, lse = torch.full((num_partials, heads, head_dim), torch.nan), torch.full((num_partials, heads), torch.nan)
    k_matrix, v_matrix = caches.reshape(2, -1, kv_heads * head_dim)
    module: Any = SimpleNamespace(**{**vars(hopper_prefill_kernel), **vars(hopper_segment_kernel)})
    Simulator(module, functions={"gdc_launch_dependents": lambda: None}).launch(
        "hopper_segment_kernel",
        programs,
        Pointer(q.flatten()),
        k_matrix,
        v_matrix,
        Pointer(v_matrix.flatten()),
        Pointer(tables.flatten()),
        Pointer(planned.items.flatten()),
        Pointer(planned.num_items),
        Pointer(torch.tensor(work)),
        Pointer(planned.members.flatten()),
        Pointer(planned.first_partials.flatten()),
        Pointer(out.view(-1)),
        Pointer(lse.view(-1)),
        math.log2(math.e) / math.sqrt(head_dim),
        heads * head_dim,
        tables.shape[1],
        NUM_KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=block_size,
        SOFT_CAP=soft_cap * math.log2(math.e),
    )
    lse = lse * math.log(2)
    for row in range(num_rows):
        first, count = int(planned.first_partials[0, row]), int(planned.num_partials[row])
        assert (count > 0) == (tree.last_segments[row] > 0)
        if count == 0:
            continue
        keys, values = caches[:, tree.columns(row)].flatten(1, 2).repeat_interleave(group, dim=2)
        scores = torch.einsum("hd,khd->hk", q[row], keys) / math.sqrt(head_dim)
        scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
        results = slice(first, first + count)
        merged = torch.einsum("ph,phd->hd", lse[results].softmax(0), out[results])
        expected = torch.einsum("hk,khd->hd", scores.softmax(1), values)
        torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse[results].logsumexp(0), scores.logsumexp(1), atol=1e-4, rtol=1e-4)


def test_what_there_is_to_do_is_counted() -> None:
    """By it the multiprocessors are shared out. A tile that has few rows counts as any other."""
    planned = make_attention(8, 2, 64, 64, 70).work_list(None)
    for last_segments, own_keys, of_tiles in (([2] * 64, 7, 2 * 448), ([1] * 3 + [3], 1, 320 + 64), ([0] * 5, 9, 0)):
        tree = Tree(64, last_segments)
        for _ in range(2):
            tree.plan(planned, own_keys)
        num_items = int(planned.num_items)
        assert planned.work.tolist() == [of_tiles + num_items * 256, len(last_segments) * own_keys]


def test_segments_whose_rows_fill_their_tiles_take_the_keys_before_them() -> None:
    """Such rows have one result for both, and the others one for each."""
    tree = Tree(64, [2] * 64 + [3] * 33 + [1] * 5)  # 33 rows of a tile for 32 would leave 31 of a second one empty
    planned = make_attention(8, 2, 64, 64, 110).work_list(None)
    planned.num_programs = 2
    tree.plan(planned, own_keys=5)
    assert planned.num_partials[: len(tree.last_segments)].tolist() == [1] * 64 + [2] * 33 + [1] * 5
    items = planned.items[: int(planned.num_items)].tolist()
    tiles = sorted((num_rows, begin, end) for _, _, num_rows, begin, end, _, _, _ in items)
    joined = [(32, 0, 448)] * 2
    assert tiles == sorted([*joined, (32, 0, 320), (6, 0, 320), (32, 320, 384), (1, 320, 384)])


def test_launches() -> None:
    """The rows' own keys may begin before segments have ended, and what merges both may not."""
    script = Path(__file__).with_name("hopper_segments_compile.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == ["hopper_segment_kernel", "decode_attention_kernel", "merge_segments_kernel"] * 2
    assert found["early"] == [False, True, False] * 2
    assert "Performance Loss" not in found["report"], "ptxas waits for each matrix product"


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"num_heads": 258}, False),  # a tile of 128 has no room for one row's heads
        ({"kv_dtype": torch.float8_e4m3fn}, False),
        ({"has_window": True}, False),
        ({"block_size": 16}, False),
    ],
)
def test_choice(change: dict[str, Any], serves: bool) -> None:
    has_window = change == {"has_window": True}
    shape = attention_shape(**{"head_dim": 128, **({} if has_window else change)})
    options = {"has_window": has_window, "batch_invariant": False, "has_plain_blocks": True}
    for capability, expected in (((9, 0), serves), ((8, 0), False)):
        with (
            patch.object(torch.cuda, "get_device_capability", return_value=capability),
            patch("triton.__version__", "3.6.0"),
            patch.object(torch.cuda, "get_device_properties"),
        ):
            kernel, _ = prefill_kernel(shape, scratch_tokens=128, **options)
        assert attends_segments(kernel) == expected
