"""Rows of logits and sampling parameters for the tests of the sampling kernels, and both ways to sample from them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from kernel_device import DEVICE
from nvcli.kernels import candidates as candidates_reference
from nvcli.kernels import sampling as reference
from nvcli.kernels.sampling_columns import SamplingColumns
from nvcli.kernels.triton.sampling import candidates, sampling
from nvcli.kernels.triton.sampling.philox import quad_uniforms

V = 9001
"""More than one program's share in each kernel, and no round number."""
CPU = torch.device("cpu")


def random_logits(num_rows: int, vocab_size: int = V, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def keys(num_rows: int) -> dict[str, torch.Tensor]:
    """Seeds, positions, rows and samples that use all of their bits."""
    generator = torch.Generator().manual_seed(7)
    return {
        "seeds": torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), generator=generator),
        "positions": torch.randint(0, 1 << 20, (num_rows,), generator=generator),
        "rows": torch.randint(0, 1 << 33, (num_rows,), generator=generator),
        "samples": torch.randint(0, 1 << 10, (num_rows,), generator=generator),
    }


def make_columns(temperature: torch.Tensor, limits: list[tuple[int, float, float]] | None = None) -> SamplingColumns:
    """One slot for each row; `limits`: (top_k, top_p, min_p), in turn."""
    n, words = len(temperature), keys(len(temperature))
    limits = limits or [(0, 1.0, 0.0)]
    rows = [limits[i % len(limits)] for i in range(n)]
    return SamplingColumns(
        temperature=temperature,
        top_k=torch.tensor([k for k, _, _ in rows], dtype=torch.int32),
        top_p=torch.tensor([p for _, p, _ in rows]),
        min_p=torch.tensor([m for _, _, m in rows]),
        seed=words["seeds"],
        row=words["rows"],
        sample=words["samples"],
    )


def on(device: torch.device, columns: SamplingColumns) -> SamplingColumns:
    return SamplingColumns(*(column.to(device) for column in columns))


def sample(logits: torch.Tensor, columns: SamplingColumns, *, few_allowed: bool = False) -> torch.Tensor:
    """By the kernels, ids on the CPU; row i takes slot i."""
    slots, positions = torch.arange(len(logits), device=DEVICE), keys(len(logits))["positions"].to(DEVICE)
    ids = sampling.sample(logits.to(DEVICE), on(DEVICE, columns), slots, positions, few_allowed=few_allowed)
    assert ids.dtype == torch.int32
    return ids.cpu()


def expected_sample(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    return reference.sample(logits, columns, torch.arange(len(logits)), keys(len(logits))["positions"])


def through_shards(logits: torch.Tensor, num_ranks: int, columns: SamplingColumns, *, kernel: bool) -> torch.Tensor:
    """What ranks with shards of the vocabulary, cut as the LM head is, choose from each other's lists."""
    size, n = -(-logits.shape[1] // num_ranks), len(logits)
    device = DEVICE if kernel else CPU
    listing: ModuleType = sampling if kernel else candidates_reference
    choosing: ModuleType = candidates if kernel else candidates_reference
    columns, logits = on(device, columns), logits.to(device)
    slots, positions = torch.arange(n, device=device), keys(n)["positions"].to(device)
    packed, lists = [], []
    for rank in range(num_ranks):
        start = min(rank * size, logits.shape[1])
        of_rank = listing.shard_candidates(logits[:, start : start + size], columns, slots, positions, start=start)
        packed.append(of_rank[0])
        lists.append(of_rank[1])
    best = torch.stack(packed).max(dim=0).values
    ids = choosing.choose_candidates(best, torch.stack(lists), columns, slots, positions)
    assert ids.dtype == torch.int32
    return ids.cpu()


@triton.jit
def _token_uniforms_kernel(  # type: ignore[no-untyped-def]
    seeds_ptr,  # [N] int64, as the next three
    positions_ptr,
    rows_ptr,
    samples_ptr,
    out_ptr,  # [N, vocab_size] float32, written
    vocab_size,
    QUADS: tl.constexpr,
):
    """Program (row, chunk of QUADS quads)."""
    index = tl.program_id(0)
    quads = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    row, sample = tl.load(rows_ptr + index), tl.load(samples_ptr + index)
    uniforms = quad_uniforms(quads, (tl.load(seeds_ptr + index), tl.load(positions_ptr + index), row, sample))
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + index.to(tl.int64) * vocab_size + tokens, uniforms, mask=tokens < vocab_size)


def token_uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, samples: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Make the numbers of `nvcli.kernels.philox.token_uniforms` as kernels do."""
    quads = 256
    out = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=seeds.device)
    grid = (len(seeds), triton.cdiv(vocab_size, 4 * quads))
    _token_uniforms_kernel[grid](seeds, positions, rows, samples, out, vocab_size, QUADS=quads)
    return out
