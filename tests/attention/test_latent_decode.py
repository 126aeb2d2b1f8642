"""Decode attention over latents as Hopper GPUs have it: its work list, and its kernel simulated on the CPU. On such a
GPU `test_gpu_backends.py` and `test_fp8_cache.py` run the kernel itself."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_setup import Bench, History
from torch import Tensor

from fp8_interpreter import exact_conversions
from gluon_simulator import SimulatedKernel, Simulator
from kernel_device import HAS_GPU, MARKS
from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention import decode_attention, hopper_latent_kernel, hopper_latent_loads
from nvcli.kernels.triton.attention.latent_shares import plan_shares_kernel

pytestmark = [*MARKS, pytest.mark.skipif(HAS_GPU, reason="it runs compiled there")]
__all__ = ["exact_conversions"]


def numbers_of_words(words: Tensor, width: int) -> Tensor:
    return words.contiguous().view(FP8).float()


class SimulatedLatents(TritonBackend):
    """It attends float32."""

    def __init__(self, case: AttentionCase) -> None:
        nothing = ("barrier", "gdc_wait", "gdc_launch_dependents")
        functions: dict[str, Any] = {"_numbers_of_words": numbers_of_words, "_opaque_zero": lambda number: 0}
        functions |= {name: lambda: None for name in nothing}
        name = "hopper_latent_kernel"
        simulated = SimulatedKernel(Simulator(hopper_latent_kernel, hopper_latent_loads, functions=functions), name)
        with ExitStack() as patches:
            patches.enter_context(patch.object(decode_attention, "serves_latents", lambda shape: True))
            patches.enter_context(patch.object(hopper_latent_kernel, name, simulated))
            super().__init__(case)


@pytest.mark.parametrize(
    ("latent_dim", "ratio", "block_size", "kv_dtype"), [(512, 3, 64, None), (64, 20, 128, FP8), (64, 40, 64, None)]
)
def test_steps(latent_dim: int, ratio: int, block_size: int, kv_dtype: torch.dtype | None) -> None:
    """Rows of one token and of several, in one tile of queries and in two; rows in several shares; padding; and what an
    earlier owner of a block left."""
    bench = Bench(
        SimulatedLatents, ratio=ratio, head_dim=latent_dim + 64, value_dim=latent_dim, block_size=block_size,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    bench.leave_garbage(float("nan"))
    a, b, c = (History() for _ in range(3))
    for history, num_tokens in ((a, 2), (b, 64), (c, 400)):
        bench.fill(history, num_tokens)
    bench.step((a, 1), (b, 1), (c, 1), shape=BatchShape(decode_rows=4))
    bench.step((c, 1))
    bench.step((b, 4), (c, 4), shape=BatchShape(decode_rows=3, tokens_per_row=4))


@pytest.mark.parametrize("num_shares", [1, 7, 132])
def test_shares(num_shares: int) -> None:
    """Each tile of each row is in one share, no share has many more than others, and no two partial results have one
    place."""
    rng = random.Random(num_shares)
    for most_keys, num_rows in ((10, 20), (3000, 5), (40_000, 1), (700, 300)):
        lens = [rng.randint(0, most_keys) for _ in range(num_rows)]
        items = torch.full((num_rows + num_shares, 8), -1, dtype=torch.int32)
        shares = torch.full((num_shares, 2), -1, dtype=torch.int32)
        slots = torch.arange(num_rows) + 5
        plan_shares_kernel[(-(-num_rows // 16),)](
            torch.tensor(lens, dtype=torch.int32), slots, items, shares, num_rows, num_shares
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
