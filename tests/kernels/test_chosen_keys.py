"""Attention to a choice of keys: the Triton kernels store, choose and attend as plain torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.kernels import chosen_keys as reference
from nvcli.kernels import compressed_keys as compressed
from nvcli.kernels.chosen_keys import KeyWeights, TokenKeys, WindowKeys
from nvcli.kernels.pool_settings import Pools
from nvcli.kernels.triton.attention import attend_chosen, choose_keys
from nvcli.kernels.triton.attention import compressed_keys as compressed_kernels
from nvcli.kernels.triton.attention import pool_keys as pools
from nvcli.kernels.triton.elementwise import index_keys

pytestmark = MARKS
CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, TOP_K = 4, 60, 24
SEEN = (1, 24, 0, 25, 70, 71, 72, 150)
"""The keys that each token sees; those of one request are neighbours."""
SLOTS = (4, 2, 5, 0, 1, 1, 1, 3)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def token_keys(device: torch.device) -> TokenKeys:
    """The tokens' keys in blocks in random order; the null block is the padding's."""
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(0)).int() + 1
    tables = torch.zeros(6, 40, dtype=torch.int32)
    first = 0
    for slot, length in {4: 1, 2: 24, 0: 25, 1: 72, 3: 150}.items():
        count = -(-length // BLOCK_SIZE) if length < 100 else 20
        tables[slot, :count] = order[first : first + count]
        if length > 100:
            tables[slot, count : -(-length // BLOCK_SIZE)] = order[: -(-length // BLOCK_SIZE) - count]
        first += count
    seen, slots = torch.tensor(SEEN, dtype=torch.int32), torch.tensor(SLOTS)
    return TokenKeys(seen.to(device), slots.to(device), tables.to(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "is_interleaved", "rotates", "num_queries"),
    [(20, True, True, 5), (3, False, True, 2), (3, True, False, 5), (3, True, True, 0)],
)
def test_stored_index_keys(
    num_heads: int, is_interleaved: bool, rotates: bool, num_queries: int, dtype: torch.dtype
) -> None:
    """Of all tokens, the first of which have queries."""
    projected = random(5, 30 + 24 + 24 + 7, dtype=dtype)
    angles = random(5, 8, seed=1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = torch.tensor([3, 9, 4, 17, 0])
    found = []
    for module, device in ((reference, CPU), (index_keys, DEVICE)):
        cache = torch.zeros(6, 4, 64, dtype=dtype, device=device)
        queries = random(5, num_heads, 24, dtype=dtype, seed=2).to(device)
        module.store_index_keys(
            queries[:num_queries],
            projected.to(device)[:, 30:54],
            cos_sin.to(device) if rotates else None,
            cache[..., 16:],
            slots.to(device),
            weight=random(24, seed=3).to(device),
            bias=random(24, seed=4).to(device),
            eps=1e-6,
            is_interleaved=is_interleaved,
            gates=None if rotates else projected.to(device)[:, 54:78],
        )
        found.append((queries.cpu(), cache.cpu()))
    for expected, stored in zip(*found, strict=True):
        torch.testing.assert_close(stored, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    stored = found[0][1]
    assert stored[..., :16].abs().sum() == 0 < stored[0, 3, 16:40].abs().min()
    assert rotates == (stored[0, 3, 40:].abs().sum() == 0)


@pytest.mark.parametrize("max_rows", [3, 8])
@pytest.mark.parametrize("num_heads", [3, 24])
def test_chosen_keys(num_heads: int, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same keys, of numbers whose products are exact, so that many scores are equal; all of a short request's."""
    monkeypatch.setattr(choose_keys, "_SELECTED_ALONE", 32)
    monkeypatch.setattr(choose_keys, "_KEYS", 16)
    cache = random(NUM_BLOCKS, BLOCK_SIZE, 40).round()
    queries, weights = random(8, num_heads, 24, seed=1).round(), random(8, num_heads, seed=2).mul(4).round()
    results = []
    for module, device in ((reference, CPU), (choose_keys, DEVICE)):
        chosen = torch.full((8, TOP_K + 3), -1, dtype=torch.int32, device=device)
        module.choose_keys(
            queries.to(device),
            weights.to(device),
            cache.to(device)[..., 16:],
            token_keys(device),
            chosen[:, :TOP_K],
            torch.full((max_rows, 160), float("nan"), device=device),
        )
        results.append([row[: min(count, TOP_K)].tolist() for row, count in zip(chosen.cpu(), SEEN, strict=True)])
        assert (chosen[:, TOP_K:] == -1).all()
    assert results[1] == results[0]
    assert results[0][1] == list(range(24))
    assert all(
        row == sorted(set(row)) and (not row or row[-1] < count) for row, count in zip(results[0], SEEN, strict=True)
    )


@pytest.mark.parametrize("pool", [3, 8])
def test_keys_chosen_by_pools(pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token gets the same keys: those of its best whole pools, and all after the last one."""
    monkeypatch.setattr(choose_keys, "_KEYS", 16)
    monkeypatch.setattr(pools, "_PLACES", 16)
    size, most = 20, 24 // pool
    queries, weights = random(8, 3, size, seed=1), random(8, 3, seed=2)
    results = []
    for modules, device in (((reference,) * 2, CPU), ((pools, choose_keys), DEVICE)):
        cache = random(NUM_BLOCKS, BLOCK_SIZE, 3 * size).to(device)
        tokens = token_keys(device)
        for row, count in enumerate(SEEN):  # each token of a request was in some step
            if count == 0:
                continue
            every = tokens.seen[row : row + 1] - torch.arange(count, device=device).int()
            slots = tokens.slots[row : row + 1].repeat(count)
            modules[0].pool_keys(cache, TokenKeys(every, slots, tokens.tables), random(pool, size, seed=3).to(device))
        found = torch.zeros(8, most, dtype=torch.int32, device=device)
        scores = torch.zeros(8, 160, device=device)
        places = queries.to(device), weights.to(device), cache[..., 2 * size :]
        modules[1].choose_keys(*places, tokens, found, scores, Pools(size=pool))
        chosen = torch.full((8, most * pool + pool - 1), -1, dtype=torch.int32, device=device)
        modules[0].expand_pools(found, tokens, chosen, Pools(size=pool))
        counts = [min(count // pool, most) * pool + count % pool for count in SEEN]
        results.append(([row[:count] for row, count in zip(chosen.tolist(), counts, strict=True)], cache.cpu()))
    torch.testing.assert_close(results[1][1], results[0][1])
    assert results[1][0] == results[0][0]
    for row, count in zip(results[0][0], SEEN, strict=True):
        whole, rest = divmod(count, pool)
        assert row == sorted(set(row))
        assert row[len(row) - rest :] == list(range(whole * pool, count))


@pytest.mark.parametrize("pool", [3, 8])
def test_means_of_pools(pool: int) -> None:
    """Tokens that fill no pool keep their angles."""
    results, size = [], 20
    for module, device in ((reference, CPU), (pools, DEVICE)):
        cache, tokens = random(NUM_BLOCKS, BLOCK_SIZE, 2 * size).to(device), token_keys(device)
        module.average_keys(cache, tokens, random(size, seed=3).to(device), 1e-6, pool)
        results.append(cache.cpu())
    torch.testing.assert_close(results[1], results[0])
    changed = (results[0] != random(NUM_BLOCKS, BLOCK_SIZE, 2 * size)).any(2)
    assert int(changed.sum()) == sum(count > 0 and count % pool == 0 for count in SEEN) > 0


@pytest.mark.parametrize("num_last", [1, 5])
def test_keys_chosen_by_the_best_of_pools(num_last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token gets the pools that hold its best keys, and in any case its last keys from a pool's start on."""
    monkeypatch.setattr(choose_keys, "_KEYS", 16)
    queries, cache = random(8, 1, 20, seed=1), random(NUM_BLOCKS, BLOCK_SIZE, 20)
    by_four, results = Pools(size=4, num_last=num_last), []
    for modules, device in (((reference,) * 2, CPU), ((pools, choose_keys), DEVICE)):
        tokens, found = token_keys(device), torch.zeros(8, 3, dtype=torch.int32, device=device)
        scores = torch.zeros(8, 160, device=device)
        modules[1].choose_keys(queries.to(device), None, cache.to(device), tokens, found, scores, by_four)
        chosen = torch.full((8, 12 + num_last + 3), -1, dtype=torch.int32, device=device)
        modules[0].expand_pools(found, tokens, chosen, by_four)
        whole = [max(0, count - num_last) // 4 for count in SEEN]
        counts = [count - 4 * max(0, number - 3) for count, number in zip(SEEN, whole, strict=True)]
        results.append([row[:count] for row, count in zip(chosen.tolist(), counts, strict=True)])
    assert results[1] == results[0]
    for row, own, count, number, query in zip(
        results[0], token_keys(CPU).slots, SEEN, whole, queries[:, 0], strict=True
    ):
        keys = cache[token_keys(CPU).tables[own].long()].flatten(0, 1)
        best = (keys[: 4 * number] @ query).view(-1, 4).amax(1).topk(min(3, number)).indices.sort().values
        assert row == [*(4 * best[:, None] + torch.arange(4)).flatten().tolist(), *range(4 * number, count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_tokens", "has_sinks", "value_dim", "rate", "values_apart"),
    [
        (4, 8, True, 32, 1, False),
        (4, 1, True, 32, 1, False),
        (4, 1, False, 32, 1, False),
        (80, 8, False, 32, 1, False),
        (4, 8, False, 64, 1, False),
        (4, 8, True, 64, 2, False),
        (4, 1, True, 64, 5, False),
        (4, 8, False, 32, 1, True),
    ],
)
@pytest.mark.parametrize("chooses", [True, False])
def test_attention_to_chosen_keys(
    num_heads: int,
    num_tokens: int,
    has_sinks: bool,
    value_dim: int,
    rate: int,
    values_apart: bool,
    chooses: bool,
    dtype: torch.dtype,
) -> None:
    """In one part or several, and with more heads than a tile has; what lies in other places may be NaN. With a rate
    fewer keys are attended, and those of a window."""
    picks = torch.stack(
        [
            torch.randperm(max(1, count), generator=torch.Generator().manual_seed(count))[:1].repeat(TOP_K)
            for count in SEEN
        ]
    )
    for row, count in enumerate(SEEN):
        own = torch.randperm(max(1, count), generator=torch.Generator().manual_seed(row))[:TOP_K].sort().values
        picks[row, : len(own)] = own
    first = 8 - num_tokens
    key_dim = 48 if value_dim == 32 and not values_apart else value_dim
    cache = random(NUM_BLOCKS, BLOCK_SIZE, 80, dtype=dtype)
    cache[..., key_dim + value_dim * values_apart :] = float("nan")
    queries = random(8, num_heads, key_dim, dtype=dtype, seed=1)
    sinks = torch.linspace(-4, 6, num_heads)
    results = []
    for module, device in ((reference, CPU), (attend_chosen, DEVICE)):
        tokens = token_keys(device)
        near = TokenKeys(tokens.seen[first:], tokens.slots[first:], tokens.tables.roll(7, dims=1))
        tokens = TokenKeys(near.seen // rate, near.slots, tokens.tables)
        window = WindowKeys(random(60, 8, value_dim, dtype=dtype, seed=2).to(device), near, 13)
        out = torch.full((num_tokens, num_heads, value_dim), float("nan"), dtype=dtype, device=device)
        module.attend_chosen(
            queries[first:].to(device),
            cache.to(device)[..., :key_dim],
            tokens,
            picks[first:].int().to(device) if chooses else None,
            out,
            scale=0.3,
            sinks=sinks.to(device) if has_sinks else None,
            values=cache.to(device)[..., key_dim : key_dim + value_dim] if values_apart else None,
            window=window if rate > 1 else None,
        )
        results.append(out.cpu())
    torch.testing.assert_close(results[1], results[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if num_tokens == 8:
        assert (results[0][2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rate", "num_series", "size", "rotated"), [(12, 1, 40, 8), (24, 2, 24, 24)])
def test_keys_of_several_tokens(rate: int, num_series: int, size: int, rotated: int, dtype: torch.dtype) -> None:
    """Of each token that fills a window, where its keys are; the first window has none before it."""
    width = num_series * size
    rows = random(8, 2 * width + 3, dtype=dtype)[:, :-3]
    places = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(4))[:8]
    angles = random(160, rotated // 2, seed=1)
    results = []
    for module, device in ((compressed, CPU), (compressed_kernels, DEVICE)):
        inputs = random(NUM_BLOCKS, BLOCK_SIZE, 2 * width + 5, dtype=dtype, seed=2).to(device)
        module.store_inputs(rows.to(device), inputs[..., : 2 * width], places.to(device))
        keys = torch.zeros(NUM_BLOCKS, 3, size + 7, dtype=dtype, device=device)
        tokens = token_keys(device)
        module.compress_keys(
            inputs[..., : 2 * width],
            tokens,
            keys[..., :size],
            tokens.tables.flip(0),
            torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
            KeyWeights(random(rate, width, seed=3).to(device), random(size, seed=5).to(device), 1e-6),
        )
        results.append((inputs.cpu(), keys.cpu()))
    assert torch.equal(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1], results[0][1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    stored = results[0][1]
    assert (stored[..., :size].abs().amax(dim=2) > 0).sum() == sum(seen % rate == 0 < seen for seen in SEEN)
    assert (stored[..., size:] == 0).all()
