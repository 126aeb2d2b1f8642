"""Sampling does what its parameters say: against softmax, against transformers' own filters, against definitions."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nvcli.kernels.sampling import apply_penalties, gumbel_max, keep_likely
from nvcli.kernels.sampling_columns import SamplingColumns

OFF_K, OFF_P, OFF_M = 0, 1.0, 0.0


def random_logits(n: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def keep(logits: torch.Tensor, top_k: int = OFF_K, top_p: float = OFF_P, min_p: float = OFF_M) -> torch.Tensor:
    n = len(logits)
    return keep_likely(logits, torch.full((n,), top_k), torch.full((n,), top_p), torch.full((n,), min_p))


def columns(temperature: torch.Tensor, numbers: torch.Tensor) -> SamplingColumns:
    """Without limits; `numbers` are seeds, rows and samples."""
    off = torch.zeros_like(temperature)
    return SamplingColumns(
        temperature=temperature,
        top_k=off.int(),
        top_p=off + 1,
        min_p=off,
        seed=numbers,
        row=numbers,
        sample=numbers,
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_max_follows_softmax(temperature: float) -> None:
    """20,000 draws of each position's own noise; chi-square well inside what chance allows."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5])
    n = 20_000
    same = columns(torch.full((n,), temperature), torch.zeros(n, dtype=torch.int64))
    ids = gumbel_max(logits.expand(n, -1), same, torch.arange(n))
    expected = (logits / temperature).softmax(-1) * n
    counts = torch.bincount(ids, minlength=len(logits))
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 22.5  # 6 degrees of freedom: one in a thousand


def test_zero_temperature_is_greedy_beside_random_rows() -> None:
    logits = random_logits(50, 1000)
    temperature = torch.tensor([0.0, 1.0]).repeat(25)
    rows = torch.arange(50)
    ids = gumbel_max(logits, columns(temperature, rows), rows)
    assert torch.equal(ids[::2], logits.argmax(dim=-1)[::2])
    assert not torch.equal(ids[1::2], logits.argmax(dim=-1)[1::2])


@pytest.mark.parametrize("k", [1, 5, 50, 999, 5000])
def test_top_k_agrees_with_transformers(k: int) -> None:
    logits = random_logits(8, 1000)
    assert torch.equal(keep(logits, top_k=k), TopKLogitsWarper(k)(None, logits.clone()))


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_agrees_with_transformers(p: float) -> None:
    logits = random_logits(8, 1000)
    assert torch.equal(keep(logits, top_p=p), TopPLogitsWarper(p)(None, logits.clone()))


@pytest.mark.parametrize("p", [0.01, 0.3, 1.0])
def test_min_p_agrees_with_transformers(p: float) -> None:
    logits = random_logits(8, 1000)
    assert torch.equal(keep(logits, min_p=p), MinPLogitsWarper(p)(None, logits.clone()))


def test_limits_combine_and_rows_keep_their_own() -> None:
    logits = random_logits(4, 200)
    kept = keep_likely(
        logits, torch.tensor([3, 0, 0, 10]), torch.tensor([1.0, 0.7, 1.0, 0.5]), torch.tensor([0.0, 0.0, 0.2, 0.01])
    )
    assert torch.equal(kept[:1], keep(logits[:1], top_k=3))
    assert torch.equal(kept[1:2], keep(logits[1:2], top_p=0.7))
    assert torch.equal(kept[2:3], keep(logits[2:3], min_p=0.2))
    both = keep(keep(logits[3:], top_k=10), top_p=0.5)
    assert torch.equal(kept[3:], keep(both, min_p=0.01))


def test_no_limit_keeps_everything_and_ties_stay_together() -> None:
    logits = random_logits(2, 100)
    assert torch.equal(keep(logits), logits)
    tied = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert torch.equal(keep(tied, top_k=1), torch.tensor([[1.0, 1.0, 1.0, -torch.inf]]))


def test_filtering_leaves_the_noise_of_what_remains() -> None:
    """A token that would have won, and survives the filter, still wins."""
    logits = random_logits(400, 50)
    rows = torch.arange(400)
    args = columns(torch.ones(400), rows), rows
    free, filtered = gumbel_max(logits, *args), gumbel_max(keep(logits, top_k=10), *args)
    survived = keep(logits, top_k=10).gather(1, free[:, None])[:, 0] > -torch.inf
    assert 0 < survived.sum() < 400
    assert torch.equal(free[survived], filtered[survived])


def penalise(logits: torch.Tensor, tokens: list[list[int]], prompt_lens: list[int], **kinds: float) -> torch.Tensor:
    n, longest = len(tokens), max(map(len, tokens)) + 3
    # What lies behind a request's length must not matter.
    table = torch.full((n, longest), 7, dtype=torch.int32)
    for i, ids in enumerate(tokens):
        table[i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return apply_penalties(
        logits,
        table,
        torch.tensor([len(ids) for ids in tokens]),
        torch.tensor(prompt_lens),
        presence=torch.full((n,), kinds.get("presence", 0.0)),
        frequency=torch.full((n,), kinds.get("frequency", 0.0)),
        repetition=torch.full((n,), kinds.get("repetition", 1.0)),
    )


def test_repetition_penalty_agrees_with_transformers() -> None:
    logits = random_logits(1, 40)
    tokens = [3, 5, 5, 9, 39]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits.clone())
    assert torch.allclose(penalise(logits, [tokens], [2], repetition=1.3), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(2, 10)
    out = penalise(logits, [[1, 1, 2, 2, 2, 3], [4]], [2, 1], presence=0.5, frequency=0.25)
    expected = torch.zeros(2, 10)
    expected[0, 2] = -0.5 - 3 * 0.25
    expected[0, 3] = -0.5 - 0.25
    assert torch.equal(out, expected)
