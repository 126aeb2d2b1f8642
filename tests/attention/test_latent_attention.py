"""Attention over latents as Hopper GPUs have it: its work list, and its kernel simulated on the CPU. On such a GPU
`test_gpu_backends.py` and `test_fp8_cache.py` run the kernel itself."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_setup import Bench, History
from torch import Tensor

from fp8_interpreter import exact_conversions
from gluon_simulator import SimulatedKernel, Simulator
from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels import chosen_keys
from nvcli.kernels.chosen_keys import TokenKeys, WindowKeys
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention import (
    decode_attention,
    hopper_latent_kernel,
    hopper_latent_loads,
    hopper_latent_results,
)
from nvcli.kernels.triton.attention.attention_launch import AttentionShape
from nvcli.kernels.triton.attention.latent_shares import HopperLatents, plan_shares_kernel, serves_latents

pytestmark = MARKS
not_on_gpu = pytest.mark.skipif(HAS_GPU, reason="it runs compiled there")
__all__ = ["exact_conversions"]


def numbers_of_words(words: Tensor, width: int) -> Tensor:
    return words.contiguous().view(FP8).float()


@contextmanager
def simulated() -> Iterator[None]:
    nothing = ("barrier", "gdc_wait", "gdc_launch_dependents")
    functions: dict[str, Any] = {"_numbers_of_words": numbers_of_words, "_opaque_zero": lambda number: 0}
    functions["_distance"] = lambda numbers, others: (others.data.data_ptr() - numbers.data.data_ptr()) // 4
    functions |= {name: lambda: None for name in nothing}
    name = "hopper_latent_kernel"
    modules = hopper_latent_kernel, hopper_latent_loads, hopper_latent_results
    kernel = SimulatedKernel(Simulator(*modules, functions=functions), name)
    with ExitStack() as patches:
        patches.enter_context(patch.object(decode_attention, "serves_latents", lambda shape: True))
        patches.enter_context(patch.object(hopper_latent_kernel, name, kernel))
        yield


class SimulatedLatents(TritonBackend):
    """It attends float32."""

    def __init__(self, case: AttentionCase) -> None:
        with simulated():
            super().__init__(case)


@not_on_gpu
@pytest.mark.parametrize(
    ("latent_dim", "tail_dims", "ratio", "block_size", "kv_dtype"),
    [
        (512, (64,), 3, 64, None),
        (64, (64,), 20, 128, FP8),
        (64, (0,), 3, 64, FP8),
        (64, (0,), 40, 64, None),
        (64, (64, 0), 20, 64, FP8),
        (64, (64, 0), 40, 64, None),
    ],
)
def test_steps(
    latent_dim: int, tail_dims: tuple[int, ...], ratio: int, block_size: int, kv_dtype: torch.dtype | None
) -> None:
    """Rows of one token and of several, in one tile of queries and in two; rows in several shares; padding; and what an
    earlier owner of a block left. Blocks that keys of two sizes share are not plain."""
    bench = Bench(
        SimulatedLatents,
        ratio=ratio,
        windows=(None,) * len(tail_dims),
        head_dims=tuple(latent_dim + tail_dim for tail_dim in tail_dims),
        value_dim=latent_dim,
        has_values=False,
        block_size=block_size,
        kv_dtype=kv_dtype,
    )
    bench.leave_garbage(float("nan"))
    a, b, c = (History() for _ in range(3))
    for history, num_tokens in ((a, 2), (b, 64), (c, 400)):
        bench.fill(history, num_tokens)
    bench.step((a, 1), (b, 1), (c, 1), shape=BatchShape(decode_rows=4))
    bench.step((c, 1))
    bench.step((b, 4), (c, 4), shape=BatchShape(decode_rows=3, tokens_per_row=4))


@pytest.mark.parametrize(
    ("num_heads", "tail_dim", "has_sinks", "window", "chooses"),
    [
        (20, 64, True, 0, True),
        (80, 64, False, 0, True),
        (80, 64, True, 0, True),
        (20, 0, False, 0, True),
        (80, 0, True, 0, True),
        (80, 0, True, 70, True),
        (20, 0, True, 70, False),
    ],
)
def test_chosen_keys(num_heads: int, tail_dim: int, has_sinks: bool, window: int, chooses: bool) -> None:
    """Rows of one token that attend to chosen keys or all, in one tile of queries and in two, and to those of a window
    in another cache; padding. Other numbers lie behind each key."""
    latent_dim, dtype = (512, torch.bfloat16) if HAS_GPU else (64, torch.float32)
    top_k, seen, generator = 100 if chooses else None, (0, 1, 64, 100, 350, 70), torch.Generator().manual_seed(0)
    shape = AttentionShape(
        num_heads=num_heads, num_kv_heads=1, head_dim=latent_dim, tail_dim=tail_dim, block_size=64, dtype=dtype,
        kv_dtype=dtype, device=DEVICE, has_values=False,
    )  # fmt: skip
    if HAS_GPU and not serves_latents(shape):
        pytest.skip("Hopper GPUs alone have it")
    key_dim = latent_dim + tail_dim
    of_cache, of_near = (40, 64, 1, key_dim + 32), (40, 16, latent_dim + 8)
    memory = torch.randn(math.prod(of_cache) + math.prod(of_near), generator=generator).to(DEVICE, dtype)
    cache, near_cache = memory[: math.prod(of_cache)].view(of_cache), memory[math.prod(of_cache) :].view(of_near)
    cache[..., key_dim:] = float("nan")
    keys = cache[..., :key_dim]
    tables = torch.randperm(40, generator=generator)[:36].view(6, 6).int().to(DEVICE)
    chosen = None
    if top_k is not None:
        chosen = torch.zeros(6, top_k + 20, dtype=torch.int32)
        for row, count in enumerate(seen):
            own = torch.randperm(count, generator=generator)[:top_k].sort().values
            chosen[row, : len(own)] = own
        chosen = chosen.to(DEVICE)[:, :top_k]
    tokens = TokenKeys(torch.tensor(seen, dtype=torch.int32).to(DEVICE), torch.arange(6).flip(0).to(DEVICE), tables)
    near_seen = torch.tensor((0, 7, 69, 70, 90, 75), dtype=torch.int32).to(DEVICE)
    near = (
        WindowKeys(near_cache[..., :latent_dim], TokenKeys(near_seen, tokens.slots, tables.flip(1)), window)
        if window
        else None
    )
    queries = torch.randn(6, num_heads, key_dim, generator=generator).to(DEVICE, dtype)
    expected = queries.new_empty(6, num_heads, latent_dim)
    sinks = torch.linspace(-4, 6, num_heads, device=DEVICE) if has_sinks else None
    chosen_keys.attend_chosen(queries, keys[:, :, 0], tokens, chosen, expected, scale=0.1, sinks=sinks, window=near)
    with nullcontext() if HAS_GPU else simulated():
        attention = HopperLatents(shape, max_rows=8, top_k=top_k, window=window)
    for _ in range(2):  # what the first launch counted must be forgotten
        out = torch.full_like(expected, float("nan"))
        attention.plan(tokens.seen, tokens.slots, near_seen=near_seen if window else None)
        attention.run_chosen(queries, keys, tables, chosen, out, scale=0.1, sinks=sinks, window=near)
        tolerance = 1e-2 if HAS_GPU else 2e-5
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@not_on_gpu
@pytest.mark.parametrize("num_shares", [1, 7, 132])
def test_shares(num_shares: int) -> None:
    """Each tile of each row is in one share, no share has many more than others, and no two partial results have one
    place."""
    rng = random.Random(num_shares)
    for most_keys, num_rows, stride in ((10, 20, 1), (3000, 5, 3), (40_000, 1, 1), (700, 300, 133)):
        lens = [rng.randint(0, most_keys) for _ in range(num_rows)]
        items = torch.full((num_rows + num_shares, 8), -1, dtype=torch.int32)
        shares = torch.full((num_shares, 2), -1, dtype=torch.int32)
        slots = torch.arange(num_rows) + 5
        plan_shares_kernel[(-(-num_rows // 16),)](
            torch.tensor(lens, dtype=torch.int32),
            None,
            slots,
            items,
            shares,
            num_rows,
            num_shares,
            stride,
            2**31 - 1,
            0,
        )
        ends, chunks, places, sizes = [0] * num_rows, [0] * num_rows, set(), []
        for share, (first, end) in enumerate(shares.tolist()):
            sizes.append(0)
            for row, begin, chunk_end, num_chunks, first_share, chunk, slot, num_keys in items[first:end].tolist():
                assert (begin, num_keys, slot) == (ends[row], lens[row], row + 5)
                assert (first_share + chunk, chunk) == (share, chunks[row])
                ends[row], chunks[row] = chunk_end, chunk + 1
                sizes[-1] += max(1, -(-(chunk_end - begin) // 64))
                if num_chunks > 1:
                    places.add(2 * share + (chunk == 0))
                if chunk == num_chunks - 1:
                    assert chunk_end == num_keys
        assert ends == lens
        assert len(places) == sum(count for count in chunks if count > 1)
        assert max(sizes) <= max(-(-sum(sizes) // num_shares), most_keys**0.5)
