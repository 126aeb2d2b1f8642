"""Decode rows of several tokens, which are the last one and drafts: every token gets what it would get in a chunk, or
alone. On a GPU the kernels are compiled; without one they run in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from attention_setup import TOLERANCE, Bench, History, Step
from segment_trees import random_tree
from simulated_hopper import SimulatedHopper
from torch import Tensor

from combinations import full
from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, BatchShape
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.fp8_types import FP8
from ordered_products import products_in_one_order

pytestmark = MARKS
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32

__all__ = ["products_in_one_order"]


def invariant(case: AttentionCase) -> AttentionBackend:
    return TritonBackend(replace(case, batch_invariant=True))


def forward_of_counts(step: Step, counts: list[int]) -> tuple[list[Tensor], Tensor]:
    """Attend a step once more with the first tokens alone of each row, as many as `counts` says, side by side. Return
    the results and which tokens of the step they belong to."""
    batch, width = step.batch, step.batch.shape.tokens_per_row
    kept = torch.tensor([row * width + token for row, count in enumerate(counts) for token in range(count)])
    kept = kept.to(batch.slots.device)
    lens, starts = torch.tensor(counts), torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    short = replace(
        batch,
        seq_lens=batch.seq_lens - (width - lens).to(batch.seq_lens),
        query_start_loc=starts.to(batch.slots.device),
    )
    backend = step.bench.backend
    backend.plan(short)
    backend.plan_on_device(short)
    outs = []
    for spec, layer, (q, _, v) in zip(step.bench.specs, step.bench.layers, step.inputs, strict=True):
        packed = torch.zeros_like(q)
        packed[: len(kept)] = q[kept]
        outs.append(backend.forward(AttentionLayer(spec, layer, step.bench.sinks), packed, None, v, short)[: len(kept)])
    return outs, kept


GEOMETRIES: list[Any] = [
    full((4, {"num_kv_heads": 2, "ratio": 3, "block_size": 64}), in_parts=True),
    (8, {"ratio": 16, "block_size": 32, "has_sinks": True, "windows": (None, 40)}),
    (3, {"num_kv_heads": 2, "block_size": 24, "windows": (1, 700), "soft_cap": 0.7}),
    (4, {"num_kv_heads": 2, "ratio": 4, "block_size": 64, "windows": (None, 100), "kv_dtype": FP8}),
    full(
        (
            3,
            {
                "num_kv_heads": 2,
                "ratio": 2,
                "head_dim": 128,
                "windows": (70, None),
                "has_sinks": True,
                "soft_cap": 0.7,
                "block_size": 64,
                "kv_dtype": FP8,
            },
        ),
        in_parts=True,
    ),
    full(
        (5, {"num_kv_heads": 2, "ratio": 4, "block_size": 64, "windows": (None, 100), "kv_dtype": FP8}), in_parts=True
    ),
    full((2, {"ratio": 5, "head_dim": 128, "block_size": 16, "windows": (3, None)}), in_parts=True),
    full((8, {"ratio": 4, "head_dim": 256, "block_size": 64, "kv_dtype": FP8}), in_parts=True),
]


@pytest.mark.each
@pytest.mark.parametrize("backend", [TritonBackend, invariant])
@pytest.mark.parametrize(("width", "geometry"), GEOMETRIES, ids=str)
def test_rows_of_several_tokens(backend: Any, width: int, geometry: dict[str, Any]) -> None:
    """Short rows, long ones that are cut into many chunks, rows that end at the start of a chunk or of a tile of keys,
    rows of fewer tokens than others, and padding; layer after layer."""
    if backend is invariant and "kv_dtype" in geometry:
        pytest.skip("batch-invariant runs have no keys in FP8")
    bench = Bench(backend, dtype=DTYPE, device=DEVICE.type, num_tokens=6000, **geometry)
    bench.leave_garbage(float("nan"))
    rows = [History() for _ in range(4)]
    for history, length in zip(rows, (1, 64 - width, 511, 1100), strict=True):
        bench.fill(history, length)
    shape = BatchShape(decode_rows=5, tokens_per_row=width)
    step = bench.batch(*((history, width) for history in rows), shape=shape)
    for _ in range(2):
        outs = step.forward()
        step.check(outs)
    short, kept = forward_of_counts(step, [1, width, width - 1, 2, 0])
    for out, expected in zip(short, outs, strict=True):
        if backend is invariant:
            assert torch.equal(out, expected[kept])
        else:
            torch.testing.assert_close(out, expected[kept], atol=TOLERANCE[DTYPE], rtol=TOLERANCE[DTYPE])


@pytest.mark.parametrize(
    "geometry",
    [
        full({"num_kv_heads": 2, "ratio": 3, "block_size": 64}),
        {"ratio": 8, "windows": (600, None), "has_sinks": True},
        full({"head_dim": 576, "value_dim": 512, "has_values": False, "ratio": 20, "block_size": 64}),
    ],
    ids=str,
)
def test_drafts_have_the_bits_of_tokens_that_are_decoded_one_by_one(geometry: dict[str, Any]) -> None:
    """In a batch-invariant run, whether rows are cut into their splits or not."""
    width = 4
    bench = Bench(invariant, dtype=DTYPE, device=DEVICE.type, num_tokens=6000, **geometry)
    rows = [History() for _ in range(4)]
    for history, length in zip(rows, (30, 510, 600, 1100), strict=True):
        bench.fill(history, length)
    step = bench.batch(*((history, width) for history in rows), shape=BatchShape(decode_rows=4, tokens_per_row=width))
    together = step.forward()
    step.check(together)
    for token in range(width):
        alone = replace(step.batch, shape=BatchShape(decode_rows=4), seq_lens=step.batch.seq_lens - (width - 1 - token))
        bench.backend.plan(alone)
        bench.backend.plan_on_device(alone)
        for spec, layer, (q, _, v), expected in zip(bench.specs, bench.layers, step.inputs, together, strict=True):
            out = bench.backend.forward(
                AttentionLayer(spec, layer, bench.sinks), q[token::width], None, v[token::width], alone
            )
            assert torch.equal(out, expected[token::width])


@pytest.mark.parametrize("backend", [TritonBackend, SimulatedHopper])
@pytest.mark.parametrize(
    "geometry",
    [
        {"ratio": 4, "num_kv_heads": 2, "block_size": 64},
        full({"ratio": 3, "block_size": 16, "windows": (None, 50), "has_sinks": True}),
        {"ratio": 2, "block_size": 32, "windows": (90, None), "kv_dtype": FP8},
    ],
    ids=str,
)
def test_rows_that_share_segments(backend: Any, geometry: dict[str, Any]) -> None:
    """All tokens of all rows read a segment once."""
    if backend is SimulatedHopper and (HAS_GPU or "windows" in geometry):
        pytest.skip("the usual kernels serve it, or it runs compiled here")
    width, rng = 3, random.Random(0)
    bench = Bench(backend, dtype=DTYPE, device=DEVICE.type, num_tokens=4000, max_shared_rows=32, **geometry)
    bench.leave_garbage(float("nan"))
    tree, requests = random_tree(bench, rng, num_segments=4, most_blocks=3, num_rows=5)
    shape = BatchShape(decode_rows=len(requests) + 1, tokens_per_row=width)
    step = tree.share(bench.batch(*((request, width) for request in requests), shape=shape))
    for _ in range(2):
        outs = step.forward()
        step.check(outs)
    short, kept = forward_of_counts(step, [rng.randint(1, width) for _ in requests] + [0])
    for out, expected in zip(short, outs, strict=True):
        torch.testing.assert_close(out, expected[kept], atol=TOLERANCE[DTYPE], rtol=TOLERANCE[DTYPE])
