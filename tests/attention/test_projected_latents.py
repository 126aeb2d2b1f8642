"""Chunks of latent attention whose latents are projected to keys and values of each head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from attention_setup import TOLERANCE, Bench, History, Work, written_out
from torch import Tensor

from combinations import full
from fp8_interpreter import exact_conversions
from gluon_simulator import SimulatedKernel, Simulator
from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, BatchShape
from nvcli.attention.spec import HeadSizes
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention import hopper_prefill_kernel, prefill_choice
from nvcli.kernels.triton.attention.projected_prefill import ProjectedPrefill

pytestmark = MARKS
__all__ = ["exact_conversions"]
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
LATENT, ROPE = 64, 64


@contextmanager
def hopper() -> Iterator[None]:
    """Take the kernels that a Hopper GPU takes; without one that in Gluon is simulated."""
    if HAS_GPU:
        yield
        return

    def choose(shape: Any, heads: Any, *, scratch_tokens: int) -> ProjectedPrefill:
        return ProjectedPrefill(shape, heads, scratch_tokens=scratch_tokens)

    name = "hopper_prefill_kernel"
    simulated = SimulatedKernel(Simulator(hopper_prefill_kernel), name)
    with ExitStack() as patches:
        patches.enter_context(patch.object(prefill_choice, "projected_prefill", choose))
        patches.enter_context(patch.object(hopper_prefill_kernel, name, simulated))
        yield


def of_choice(case: AttentionCase) -> TritonBackend:
    """Make the backend of layers whose tokens see a choice of keys."""
    return TritonBackend(replace(case, specs=(), chosen=case.specs))


def check(bench: Bench, weight: Tensor, *work: Work, shape: BatchShape) -> None:
    """Attend a step whose chunks are projected, and compare all rows with the formula."""
    (spec,), (layer,) = bench.specs, bench.layers
    sizes = spec.projected
    assert sizes is not None
    step = bench.batch(*work, shape=replace(shape, projects_latents=True))
    first = step.batch.num_decoded_tokens
    q, _, v = step.inputs[0]
    attended = AttentionLayer(spec, layer, bench.sinks)
    if first:
        decoded = bench.backend.forward(attended, q[:first], None, v, step.batch)
    queries = bench.random(step.batch.num_tokens - first, spec.num_heads, sizes.key_dim)
    out = torch.full((len(queries), spec.num_heads, sizes.value_dim), torch.nan, dtype=DTYPE, device=DEVICE)
    bench.backend.projected.forward(attended, queries, weight, step.batch, out)
    assert out.isfinite().all()
    of_heads = weight.view(spec.num_heads, -1, LATENT)
    for (history, count), start in zip(step.work, step.starts, strict=True):
        kept = torch.cat(history.keys[0])[:, 0, : spec.key_dim]
        if start < first:
            found = decoded[start : start + count]
            expected = written_out(q[start : start + count], kept[:, None], kept[:, None, :LATENT], spec, bench.sinks)
        else:
            both = torch.einsum("tl,hcl->thc", kept[:, :LATENT], of_heads)
            rotated = kept[:, None, LATENT:].expand(-1, spec.num_heads, -1)
            keys = torch.cat((both[..., : sizes.key_dim - ROPE], rotated), dim=-1)
            tokens = slice(start - first, start - first + count)
            found = out[tokens]
            expected = written_out(queries[tokens], keys, both[..., sizes.key_dim - ROPE :], spec, bench.sinks)
        error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert bool((error < TOLERANCE[DTYPE]).all()), f"{error.max()}: {count} tokens of {history.state.length}"


@pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("num_heads", "key_dim", "value_dim", "block_size", "kv_dtype"),
    [(3, 192, 128, 64, None), (2, 256, 256, 128, FP8), full((2, 128, 128, 64, None), in_parts=True)],
)
def test_steps(num_heads: int, key_dim: int, value_dim: int, block_size: int, kv_dtype: torch.dtype | None) -> None:
    """Whole prompts, chunks behind others, decode rows beside them, padding, and garbage behind the last keys."""
    sizes = HeadSizes(key_dim=key_dim, value_dim=value_dim, rope_dim=ROPE)
    with hopper():
        bench = Bench(
            TritonBackend, ratio=num_heads, head_dim=LATENT + ROPE, value_dim=LATENT, has_values=False, projected=sizes,
            block_size=block_size, dtype=DTYPE, kv_dtype=kv_dtype, device=str(DEVICE),
        )  # fmt: skip
        assert bench.backend.projected is not None
        bench.leave_garbage(float("nan"))
        weight = bench.random(num_heads * (key_dim - ROPE + value_dim), LATENT) / 4
        a, b, c = History(), History(), History()
        check(bench, weight, (a, 1), (b, 70), shape=BatchShape(decode_rows=1, prefill_rows=1, prefill_tokens=70))
        bench.fill(c, 150)
        shape = BatchShape(decode_rows=2, prefill_rows=3, prefill_tokens=180)
        check(bench, weight, (a, 1), (c, 140), (b, 20), shape=shape)
        check(bench, weight, (c, 64), shape=BatchShape(prefill_rows=1, prefill_tokens=64))


@pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_latents_before_index_keys() -> None:
    """Chunks of layers whose cache has index keys behind the latents, and whose heads have sinks."""
    sizes = HeadSizes(key_dim=192, value_dim=128, rope_dim=ROPE)
    with hopper():
        bench = Bench(
            of_choice, ratio=2, head_dim=LATENT + ROPE + 32, value_dim=LATENT, has_values=False, projected=sizes,
            top_k=100, index_dim=32, has_sinks=True, block_size=64, dtype=DTYPE, device=str(DEVICE),
        )  # fmt: skip
        bench.leave_garbage(float("nan"))
        weight = bench.random(2 * 256, LATENT) / 4
        a = History()
        bench.fill(a, 40)
        check(bench, weight, (a, 60), (History(), 30), shape=BatchShape(prefill_rows=3, prefill_tokens=100))


@pytest.mark.parametrize("top_k", [None, 4096])
def test_choice_of_steps(top_k: int | None) -> None:
    """Prompts are projected; a few tokens behind many keys are not, nor more keys than there is room for, nor tokens
    that see a choice of their keys."""
    if HAS_GPU and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    with hopper():
        bench = Bench(
            of_choice if top_k else TritonBackend, ratio=16, head_dim=512 + ROPE, value_dim=512, has_values=False,
            block_size=64, projected=HeadSizes(key_dim=192, value_dim=128, rope_dim=ROPE), num_tokens=64, top_k=top_k,
            dtype=DTYPE, device=str(DEVICE),
        )  # fmt: skip

    def projects(*chunks: tuple[int, int]) -> bool:
        return bench.backend.projected.pays(*np.array(chunks).T)

    assert projects((400, 400), (200, 200))
    assert projects((4096, 4096), (100, 3000))
    assert projects((4096, 8192)) == (top_k is None)
    assert projects((400, 400), (4096, 4097)) == (top_k is None)
    assert not projects((20, 8192))
    assert not projects(*[(512, 8192)] * 16)
    shape = BatchShape(decode_rows=1, prefill_rows=1, prefill_tokens=400)
    rows = np.array([1, 400]), np.array([50, 400])
    assert bench.backend.choose_shape(shape, *rows) == replace(shape, projects_latents=True)
    for other in (replace(shape, shares_prefixes=True), BatchShape(decode_rows=2)):
        assert bench.backend.choose_shape(other, *rows) == other
