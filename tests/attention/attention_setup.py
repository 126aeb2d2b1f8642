"""A backend at work on a small cache, compared at every step with attention written out as a formula."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batches import Blocks, RequestState, make_batch
from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionSpec
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_cache import KVCache, KVCacheSpec

LAYER = 1
"""Of two: the other one's cache is another's."""
SCALE = 0.11
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of each head's result, as a part of its norm."""


@dataclass
class History:
    """A request and all its keys and values so far, [length, KV, D]."""

    state: RequestState = field(default_factory=RequestState)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Bench:
    def __init__(
        self,
        backend: type[AttentionBackend],
        *,
        num_kv_heads: int = 1,
        ratio: int = 1,
        head_dim: int = 64,
        block_size: int = 16,
        num_tokens: int = 1024,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_num_seqs: int = 256,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        num_blocks = num_tokens // block_size + 64
        self.spec = AttentionSpec(
            num_heads=num_kv_heads * ratio, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=SCALE
        )
        cache_spec = KVCacheSpec(
            num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        self.kv_cache = KVCache(cache_spec, num_blocks, self.device)
        self.blocks = Blocks(num_blocks)
        self.case = AttentionCase(
            device=self.device,
            dtype=dtype,
            num_heads=num_kv_heads * ratio,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
        )
        self.backend = backend(self.case)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def random_qkv(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Strided views of one buffer, as the fused projection gives them."""
        spec = self.spec
        heads = self.random(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        return heads[:, : spec.num_heads], heads[:, spec.num_heads : -spec.num_kv_heads], heads[:, -spec.num_kv_heads :]

    def store(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for cache, rows in zip(self.kv_cache.layer(LAYER), (k, v), strict=True):
            cache.view(-1, *rows.shape[1:])[slots] = rows

    def fill(self, history: History, count: int) -> None:
        """Put `count` more tokens into the cache without attending."""
        state, block_size = history.state, self.case.block_size
        self.blocks.grow(state.table, state.length + count, block_size)
        positions = range(state.length, state.length + count)
        slots = [state.table[i // block_size] * block_size + i % block_size for i in positions]
        _, k, v = self.random_qkv(count)
        self.store(torch.tensor(slots, device=self.device), k, v)
        history.keys.append(k)
        history.values.append(v)
        state.length += count

    def batch(self, *work: tuple[History, int]) -> tuple[ForwardBatch, Tensor, Tensor, Tensor]:
        """The batch of `count` new tokens of each request, decode rows first, and its q, k, v, stored."""
        batch = make_batch([(h.state, [0] * count) for h, count in work], self.kv_cache, self.backend, self.blocks)
        q, k, v = self.random_qkv(batch.num_tokens)
        self.store(batch.slot_mapping[0], k, v)
        start = 0
        for history, count in work:
            history.keys.append(k[start : start + count])
            history.values.append(v[start : start + count])
            start += count
        return batch, q, k, v

    def step(self, *work: tuple[History, int]) -> None:
        batch, q, k, v = self.batch(*work)
        out = self.backend.forward(self.spec, LAYER, q, k, v, batch)
        assert out.shape == q.shape
        assert out.is_contiguous()
        start = 0
        for history, count in work:
            self.check(out[start : start + count], q[start : start + count], history)
            start += count

    def check(self, out: Tensor, q: Tensor, history: History) -> None:
        """`out`, of a request's last tokens, is what the formula says."""
        expected = written_out(q, torch.cat(history.keys), torch.cat(history.values), self.spec.scale)
        error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)  # NaN fails below
        worst = error.max().item()
        assert bool((error < TOLERANCE[self.dtype]).all()), f"off by {worst:.1e} of {tuple(out.shape)}"


def written_out(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ scale) v for one request whose last tokens `q` belongs to, in float64."""
    num_new, num_heads, _ = q.shape
    length, num_kv_heads, _ = keys.shape
    q = q.double().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    keys, values = keys.double(), values.double()
    parts = []
    for first in range(0, num_new, 1024):  # bounds the scores' memory
        rows = torch.arange(first, min(first + 1024, num_new), device=q.device)
        hidden = torch.arange(length, device=q.device) > (length - num_new + rows).unsqueeze(1)
        scores = torch.einsum("nkgd,mkd->kgnm", q[rows], keys) * scale
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("kgnm,mkd->nkgd", weights, values).flatten(1, 2))
    return torch.cat(parts)
