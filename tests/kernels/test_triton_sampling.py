"""The Triton sampler against its plain-torch reference: the same random numbers, the same tokens, the same limits."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS
from nvcli.kernels import philox as philox_reference
from nvcli.kernels import sampling as reference
from nvcli.kernels.triton import philox, sampling, threshold

pytestmark = MARKS

V = 9001
"""More than one program's share in each kernel, and no round number."""


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


def sample(logits: torch.Tensor, temperature: torch.Tensor, **more: torch.Tensor | None) -> torch.Tensor:
    """By the kernel, ids on the CPU."""
    options: dict[str, torch.Tensor | None] = {"slots": None, "threshold": None, **keys(len(logits)), **more}
    moved = {name: None if x is None else x.to(DEVICE) for name, x in options.items()}
    ids = sampling.sample(logits.to(DEVICE), temperature.to(DEVICE), **moved)  # type: ignore[arg-type]
    assert ids.dtype == torch.int32
    return ids.cpu()


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
    assert torch.equal(philox.token_uniforms(**moved, vocab_size=2003).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_sample_by_their_own_temperature(dtype: torch.dtype) -> None:
    logits = random_logits(9).to(dtype)
    temperature = torch.tensor([0.0, 0.3, 1.0]).repeat(3)
    ids = sample(logits, temperature)
    assert_best(ids, logits.float(), temperature)
    assert torch.equal(ids, reference.sample(logits, temperature, **keys(9)))
    assert torch.equal(ids[::3], logits[::3].float().argmax(dim=-1).int())


def test_the_first_of_equal_tokens_is_taken() -> None:
    logits = torch.zeros(4, V)
    logits[1, [700, 8999]] = 1.0
    logits[2, 2047:2050] = 1.0
    logits[3] = -torch.inf
    assert sample(logits, torch.zeros(4)).tolist() == [0, 700, 2047, 0]


def test_forbidden_tokens_are_not_sampled_and_nan_gives_a_token() -> None:
    logits = torch.full((3, V), -torch.inf)
    logits[0, 5000] = -3.0
    logits[1, V - 1] = 0.0
    logits[2] = torch.nan
    ids = sample(logits, torch.ones(3))
    assert ids[:2].tolist() == [5000, V - 1]
    assert 0 <= ids[2] < V


def test_rows_that_lie_apart_and_tables_by_slot() -> None:
    """Logits are a part of a padded matrix, parameters are rows of the slot table."""
    logits = random_logits(3, V + 7)
    slots = torch.tensor([4, 0, 2])
    temperature = torch.tensor([1.0, 9.0, 0.0, 9.0, 0.5])
    table = {name: x for name, x in keys(5).items() if name != "positions"}
    positions = torch.tensor([10, 11, 12], dtype=torch.int32)
    padded = logits.to(DEVICE)[:, :V]
    moved = {name: x.to(DEVICE) for name, x in table.items()}
    ids = sampling.sample(
        padded, temperature.to(DEVICE), positions=positions.to(DEVICE), slots=slots.to(DEVICE), threshold=None, **moved
    )
    expected = reference.sample(logits[:, :V], temperature, positions=positions, slots=slots, **table)
    assert torch.equal(ids.cpu(), expected)
    chosen = {name: x[slots] for name, x in table.items()}
    assert torch.equal(expected, reference.sample(logits[:, :V], temperature[slots], positions=positions, **chosen))


def sharded(
    logits: torch.Tensor, num_ranks: int, temperature: torch.Tensor, module: ModuleType, **more: torch.Tensor
) -> torch.Tensor:
    """What the best keys of `num_ranks` parts of the vocabulary come to; parts as the LM head cuts them."""
    size = -(-logits.shape[1] // num_ranks)
    starts = [min(rank * size, logits.shape[1]) for rank in range(num_ranks)]
    options = {**keys(len(logits)), "slots": None, **more}
    device = DEVICE if module is sampling else torch.device("cpu")
    options = {name: None if x is None else x.to(device) for name, x in options.items()}
    padded = torch.nn.functional.pad(logits, (0, size), value=torch.inf).to(device)
    of_parts = [
        module.best_keys(
            padded[:, start : start + size][:, : logits.shape[1] - start],
            temperature.to(device),
            start=start,
            **options,
        )
        for start in starts
    ]
    return reference.tokens_of_keys(torch.stack(of_parts).max(dim=0).values).cpu()


@pytest.mark.parametrize("module", [reference, sampling])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_parts_of_the_vocabulary_choose_what_the_whole_does(num_ranks: int, module: ModuleType) -> None:
    """Bit for bit: the random numbers go by token, and equal scores to the first."""
    choose = reference.sample if module is reference else sample
    num_rows = 300 if HAS_GPU else 9
    logits, temperature = random_logits(num_rows), torch.tensor([0.0, 0.3, 1.0]).repeat(num_rows // 3)
    more = keys(num_rows) if module is reference else {}
    assert torch.equal(sharded(logits, num_ranks, temperature, module), choose(logits, temperature, **more))
    ties = torch.zeros(6, V)
    ties[1, [700, 8999]] = 1.0
    ties[2, 4499:4504] = 1.0  # around the cut in two
    ties[3] = -torch.inf
    ties[4] = torch.where(torch.arange(V) % 2 == 0, -0.0, 0.0)
    ties[5] = -torch.inf
    ties[5, V - 1] = -3.0
    assert sharded(ties, num_ranks, torch.zeros(6), module).tolist() == [0, 700, 4499, 0, 0, V - 1]
    assert sharded(ties, num_ranks, torch.ones(6), module)[5] == V - 1
    few = random_logits(5, 9)  # of 8 ranks the last ones have no token, or only some
    assert torch.equal(
        sharded(few, num_ranks, torch.ones(5), module),
        choose(few, torch.ones(5), **(keys(5) if module is reference else {})),
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nan_is_no_candidate(num_ranks: int) -> None:
    logits = torch.full((3, V), torch.nan)
    logits[1, 8000] = -torch.inf
    logits[2, [100, 5000]] = -2.0
    assert sharded(logits, num_ranks, torch.zeros(3), sampling).tolist() == [0, 8000, 100]
    assert sample(logits, torch.zeros(3)).tolist() == [0, 8000, 100]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_thresholds_keep_what_a_sort_keeps(kind: str, temperature: float, dtype: torch.dtype) -> None:
    limits = LIMITS[kind]
    n = len(limits)
    logits = random_logits(n).to(dtype)
    logits[0, ::3] = -torch.inf
    top_k = torch.tensor([k for k, _, _ in limits], dtype=torch.int32)
    top_p, min_p = (torch.tensor([limit[i] for limit in limits]) for i in (1, 2))
    temperatures = torch.full((n,), temperature)
    args = (temperatures, top_k, top_p, min_p)
    actual = threshold.likely_threshold(logits.to(DEVICE), *(x.to(DEVICE) for x in args), slots=None).cpu()
    scaled = logits.float() / temperature
    kept = reference.keep_likely(scaled, top_k, top_p, min_p) > -torch.inf
    kept_here = (scaled >= actual[:, None]) & (scaled > -torch.inf)
    if kind == "top_p":
        kept = agree_on_mass(kept_here, kept, scaled, top_p)
    assert torch.equal(kept_here, kept)
    if kind == "off":
        assert (actual == -torch.inf).all()
    # And the sampler leaves out the same tokens.
    ids = sample(logits, temperatures, threshold=actual)
    assert kept.gather(1, ids.long()[:, None]).all()
    assert torch.equal(ids, reference.sample(logits, temperatures, **keys(n), threshold=actual))


def test_thresholds_among_ties_signs_and_zeros() -> None:
    """Few different values, many times each; both zeros; all negative; a greedy row is not limited."""
    few = torch.tensor([-2.5, -0.0, 0.0, 1.0]).repeat(3, V // 4)
    logits = torch.cat((few, few - 5, few))
    top_k = torch.tensor([10, 3000, 0, 10, 3000, 0, 10, 5000, 7], dtype=torch.int32)
    top_p = torch.tensor([1.0, 1.0, 0.5, 1.0, 0.7, 0.9, 0.5, 0.99, 0.5])
    temperature, min_p = torch.ones(9), torch.zeros(9)
    temperature[8] = 0.0
    args = (temperature, top_k, top_p, min_p)
    actual = threshold.likely_threshold(logits.to(DEVICE), *(x.to(DEVICE) for x in args), slots=None).cpu()
    kept = reference.keep_likely(logits[:8], top_k[:8], top_p[:8], min_p[:8]) > -torch.inf
    assert torch.equal(logits[:8] >= actual[:8, None], kept)
    assert actual[8] == -torch.inf


def test_thresholds_by_slot() -> None:
    logits, slots = random_logits(3), torch.tensor([2, 0, 2])
    args = (torch.tensor([0.5, 9.0, 1.5]), torch.tensor([5, 9, 0], dtype=torch.int32), torch.tensor([0.9, 0.1, 0.6]))
    args = (*args, torch.zeros(3))
    actual = threshold.likely_threshold(logits.to(DEVICE), *(x.to(DEVICE) for x in args), slots=slots.to(DEVICE)).cpu()
    torch.testing.assert_close(actual, reference.likely_threshold(logits, *args, slots=slots), rtol=0, atol=0)
