"""The Triton sampler against its plain-torch reference: the same random numbers, the same tokens, the same limits."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from sampling_rows import CPU, V, expected_sample, keys, make_columns, on, random_logits, sample, token_uniforms

from combinations import full
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS
from nvcli.kernels import philox as philox_reference
from nvcli.kernels import sampling as reference
from nvcli.kernels.sampling_columns import SamplingColumns
from nvcli.kernels.triton.sampling import sampling, top_k_top_p

pytestmark = MARKS


def assert_best(ids: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor) -> None:
    """Each id's score is the best but for what float32 logarithms leave open; nearly all are the best."""
    noise = philox_reference.token_uniforms(**keys(len(logits)), vocab_size=logits.shape[1]).double().log().neg().log()
    is_random = (temperature > 0)[:, None]
    scores = torch.where(is_random, logits / temperature.where(temperature > 0, 1.0)[:, None] - noise, logits.double())
    best = scores.max(dim=-1)
    assert (best.values - scores.gather(1, ids.long()[:, None])[:, 0]).max() < 1e-4
    assert (ids != best.indices).sum() <= len(ids) // 1000


@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64])
def test_uniforms_are_bit_equal(positions_dtype: torch.dtype) -> None:
    counters = keys(5)
    expected = philox_reference.token_uniforms(**counters, vocab_size=2003)
    counters["positions"] = counters["positions"].to(positions_dtype)
    moved = {name: x.to(DEVICE) for name, x in counters.items()}
    assert torch.equal(token_uniforms(**moved, vocab_size=2003).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_sample_by_their_own_temperature(dtype: torch.dtype) -> None:
    logits = random_logits(9).to(dtype)
    temperature = torch.tensor([0.0, 0.3, 1.0]).repeat(3)
    columns = make_columns(temperature)
    ids = sample(logits, columns)
    assert_best(ids, logits.float(), temperature)
    assert torch.equal(ids, expected_sample(logits, columns))
    assert torch.equal(ids[::3], logits[::3].float().argmax(dim=-1).int())


def test_the_first_of_equal_tokens_is_taken() -> None:
    logits = torch.zeros(3, V)
    logits[1, [700, 8999]] = 1.0
    logits[2, 2047:2050] = 1.0
    assert sample(logits, make_columns(torch.zeros(3))).tolist() == [0, 700, 2047]


@pytest.mark.parametrize("top_k", [0, 20])
def test_forbidden_tokens_are_not_sampled(top_k: int) -> None:
    logits = torch.full((2, V), -torch.inf)
    logits[0, 5000] = -3.0
    logits[1, V - 1] = 0.0
    assert sample(logits, make_columns(torch.ones(2), [(top_k, 1.0, 0.0)])).tolist() == [5000, V - 1]


@pytest.mark.parametrize("num_allowed", [0, 1, 30, 6000])
def test_a_hint_that_few_are_allowed_changes_no_token(num_allowed: int) -> None:
    """Greedy and sampled rows, with a small top-k, with top-p, and without limits; nothing, whole chunks, or single
    tokens are forbidden."""
    logits = random_logits(8)
    for row in logits[:-1]:
        row[torch.randperm(V, generator=torch.Generator().manual_seed(2))[num_allowed:]] = -torch.inf
    columns = make_columns(torch.tensor([0.0, 1.0]).repeat_interleave(4), [(0, 1.0, 0.0), (5, 0.9, 0.0), (0, 0.8, 0.0)])
    ids = sample(logits, columns, few_allowed=True)
    assert torch.equal(ids, sample(logits, columns))
    assert torch.equal(ids, expected_sample(logits, columns))


def test_rows_that_lie_apart_and_tables_by_slot() -> None:
    """Logits are a part of a padded matrix, parameters are rows of the slot table."""
    logits = random_logits(3, V + 7)
    slots, positions = torch.tensor([4, 0, 2]), torch.tensor([10, 11, 12], dtype=torch.int32)
    limits = [(0, 1.0, 0.0), (5, 0.1, 0.0), (0, 1.0, 0.0), (0, 0.1, 0.0), (9, 0.9, 0.0)]
    columns = make_columns(torch.tensor([1.0, 9.0, 0.0, 9.0, 0.5]), limits)
    ids = sampling.sample(logits.to(DEVICE)[:, :V], on(DEVICE, columns), slots.to(DEVICE), positions.to(DEVICE))
    expected = reference.sample(logits[:, :V], columns, slots, positions)
    assert torch.equal(ids.cpu(), expected)
    assert torch.equal(expected, reference.sample(logits[:, :V], columns.at(slots), torch.arange(3), positions))


def sharded(logits: torch.Tensor, num_ranks: int, columns: SamplingColumns, module: ModuleType) -> torch.Tensor:
    """What the packed numbers of `num_ranks` shards of the vocabulary come to; shards as the LM head cuts them."""
    size = -(-logits.shape[1] // num_ranks)
    device = DEVICE if module is sampling else CPU
    slots, positions = torch.arange(len(logits), device=device), keys(len(logits))["positions"].to(device)
    padded = torch.nn.functional.pad(logits, (0, size), value=torch.inf).to(device)
    of_shards = []
    for rank in range(num_ranks):
        start = min(rank * size, logits.shape[1])
        shard = padded[:, start : start + size][:, : logits.shape[1] - start]
        of_shards.append(module.packed_argmax(shard, on(device, columns), slots, positions, start=start))
    return reference.unpack_argmax(torch.stack(of_shards).max(dim=0).values).cpu()


@pytest.mark.parametrize("module", [reference, sampling])
@pytest.mark.parametrize("num_ranks", [full(1), 2, full(4), 8])
def test_parts_of_the_vocabulary_choose_what_the_whole_does(num_ranks: int, module: ModuleType) -> None:
    """Bit for bit: the random numbers go by token, and equal scores to the first."""
    choose = expected_sample if module is reference else sample
    num_rows = 300 if HAS_GPU else 9
    logits, columns = random_logits(num_rows), make_columns(torch.tensor([0.0, 0.3, 1.0]).repeat(num_rows // 3))
    assert torch.equal(sharded(logits, num_ranks, columns, module), choose(logits, columns))
    ties = torch.zeros(6, V)
    ties[1, [700, 8999]] = 1.0
    ties[2, 4499:4504] = 1.0  # around the cut in two
    ties[3] = -torch.inf
    ties[4] = torch.where(torch.arange(V) % 2 == 0, -0.0, 0.0)
    ties[5] = -torch.inf
    ties[5, V - 1] = -3.0
    assert sharded(ties, num_ranks, make_columns(torch.zeros(6)), module).tolist() == [0, 700, 4499, -1, 0, V - 1]
    assert sharded(ties, num_ranks, make_columns(torch.ones(6)), module)[5] == V - 1
    few, columns = random_logits(5, 9), make_columns(torch.ones(5))  # of 8 ranks the last ones have no token, or some
    assert torch.equal(sharded(few, num_ranks, columns, module), choose(few, columns))


def agree_on_mass(
    kept: torch.Tensor, expected: torch.Tensor, scaled: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """`expected`, but as in `kept` where the mass of the likelier tokens equals top_p up to the order of summation."""
    out = expected.clone()
    for row, token in (kept != expected).nonzero().tolist():
        probabilities = scaled[row].double().softmax(dim=-1)
        mass_before = probabilities[scaled[row] > scaled[row, token]].sum()
        if abs(mass_before - top_p[row]) < 2e-6:
            out[row, token] = kept[row, token]
    return out


LIMITS = {
    "top_k": [(1, 1.0, 0.0), (50, 1.0, 0.0), (1500, 1.0, 0.0), (V - 1, 1.0, 0.0)],
    "top_p": [(0, 0.01, 0.0), (0, 0.5, 0.0), (0, 0.95, 0.0), (0, 0.9999, 0.0)],
    "min_p": [(0, 1.0, 0.001), (0, 1.0, 0.2), (0, 1.0, 1.0)],
    "together": [(20, 0.8, 0.01), (2000, 0.9, 0.0), (3, 0.99, 0.5), (100, 0.3, 0.0)],
    "off": [(0, 1.0, 0.0), (V, 1.0, 0.0), (V + 5, 1.0, 0.0)],
}


def thresholds(logits: torch.Tensor, columns: SamplingColumns, slots: torch.Tensor | None = None) -> torch.Tensor:
    """By the kernel that searches whole rows."""
    slots = torch.arange(len(logits)) if slots is None else slots
    return top_k_top_p.min_kept_logit(logits.to(DEVICE), on(DEVICE, columns), slots.to(DEVICE)).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("temperature", [full(0.7), 2.0])
def test_thresholds_keep_what_a_sort_keeps(kind: str, temperature: float, dtype: torch.dtype) -> None:
    n = len(LIMITS[kind])
    logits = random_logits(n).to(dtype)
    logits[0, ::3] = -torch.inf
    columns = make_columns(torch.full((n,), temperature), LIMITS[kind])
    actual = thresholds(logits, columns)
    scaled = logits.float() / temperature
    # Float32 sums of 9,001 numbers are 2.4e-6 off on processors with AVX2 alone.
    kept = reference.keep_likely(scaled.double(), columns.top_k, columns.top_p, columns.min_p) > -torch.inf
    kept_here = (scaled >= actual[:, None]) & (scaled > -torch.inf)
    if kind == "top_p":
        kept = agree_on_mass(kept_here, kept, scaled, columns.top_p)
    assert torch.equal(kept_here, kept)
    if kind == "off":
        assert (actual == -torch.inf).all()
    # And the sampler leaves out the same tokens.
    ids = sample(logits, columns)
    assert kept.gather(1, ids.long()[:, None]).all()
    assert torch.equal(ids, expected_sample(logits, columns))


def test_thresholds_among_ties_signs_and_zeros() -> None:
    """Few different values, many times each; both zeros; all negative; a greedy row is not limited."""
    few = torch.tensor([-2.5, -0.0, 0.0, 1.0]).repeat(3, V // 4)
    logits = torch.cat((few, few - 5, few))
    limits = [(10, 1.0), (3000, 1.0), (0, 0.5), (10, 1.0), (3000, 0.7), (0, 0.9), (10, 0.5), (5000, 0.99), (7, 0.5)]
    temperature = torch.ones(9)
    temperature[8] = 0.0
    columns = make_columns(temperature, [(k, p, 0.0) for k, p in limits])
    actual = thresholds(logits, columns)
    expected = reference.keep_likely(logits[:8], columns.top_k[:8], columns.top_p[:8], columns.min_p[:8])
    assert torch.equal(logits[:8] >= actual[:8, None], expected > -torch.inf)
    assert actual[8] == -torch.inf


def test_thresholds_by_slot() -> None:
    logits, slots = random_logits(3), torch.tensor([2, 0, 2])
    columns = make_columns(torch.tensor([0.5, 9.0, 1.5]), [(5, 0.9, 0.0), (9, 0.1, 0.0), (0, 0.6, 0.0)])
    expected = reference.min_kept_logit(logits, columns.at(slots))
    torch.testing.assert_close(thresholds(logits, columns, slots), expected, rtol=0, atol=0)
