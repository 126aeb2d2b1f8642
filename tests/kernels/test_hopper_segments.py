"""The kernel for segments on Hopper, simulated on the CPU, over lists of the planning kernels. On a GPU it is held to
attention written out by `tests/attention/test_segments.py`."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from gluon_simulator import Pointer, Simulator

pytest.importorskip("triton")

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels.segment_tables import SegmentTables
from nvcli.kernels.triton import hopper_prefill_kernel, hopper_segment_kernel
from nvcli.kernels.triton.hopper_segments import HopperSegmentAttention
from nvcli.kernels.triton.segment_work_list import TILE_FIELDS, SegmentWorkList

pytestmark = MARKS


def make_list(
    segments: list[tuple[int, int, int]], last_segments: list[int], lens: list[int], group: int, block_size: int
) -> SegmentWorkList:
    """Plan rows in slots 0, 1, …; segments: (begin, end, parent), numbered from 1."""
    kind = {"num_heads": group, "num_kv_heads": 1, "head_dim": 64, "block_size": block_size}
    attention = HopperSegmentAttention(**kind, dtype=torch.float32, device=DEVICE, max_rows=len(lens) + 3)
    planned = attention.work_list(None)
    tables = SegmentTables.empty(1, len(segments), len(lens), DEVICE)
    tables.segments[0, 1:] = torch.tensor(segments)
    tables.slot_segments[0] = torch.tensor(last_segments)
    planned.plan(
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        torch.arange(len(lens), device=DEVICE),
        tables.segments[0],
        tables.slot_segments[0],
    )
    return planned


@pytest.mark.skipif(HAS_GPU, reason="it is a simulation")
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "soft_cap", "programs"),
    [(2, 4, 64, 64, 0.0, 3), (1, 5, 128, 128, 5.0, 9), (1, 64, 64, 192, 0.0, 4)],
)
def test_attention(kv_heads: int, group: int, head_dim: int, block_size: int, soft_cap: float, programs: int) -> None:
    """Of rows behind two levels of segments, anywhere in the batch. What is not a segment's is NaN."""
    generator = torch.Generator().manual_seed(0)
    ends = [5, 7, 6]  # blocks: one segment, two others behind it
    segments = [(0, 5 * block_size, 0), (5 * block_size, 7 * block_size, 1), (5 * block_size, 6 * block_size, 1)]
    num_rows = 45
    rows_of = [0, 1, 2, 3] * 11 + [0]
    tables = torch.randperm(6 + 5 * num_rows, generator=generator)[: num_rows * 8].view(-1)[: 5 * num_rows]
    shared = torch.arange(8) + 1
    behind = {1: [], 2: [5, 6], 3: [7]}
    tables = torch.full((num_rows, 9), 0, dtype=torch.int32)
    for row, last in enumerate(rows_of):
        if last:
            columns = [*range(5), *behind[last]]
            tables[row, : len(columns)] = shared[columns].int()
    caches = torch.randn(2, 9, block_size, kv_heads, head_dim, generator=generator)
    caches[:, 0] = torch.nan
    lens = [(ends[last - 1] if last else 0) * block_size + 1 + row for row, last in enumerate(rows_of)]
    planned = make_list(segments, rows_of, lens, group, block_size)
    heads = kv_heads * group
    q = torch.randn(num_rows, heads, head_dim, generator=generator)
    num_partials = int(planned.num_partials.sum())
    out = torch.full((num_partials, heads, head_dim), torch.nan)
    lse = torch.full((num_partials, heads), torch.nan)
    k_matrix, v_matrix = caches.reshape(2, -1, kv_heads * head_dim)
    Simulator(
        SimpleNamespace(
            **vars(hopper_prefill_kernel), hopper_segment_kernel=hopper_segment_kernel.hopper_segment_kernel
        ),
        functions={"gdc_launch_dependents": lambda: None},
    ).launch(
        "hopper_segment_kernel",
        programs,
        Pointer(q.flatten()),
        k_matrix,
        v_matrix,
        Pointer(v_matrix.flatten()),
        Pointer(tables.flatten()),
        Pointer(planned.items.flatten()),
        Pointer(planned.num_items),
        Pointer(planned.num_beside),
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
        TILE_FIELDS=TILE_FIELDS,
    )
    print(planned.num_items, planned.num_beside, planned.num_partials)
    for row, last in enumerate(rows_of):
        first, count = int(planned.first_partials[0, row]), int(planned.num_partials[row])
        assert (count > 0) == (last > 0)
        if not last:
            continue
        columns = shared[[*range(5), *behind[last]]]
        keys, values = (x[columns].flatten(0, 1).repeat_interleave(group, 1) for x in caches)
        scores = torch.einsum("hd,khd->hk", q[row], keys) / math.sqrt(head_dim)
        scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
        expected = torch.einsum("hk,khd->hd", scores.softmax(1), values)
        mine = slice(first, first + count)
        merged = torch.einsum("ph,phd->hd", (lse[mine] * math.log(2)).softmax(0), out[mine])
        torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close((lse[mine] * math.log(2)).logsumexp(0), scores.logsumexp(1), atol=1e-4, rtol=1e-4)
