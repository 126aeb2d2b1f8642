"""A small top-k finds its candidates without a search over the row, in one vocabulary and in shards of it: the same
tokens as the plain definition, whatever is equal, forbidden or missing."""

from __future__ import annotations

import pytest
import torch
from sampling_rows import V, expected_sample, keys, make_columns, on, random_logits, sample, through_shards

from combinations import full
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS
from nvcli.kernels import candidates as reference
from nvcli.kernels.sampling import unpack_argmax
from nvcli.kernels.sampling_columns import MAX_CANDIDATES
from nvcli.kernels.triton.sampling import sampling

pytestmark = MARKS

LIMITS = [
    (1, 1.0, 0.0),
    (2, 0.5, 0.0),
    (20, 0.95, 0.0),
    (20, 1.0, 0.0),
    (0, 1.0, 0.0),
    (50, 0.6, 0.1),
    (MAX_CANDIDATES, 1.0, 0.0),
    (MAX_CANDIDATES, 0.999, 0.001),
    (20, 0.01, 0.0),
    (5, 1.0, 1.0),
]
NUM_ROUNDS = 60 if HAS_GPU else 1


def tied_logits() -> torch.Tensor:
    """[10, V]: rows whose k-th largest logit many tokens share, or that have fewer than k tokens to offer."""
    generator = torch.Generator().manual_seed(3)
    rows = random_logits(10)
    rows[0] = 2.0**40  # scores are equal too: noise is too small to change them
    rows[1] = torch.where(torch.arange(V) % 2 == 0, -0.0, 0.0)
    rows[2] = torch.where(rows[2] > 8, rows[2], -1.0)  # a few above thousands of equal ones
    rows[3] = torch.randint(-3, 3, (V,), generator=generator).float()
    rows[4] = torch.randint(0, 200, (V,), generator=generator).float() / 8
    rows[5, 7:] = -torch.inf
    rows[6] = -torch.inf
    rows[7, : V - 3] = -torch.inf
    rows[8, 2000:2130] = 30.0  # two groups and more of nothing but ties
    rows[9] = rows[9].round()
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.3, full(1.0), 3.0])
def test_the_same_token_as_by_a_sort(temperature: float, dtype: torch.dtype) -> None:
    columns = make_columns(torch.full((len(LIMITS),), temperature), LIMITS)
    for seed in range(NUM_ROUNDS):
        logits = random_logits(len(LIMITS), seed=seed).to(dtype)
        assert torch.equal(sample(logits, columns), expected_sample(logits, columns))


@pytest.mark.parametrize("limits", [(1, 1.0, 0.0), (20, 1.0, 0.0), (20, 0.9, 0.0), (MAX_CANDIDATES, 0.5, 0.2)])
def test_equal_logits_stay_together(limits: tuple[int, float, float]) -> None:
    logits, columns = tied_logits(), make_columns(torch.ones(10), [limits])
    assert torch.equal(sample(logits, columns), expected_sample(logits, columns))


def test_all_of_many_equal_tokens_are_drawn_alike() -> None:
    """A limit of 20 that 2,048 equal tokens share: the draws go all over them."""
    num_rows = 256 if HAS_GPU else 24
    columns = make_columns(torch.ones(num_rows), [(20, 0.9, 0.0)])
    logits = torch.full((num_rows, V), -1.0)
    logits[:, 4000:6048] = 1.0
    ids = sample(logits, columns)
    assert torch.equal(ids, expected_sample(logits, columns))
    assert ids.min() >= 4000
    assert ids.max() < 6048
    assert len(ids.unique()) > 0.9 * num_rows


def test_equal_tokens_at_the_limit_count_with_all_of_their_mass() -> None:
    """Of a limit of 20 three tokens are likelier than 8,991 equal ones, which are most of the mass, and so top-p keeps
    these."""
    logits = torch.full((6, V), -torch.inf)
    logits[:, 10:] = 0.0
    logits[:, 3:6] = 1.0
    columns = make_columns(torch.ones(6), [(20, 0.5, 0.0)])
    ids = sample(logits, columns)
    assert torch.equal(ids, expected_sample(logits, columns))
    assert ids.max() >= 10


@pytest.mark.parametrize("vocab_size", [1, full(63), 64, full(97), 2049])
def test_small_vocabularies(vocab_size: int) -> None:
    logits = random_logits(5, vocab_size)
    columns = make_columns(torch.ones(5), LIMITS[2:7])
    expected = expected_sample(logits, columns)
    assert torch.equal(sample(logits, columns), expected)
    for kernel in (False, True):
        assert torch.equal(through_shards(logits, 4, columns, kernel=kernel), expected)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("num_ranks", [full(1), 3, full(8)])
def test_shards_choose_what_the_whole_does(num_ranks: int, kernel: bool) -> None:
    columns = make_columns(torch.tensor([0.0, 0.5, 1.0, 1.0, 0.9, 2.0, 1.0, 1.0, 1.0, 1.0]), LIMITS)
    for seed in range(NUM_ROUNDS):
        logits = random_logits(len(LIMITS), seed=seed)
        expected = expected_sample(logits, columns)
        assert torch.equal(through_shards(logits, num_ranks, columns, kernel=kernel), expected)
    logits = tied_logits()
    for limits in [(20, 0.9, 0.0), (MAX_CANDIDATES, 0.5, 0.2)]:
        columns = make_columns(torch.ones(10), [limits])
        expected = expected_sample(logits, columns)
        assert torch.equal(through_shards(logits, num_ranks, columns, kernel=kernel), expected)


def test_lists_of_the_kernel_hold_what_the_definition_says() -> None:
    """Values, tokens and counts; tokens above the k-th in any order."""
    for logits in (random_logits(10), tied_logits()):
        columns = make_columns(torch.ones(10), [(1, 1.0, 0.0), (20, 1.0, 0.0), (MAX_CANDIDATES, 1.0, 0.0)])
        slots, positions = torch.arange(10), keys(10)["positions"]
        _, expected = reference.shard_candidates(logits, columns, slots, positions, start=6)
        moved = (x.to(DEVICE) for x in (slots, positions))
        _, actual = sampling.shard_candidates(logits.to(DEVICE), on(DEVICE, columns), *moved, start=6)
        assert torch.equal(actual[:, -1].cpu(), expected[:, -1])
        for ours, theirs in zip(actual.cpu(), expected, strict=True):
            entries = [
                sorted(
                    (value, token)
                    for value, token in zip(
                        x[:MAX_CANDIDATES].view(torch.float32).tolist(), x[MAX_CANDIDATES:-1].tolist(), strict=True
                    )
                    if value > -torch.inf
                )
                for x in (ours, theirs)
            ]
            assert entries[0] == entries[1]


@pytest.mark.skipif(HAS_GPU, reason="what a CPU does is tested without one")
def test_packed_numbers_count_where_nothing_limits() -> None:
    logits, columns = random_logits(4), make_columns(torch.tensor([0.0, 1.0, 0.0, 2.0]))
    slots, positions = torch.arange(4), keys(4)["positions"]
    packed, _ = reference.shard_candidates(logits, columns, slots, positions, start=0)
    assert torch.equal(unpack_argmax(packed), expected_sample(logits, columns))
