"""The torch backend against attention written out: it defines the semantics, so it must be beyond doubt."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from batches import Blocks, RequestState, make_batch
from nvcli.attention.backend import AttentionCase, AttentionSpec
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.torch_backend import TorchBackend

LAYER = 1
"""Of two: the other one's cache must stay as it was."""


@dataclass
class History:
    """A request and all its keys and values so far, [length, KV, D]."""

    state: RequestState = field(default_factory=RequestState)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Bench:
    """A backend over a small cache, compared with the written-out formula at every step."""

    def __init__(
        self,
        *,
        num_kv_heads: int = 1,
        ratio: int = 1,
        head_dim: int = 64,
        block_size: int = 16,
        num_tokens: int = 1024,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        cpu = torch.device("cpu")
        num_blocks = num_tokens // block_size + 64
        self.spec = AttentionSpec(
            layer=LAYER, num_heads=num_kv_heads * ratio, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=0.11
        )
        cache_spec = KVCacheSpec(
            num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        self.kv_cache = KVCache(cache_spec, num_blocks, cpu)
        self.blocks = Blocks(num_blocks)
        self.backend = TorchBackend(
            AttentionCase(
                device=cpu,
                dtype=dtype,
                num_heads=num_kv_heads * ratio,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
            )
        )
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(self, *work: tuple[History, int]) -> None:
        """Attend `count` new tokens of each request; decode rows first."""
        spec = self.spec
        total = sum(count for _, count in work)
        q = self.random(total, spec.num_heads, spec.head_dim)
        k, v = self.random(2, total, spec.num_kv_heads, spec.head_dim)
        batch = make_batch([(h.state, [0] * count) for h, count in work], self.kv_cache, self.backend, self.blocks)
        out = self.backend.forward(spec, q, k, v, batch)
        assert out.shape == q.shape
        tolerance = 2e-5 if self.dtype == torch.float32 else 2e-2
        start = 0
        for history, count in work:
            rows = slice(start, start + count)
            history.keys.append(k[rows])
            history.values.append(v[rows])
            expected = written_out(q[rows], torch.cat(history.keys), torch.cat(history.values), spec.scale)
            torch.testing.assert_close(out[rows].double(), expected, atol=tolerance, rtol=tolerance)
            start += count


def written_out(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ scale) v for one request whose last tokens `q` belongs to, in float64."""
    num_new, num_heads, _ = q.shape
    length, num_kv_heads, _ = keys.shape
    visible = torch.arange(length) <= torch.arange(length - num_new, length).unsqueeze(1)
    q = q.double().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    scores = torch.einsum("nkgd,mkd->kgnm", q, keys.double()) * scale
    weights = scores.masked_fill_(~visible, float("-inf")).softmax(-1)
    return torch.einsum("kgnm,mkd->nkgd", weights, values.double()).flatten(1, 2)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shapes_and_step_kinds(head_dim: int, ratio: int, block_size: int) -> None:
    """Prompts, chunks behind a cached prefix, decode rows, and all of them at once."""
    bench = Bench(num_kv_heads=2, ratio=ratio, head_dim=head_dim, block_size=block_size)
    a, b, c, d, e = (History() for _ in range(5))
    bench.step((a, 1), (b, 15), (c, 16), (d, 65))
    bench.step((a, 1), (c, 1), (b, 40), (e, 129))
    bench.step((e, 1), (d, 1), (b, 1), (c, 2), (a, 17))
    for _ in range(3):
        bench.step((a, 1), (b, 1), (c, 1), (d, 1), (e, 1))


def test_long_prompt_in_chunks() -> None:
    bench = Bench(ratio=2, num_tokens=2200, block_size=64)
    history, other = History(), History()
    bench.step((history, 700))
    bench.step((history, 1), (other, 3))
    bench.step((other, 1), (history, 1200))
    bench.step((history, 100), (other, 5))
    bench.step((history, 1), (other, 1))


@pytest.mark.parametrize("block_size", [1, 16])
def test_many_decode_rows_of_mixed_lengths(block_size: int) -> None:
    """Rows are attended in groups of similar length; each must get its own answer back, shortest and longest too."""
    bench = Bench(num_kv_heads=2, ratio=2, num_tokens=64_000, block_size=block_size)
    rng = random.Random(0)
    histories = [History() for _ in range(150)]
    lengths = [1, 2000, *(rng.randint(1, 500) for _ in histories[2:])]
    for history, length in zip(histories, lengths, strict=True):
        keys, values = bench.random(2, length, 2, 64)
        bench.blocks.grow(history.state.table, length, block_size)
        for cache, rows in zip(bench.kv_cache.layer(LAYER), (keys, values), strict=True):
            slots = [history.state.table[i // block_size] * block_size + i % block_size for i in range(length)]
            cache.view(-1, 2, 64)[slots] = rows
        history.keys, history.values, history.state.length = [keys], [values], length
    for _ in range(2):
        rng.shuffle(histories)
        bench.step(*((history, 1) for history in histories))


def test_bfloat16() -> None:
    bench = Bench(num_kv_heads=2, ratio=4, head_dim=128, dtype=torch.bfloat16)
    a, b = History(), History()
    bench.step((a, 20), (b, 70))
    bench.step((a, 1), (b, 40))
    bench.step((a, 1), (b, 1))


def test_stores_into_its_own_slots_only() -> None:
    bench = Bench(block_size=4)
    bench.kv_cache.data.fill_(7.0)
    history = History()
    bench.step((history, 6))
    keys, values = bench.kv_cache.layer(LAYER)
    table = history.state.table
    torch.testing.assert_close(keys[table].flatten(0, 1)[:6], history.keys[0])
    torch.testing.assert_close(values[table].flatten(0, 1)[:6], history.values[0])
    bench.kv_cache.layer(LAYER)[0].view(-1, 64)[[table[i // 4] * 4 + i % 4 for i in range(6)]] = 7.0
    bench.kv_cache.layer(LAYER)[1].view(-1, 64)[[table[i // 4] * 4 + i % 4 for i in range(6)]] = 7.0
    assert (bench.kv_cache.data == 7.0).all(), "another layer, block or offset was written"


def test_garbage_behind_a_request_is_not_read() -> None:
    """A block's slots behind the request's end hold what an earlier owner left there; so does the null block."""
    bench = Bench(block_size=16)
    a, b = History(), History()
    bench.kv_cache.data.fill_(1e4)
    bench.step((a, 3), (b, 30))
    bench.step((a, 1), (b, 1))
    bench.step((a, 2), (b, 2))


def test_padding_rows_are_harmless() -> None:
    """A row of length 0 (padding) gets some finite answer and disturbs no other row."""
    bench = Bench()
    a = History()
    bench.step((a, 20))
    batch = make_batch([(a.state, [0])], bench.kv_cache, bench.backend, bench.blocks)
    batch.seq_lens = torch.tensor([21, 0], dtype=torch.int32)
    batch.block_tables = torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables)))
    batch.slot_mapping = torch.cat((batch.slot_mapping, torch.tensor([0])))
    batch.num_decodes = 2
    q, k, v = bench.random(3, 2, 1, 64)
    bench.backend.plan(batch)
    out = bench.backend.forward(bench.spec, q, k, v, batch)
    expected = written_out(q[:1], torch.cat((*a.keys, k[:1])), torch.cat((*a.values, v[:1])), bench.spec.scale)
    torch.testing.assert_close(out[:1].double(), expected, atol=2e-5, rtol=2e-5)
    assert out.isfinite().all()
