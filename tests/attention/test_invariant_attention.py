"""Attention of batch-invariant runs: right, and the same bits whether a token is decoded or stands in any chunk.

The Triton kernel is interpreted on a CPU and compiled on a GPU, where its tiles of few and of many queries take other
instructions.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_setup import Bench, History

from combinations import full
from kernel_device import DEVICE, HAS_GPU, INTERPRETED_MARKS
from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, BatchShape
from nvcli.attention.row_by_row_backend import RowByRowBackend
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.triton.attention.decode_work_list import SPLIT
from ordered_products import products_in_one_order

pytestmark = [pytest.mark.gpu] if HAS_GPU else INTERPRETED_MARKS
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32

__all__ = ["products_in_one_order"]


def triton_backend(case: AttentionCase) -> AttentionBackend:
    return TritonBackend(replace(case, batch_invariant=True))


def make_bench(backend: type[AttentionBackend], **geometry: Any) -> Bench:
    bench = Bench(triton_backend if backend is TritonBackend else backend, dtype=DTYPE, device=DEVICE.type, **geometry)
    bench.leave_garbage(float("nan"))  # what an earlier owner left must not be read
    return bench


BACKENDS = pytest.mark.parametrize("backend", [TritonBackend, RowByRowBackend])


@pytest.mark.each
@BACKENDS
@pytest.mark.parametrize(
    "geometry",
    [
        {"head_dim": 64, "ratio": 3, "block_size": 24},
        {"head_dim": 64, "ratio": 2, "windows": (5, 40, None), "block_size": 16},
        {"head_dim": 32, "num_kv_heads": 2, "windows": (700, None), "has_sinks": True, "soft_cap": 0.7},
        {"head_dim": 80, "value_dim": 64, "has_values": False, "ratio": 5, "block_size": 16},
        {"head_dim": 48, "value_dim": 32, "ratio": 3, "block_size": 16},
        full({"head_dim": 576, "value_dim": 512, "has_values": False, "ratio": 20, "block_size": 64}),
        full({"head_dim": 576, "value_dim": 512, "has_values": False, "ratio": 64, "block_size": 64}),
    ],
    ids=str,
)
def test_steps_of_all_kinds(backend: type[AttentionBackend], geometry: dict[str, Any]) -> None:
    bench = make_bench(backend, num_tokens=2000, **geometry)
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 33), (d, 65))
    bench.step((a, 1), (c, 1), (b, 20), (d, 31))
    bench.fill(d, 500)
    bench.step((d, 1), (c, 1), (a, 1), (b, 2))
    bench.step((a, 1), (d, 1), shape=BatchShape(decode_rows=4, prefill_rows=2, prefill_tokens=10))
    bench.step((a, 1), (b, 1), (d, 30), shape=BatchShape(decode_rows=3, prefill_rows=2, prefill_tokens=33))


def bits_of_last_tokens(
    backend: type[AttentionBackend], history: int, cuts: list[int], geometry: dict[str, Any]
) -> Any:
    """The results of the tokens behind a history, computed in chunks of these sizes beside other requests."""
    bench = make_bench(backend, num_tokens=4000, **geometry)
    target = History()
    if history:
        bench.fill(target, history)
    queries = [bench.random(sum(cuts), spec.num_heads, spec.head_dim) for spec in bench.specs]
    stored = [bench.random_qkv(sum(cuts), spec)[1:] for spec in bench.specs]
    others = random.Random(len(cuts))
    results: list[list[torch.Tensor]] = [[] for _ in bench.specs]
    done = 0
    for size in cuts:
        companions = []
        for length in others.choices([3, 40, 90], k=others.randint(0, 2)):
            companions.append(History())
            bench.fill(companions[-1], length)
        work = [(target, size), *((companion, 1) for companion in companions)]
        work.sort(key=lambda one: one[1] != 1 or one[0].state.length == 0)  # decode rows come first
        step = bench.batch(*work)
        start = step.starts[[history for history, _ in work].index(target)]
        rows = slice(done, done + size)
        for spec, (q, _, _), query, (k, v) in zip(bench.specs, step.inputs, queries, stored, strict=True):
            q[start : start + size] = query[rows]
            places = step.batch.slot_mapping[spec.kv_group][start : start + size]
            bench.store(spec.kv_group, places, k[rows], v[rows])
        for found, out in zip(results, step.forward(), strict=True):
            found.append(out[start : start + size].clone())
        done += size
    return [torch.cat(found) for found in results]


@pytest.mark.pairwise
@BACKENDS
@pytest.mark.parametrize("history", [0, SPLIT.value - 12])
@pytest.mark.parametrize(
    "geometry",
    [
        {"num_kv_heads": 2, "ratio": 2, "block_size": 64},
        {"ratio": 3, "windows": (300, None), "has_sinks": True},
        {"head_dim": 80, "value_dim": 64, "has_values": False, "ratio": 5},
        full({"head_dim": 576, "value_dim": 512, "has_values": False, "ratio": 20, "block_size": 64}),
    ],
    ids=str,
)
def test_chunks_and_companions_do_not_show_in_the_bits(
    backend: type[AttentionBackend], history: int, geometry: dict[str, Any]
) -> None:
    whole = bits_of_last_tokens(backend, history, [30], geometry)
    for found, expected in zip(bits_of_last_tokens(backend, history, [13, 1, 1, 15], geometry), whole, strict=True):
        assert torch.equal(found, expected)


def test_a_row_that_is_cut_has_the_bits_of_one_that_is_not() -> None:
    """A lone long row is cut into its splits, and among many rows as long it is not."""
    bench = make_bench(TritonBackend, ratio=2, block_size=64, num_tokens=15_000, windows=(None, 530), has_sinks=True)
    histories = [History() for _ in range(18)]
    for history in histories:
        bench.fill(history, 600)
    step = bench.batch(*((history, 1) for history in histories))
    together = step.forward()
    step.check(together)
    backend, batch = bench.backend, step.batch
    alone = replace(batch, shape=BatchShape(decode_rows=1), seq_lens=batch.seq_lens[7:8], slots=batch.slots[7:8])
    backend.plan(alone)
    backend.plan_on_device(alone)
    for _ in range(2):  # layer after layer
        for spec, layer, (q, _, v), expected in zip(bench.specs, bench.layers, step.inputs, together, strict=True):
            out = backend.forward(AttentionLayer(spec, layer, bench.sinks), q[7:8], None, v[7:8], alone)
            assert torch.equal(out[0], expected[7])
