"""A KV cache in FP8: every backend that takes it attends to the numbers that were stored, and to no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_setup import Bench as AnyBench
from attention_setup import History, written_out
from segment_trees import SegmentTree
from torch import Tensor

from gluon_registers import RegisterSimulator, block
from gluon_simulator import SimulatedKernel
from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.spec import AttentionSpec
from nvcli.attention.torch_backend import TorchBackend
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention import attention_launch, decode_attention, fp8_decode_attention
from nvcli.kernels.triton.launch.triton_version import has_known_gluon

# Compiled kernels are for 16 bits, and most of what is interpreted is in float32.
Bench = partial(AnyBench, device=str(DEVICE), dtype=torch.bfloat16 if HAS_GPU else torch.float32, kv_dtype=FP8)
pytestmark = MARKS


@pytest.fixture(params=[TorchBackend, TritonBackend])
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    kind: type[AttentionBackend] = request.param
    return kind


def run_all_kinds_of_steps(bench: AnyBench) -> None:
    """Prompts, chunks behind a prefix, decode rows, padding, and rows of several tokens."""
    a, b, c = (History() for _ in range(3))
    bench.step((a, 1), (b, 15), (c, 70))
    bench.fill(c, 150)
    bench.step((a, 1), (c, 1), (b, 20))
    bench.step((a, 1), (b, 1), (c, 40), shape=BatchShape(decode_rows=4, prefill_rows=2, prefill_tokens=47))
    bench.step((a, 4), (b, 4), shape=BatchShape(decode_rows=2, tokens_per_row=4))


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "ratio", "block_size"),
    [(64, 2, 1, 64), (128, 2, 4, 16), (16, 3, 2, 1), (512, 1, 2, 24)],
)
def test_shapes(backend: type[AttentionBackend], head_dim: int, num_kv_heads: int, ratio: int, block_size: int) -> None:
    """Head sizes, and blocks that hold whole tiles of keys, parts of them, or one token; what an earlier owner left
    must not count, scales that are NaN included."""
    bench = Bench(
        backend,
        num_kv_heads=num_kv_heads,
        ratio=ratio,
        head_dim=head_dim,
        block_size=block_size,
    )
    if not bench.backend.reads_behind_rows:
        bench.leave_garbage(float("nan"))
    run_all_kinds_of_steps(bench)


@pytest.mark.parametrize(
    ("head_dim", "ratio", "block_size", "sizes"),
    [
        (80, 5, 16, {"value_dim": 64, "has_values": False}),
        (192, 3, 64, {"value_dim": 128, "has_values": False}),
        (48, 3, 16, {"value_dim": 32, "num_kv_heads": 2}),
    ],
)
def test_values_of_another_size(
    backend: type[AttentionBackend], head_dim: int, ratio: int, block_size: int, sizes: dict[str, Any]
) -> None:
    """Keys whose first numbers are their values, with one scale, and values that are smaller than their keys."""
    bench = Bench(backend, ratio=ratio, head_dim=head_dim, block_size=block_size, **sizes)
    if not bench.backend.reads_behind_rows:
        bench.leave_garbage(float("nan"))
    run_all_kinds_of_steps(bench)


def test_windows_soft_caps_and_sinks(backend: type[AttentionBackend]) -> None:
    bench = Bench(
        backend,
        num_kv_heads=2,
        ratio=2,
        windows=(40, None),
        soft_cap=0.7,
        has_sinks=True,
        num_tokens=2000,
    )
    run_all_kinds_of_steps(bench)


def test_groups_of_other_head_sizes(backend: type[AttentionBackend]) -> None:
    """A block of one shape, scales included, lies where one of another shape would."""
    bench = Bench(
        backend,
        num_kv_heads=2,
        ratio=2,
        windows=(40, None),
        head_dims=(32, 64),
        num_tokens=2000,
    )
    assert not bench.kv_cache.spec.is_uniform
    run_all_kinds_of_steps(bench)


def test_scales_in_place() -> None:
    """Scales are loaded in place where Triton cannot load them ahead."""
    with patch.object(attention_launch, "_loads_ahead", lambda device: False):
        run_all_kinds_of_steps(Bench(TritonBackend, num_kv_heads=2, ratio=2, windows=(40, None), num_tokens=2000))


@pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() < (8, 9) or not has_known_gluon(),
    reason="needs a GPU with FP8 units and the version of Triton that was tried there",
)
@pytest.mark.parametrize("num_rows", [33, 200, 600])
@pytest.mark.parametrize(
    "geometry",
    [
        {"num_kv_heads": 2, "ratio": 4, "head_dim": 128},
        {"num_kv_heads": 8, "ratio": 4, "head_dim": 128},
        {"num_kv_heads": 1, "ratio": 16, "head_dim": 128},
        {"num_kv_heads": 2, "ratio": 12, "head_dim": 128},
        {"num_kv_heads": 1, "ratio": 8, "head_dim": 64, "windows": (50, None), "soft_cap": 5.0, "has_sinks": True},
        {"num_kv_heads": 3, "ratio": 1, "head_dim": 128, "windows": (33, None), "has_sinks": True, "block_size": 192},
    ],
    ids=str,
)
def test_many_decode_rows(geometry: dict[str, Any], num_rows: int) -> None:
    """Many rows have a kernel of their own: rows of few keys, of whole and partial tiles, and long ones, cut."""
    lengths = [*random.Random(num_rows).choices([1, 5, 31, 63, 64, 100, 200, 300], k=num_rows - 3), 900, 2000, 5000]
    # Each request's blocks, and those of the token that follows.
    room = sum(length + 1 + 192 for length in lengths)
    bench = Bench(TritonBackend, **{"block_size": 64, **geometry}, num_tokens=room, max_num_seqs=1024)
    bench.leave_garbage(float("nan"))
    histories = [History() for _ in lengths]
    for history, length in zip(histories, lengths, strict=True):
        bench.fill(history, length)
    work = [(history, 1) for history in histories]
    with patch.object(decode_attention, "decode_attention_kernel", None):
        bench.step(*work)
        bench.step(*work, shape=BatchShape(decode_rows=num_rows + 7))


class FarApart(AnyBench):
    """A bench whose scores are far apart, so that some tiles have one that is far above all before, and of whose values
    some are zero."""

    def random_qkv(self, num_tokens: int, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().random_qkv(num_tokens, spec)
        v[::7] = 0
        return q * 5, k, v


def numbers(words: Tensor) -> tuple[Tensor, ...]:
    codes = words.contiguous().as_subclass(Tensor).view(torch.uint8).view(FP8)
    return tuple(block(x) for x in codes.half().unflatten(-1, (-1, 4)).unbind(-1))


@pytest.mark.skipif(HAS_GPU, reason="the kernel runs here")
@pytest.mark.each
@pytest.mark.parametrize("kind", [partial(AnyBench, max_shared_rows=8), FarApart])
@pytest.mark.parametrize(
    ("many_rows", "geometry"),
    [
        (512, {"num_kv_heads": 2, "ratio": 4, "head_dim": 128}),
        (0, {"num_kv_heads": 1, "ratio": 4, "head_dim": 128, "has_sinks": True}),
        (512, {"ratio": 8, "windows": (50,), "soft_cap": 5.0, "has_sinks": True}),
        (512, {"num_kv_heads": 3, "head_dim": 128, "windows": (33,), "has_sinks": True, "block_size": 192}),
        (0, {"num_kv_heads": 1, "ratio": 2}),
        (0, {"num_kv_heads": 1, "ratio": 12}),
    ],
)
def test_decode_rows_straight_to_registers(kind: Callable[..., AnyBench], many_rows: int, geometry: Any) -> None:
    """Simulated: rows of one chunk and of several, clusters of chunks, padding, and rows behind segments that they
    share. What belongs to no key is NaN."""
    functions = {
        "numbers_of_bytes": lambda words, pack: numbers(words),
        "_log2": torch.log2,
        "_transposed": lambda x: block(
            x.unflatten(1, (-1, 8)).unflatten(0, (-1, 8)).transpose(1, 3).flatten(2).flatten(0, 1)
        ),
    }
    simulator = RegisterSimulator(fp8_decode_attention, functions=functions)
    kernel = SimulatedKernel(simulator, "fp8_decode_attention_kernel")
    with (
        patch.multiple(decode_attention, _FEWEST_ROWS=[(16, 0)], _MANY_ROWS=many_rows, decode_attention_kernel=None),
        patch.object(decode_attention, "_load_direct_kernel", lambda *args: kernel),
        patch.multiple(fp8_decode_attention, _MOST_CHUNKS=2, _CLUSTER=2),
    ):
        bench = kind(TritonBackend, **{"block_size": 64, **geometry}, dtype=torch.float16, kv_dtype=FP8)
        bench.leave_garbage(float("nan"))
        tree = SegmentTree(bench)
        segment = tree.segment(None, 3)
        requests = [tree.request(segment, count) for count in (1, 9, 140)]
        for count in (0, 63, 200, 332):
            requests.append(History())
            bench.fill(requests[-1], count)
        step = bench.batch(*((history, 1) for history in requests), shape=BatchShape(decode_rows=len(requests) + 1))
        step.check(step.forward())
        if kind is not FarApart:
            step = tree.share(step)
            step.check(step.forward())


class OfAnySize(AnyBench):
    """A bench whose queries and values differ in size by factors up to 4,096, from token to token."""

    def random_qkv(self, num_tokens: int, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().random_qkv(num_tokens, spec)
        powers = torch.randint(-12, 1, (2, num_tokens, 1, 1), generator=self.generator, device=self.device)
        q_size, v_size = torch.exp2(powers).to(self.dtype)
        return q * q_size, k, v * v_size


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_chunks_of_small_values_keep_their_weights(soft_cap: float | None) -> None:
    """Weights are multiplied in float16, with values whose scales may be smaller than its numbers."""
    with patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        bench = OfAnySize(
            TritonBackend, num_kv_heads=2, ratio=2, windows=(40, None), soft_cap=soft_cap, has_sinks=True,
            dtype=torch.float16, kv_dtype=FP8, device=str(DEVICE),
        )  # fmt: skip
    history = History()
    bench.fill(history, 150)
    step = bench.batch((history, 30))
    for spec, out, (q, _, _) in zip(bench.specs, step.forward(), step.inputs, strict=True):
        keys, values = torch.cat(history.keys[spec.kv_group]), torch.cat(history.values[spec.kv_group])
        exact = written_out(q, keys, values, spec, bench.sinks)
        errors = (out - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert float(errors.max()) < 0.002


@pytest.mark.skipif(HAS_GPU, reason="on a GPU, Triton serves it in the model's type")
def test_bfloat16_beneath_float32() -> None:
    """The cache may keep another type without scales."""
    bench = Bench(TorchBackend, num_kv_heads=2, ratio=2, windows=(40, None), num_tokens=2000, kv_dtype=torch.bfloat16)
    run_all_kinds_of_steps(bench)


@pytest.mark.parametrize("heads", [((2, 64), (2, 64)), ((2, 64), (1, 128))], ids=["uniform", "two shapes"])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_a_lone_block_lies_as_blocks_of_a_pool_do(
    kv_dtype: torch.dtype | None, heads: tuple[tuple[int, int], ...]
) -> None:
    """A warm-up has one block, and what it compiles is for the pool."""
    spec = KVCacheSpec(
        group_layers=((0, 1), (2,)), group_heads=heads, block_size=16, dtype=torch.bfloat16, kv_dtype=kv_dtype
    )
    one, two = (KVCache(spec, num_blocks, torch.device("cpu")) for num_blocks in (1, 2))
    for layer in range(3):
        assert [part.stride() for part in one.layer(layer)] == [part.stride() for part in two.layer(layer)]
