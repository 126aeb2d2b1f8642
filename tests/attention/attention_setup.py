"""A backend at work on a small cache, compared at every step with attention written out as a formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batches import Blocks, RequestState, make_batch, shape_of
from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, BatchShape, ForwardBatch
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.spec import AttentionSpec, HeadSizes
from nvcli.kernels.distance_bias import DistanceBias
from nvcli.kernels.fp8_kv import dequantise_heads, quantise_heads, store_heads
from nvcli.kernels.fp8_types import FP8

SCALE = 0.11
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Error of each head's result, as a part of its norm."""


@dataclass
class History:
    """A request and all its keys and values so far, [length, KV, D], by KV group."""

    state: RequestState = field(default_factory=RequestState)
    keys: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    values: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


Work = tuple[History, int]
"""A request and how many more tokens of it are computed."""


class Bench:
    """A backend for one kind of attention for each window in `windows`, each with a KV group of its own.

    Before each step, blocks that a group's window has left behind are given back, and stand in the block table as a
    block of `poison`. Kinds with the same window differ in scale.
    """

    def __init__(
        self,
        backend: Callable[[AttentionCase], AttentionBackend],
        *,
        num_kv_heads: int = 1,
        ratio: int = 1,
        head_dim: int = 64,
        block_size: int = 16,
        num_tokens: int = 1024,
        windows: tuple[int | None, ...] = (None,),
        both_ways: bool = False,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        bias_extent: int | None = None,
        head_dims: tuple[int, ...] | None = None,
        value_dim: int | None = None,
        has_values: bool = True,
        projected: HeadSizes | None = None,
        top_k: int | None = None,
        index_dim: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
        max_num_seqs: int = 256,
        max_decode_width: int = 8,
        max_shared_rows: int = 0,
        poison: float = float("nan"),
    ) -> None:
        """`head_dims`: the head size of each group's layers, instead of `head_dim` for all."""
        self.device, self.dtype = torch.device(device), dtype
        head_dims = head_dims or (head_dim,) * len(windows)
        num_blocks = len(windows) * (num_tokens // block_size + 64)
        self.specs = tuple(
            AttentionSpec(
                num_heads=num_kv_heads * ratio,
                num_kv_heads=num_kv_heads,
                head_dim=head_dims[group],
                scale=SCALE * (1 + group),
                window=window,
                both_ways=both_ways,
                soft_cap=soft_cap,
                has_sinks=has_sinks,
                bias_extent=bias_extent,
                kv_group=group,
                value_dim=value_dim,
                has_values=has_values,
                projected=projected,
                top_k=top_k,
                index_dim=index_dim,
            )
            for group, window in enumerate(windows)
        )
        # Two layers for each group, of which the first one's keys and values are another's.
        num_groups = len(windows)
        cache_spec = KVCacheSpec(
            group_layers=tuple((group, num_groups + group) for group in range(num_groups)),
            group_heads=tuple((num_kv_heads, size) for size in head_dims),
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            group_value_dims=(value_dim,) * num_groups,
            latent_groups=() if has_values else tuple(range(num_groups)),
        )
        self.layers = range(num_groups, 2 * num_groups)
        self.kv_cache = KVCache(cache_spec, num_blocks, self.device)
        self.blocks = Blocks(num_blocks)
        self.poison_block = self.blocks.free.pop()
        self.fill_blocks([self.poison_block], poison)
        self.case = AttentionCase(
            device=self.device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            specs=self.specs,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=16_384,
            max_decode_width=max_decode_width,
            max_draft_step_tokens=512,
            block_bytes=cache_spec.block_bytes,
            max_shared_rows=max_shared_rows,
        )
        self.backend = backend(self.case)
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.sinks = None
        if has_sinks:  # from heads that hardly notice theirs to heads that attend to little else
            self.sinks = torch.linspace(-4, 6, self.specs[0].num_heads, device=self.device)

    def leave_garbage(self, value: float) -> None:
        """Fill all blocks but the null block with what earlier owners might have left."""
        self.fill_blocks([block for block in range(1, self.kv_cache.num_blocks) if block != self.poison_block], value)

    def fill_blocks(self, blocks: list[int], value: float) -> None:
        for layer in range(2 * len(self.specs)):
            for cache in self.kv_cache.layer(layer):
                if cache.dtype == FP8:
                    cache.view(torch.uint8)[blocks] = int(torch.tensor(value).to(FP8).view(torch.uint8))
                else:
                    cache[blocks] = value
            for scale in self.kv_cache.scales(layer) or ():
                scale[blocks] = value

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def random_qkv(self, num_tokens: int, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        """Strided views of one buffer, as the fused projection gives them."""
        heads = self.random(num_tokens, spec.num_heads + spec.num_parts * spec.num_kv_heads, spec.head_dim)
        if not spec.has_values:
            q, k = heads.split([spec.num_heads, spec.num_kv_heads], dim=1)
            return q, k, k[..., : spec.value_dim]
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return q, k, v[..., : spec.result_dim]

    def store(self, group: int, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return them as the cache has rounded them."""
        layer = self.layers[group]
        scales = self.kv_cache.scales(layer)
        if scales is not None:
            keys, values = self.kv_cache.layer(layer)
            store_heads(keys, scales.k, places, k)
            if not self.specs[group].has_values:
                k = dequantise_heads(*quantise_heads(k)).to(self.dtype)
                return k, k[..., : self.specs[group].value_dim]
            store_heads(values, scales.v, places, v)
            k, v = (dequantise_heads(*quantise_heads(rows)).to(self.dtype) for rows in (k, v))
            return k, v
        for cache, rows in zip(self.kv_cache.layer(layer), (k, v), strict=True):
            cache[places // self.case.block_size, places % self.case.block_size] = rows.to(cache.dtype)
        return k.to(self.case.cache_dtype).to(self.dtype), v.to(self.case.cache_dtype).to(self.dtype)

    def fill(self, history: History, count: int) -> None:
        """Put `count` more tokens into the cache without attending."""
        state, block_size = history.state, self.case.block_size
        positions = range(state.length, state.length + count)
        for spec in self.specs:
            group, table = spec.kv_group, state.tables[spec.kv_group]
            self.blocks.grow(table, state.length + count, block_size)
            places = [table[i // block_size] * block_size + i % block_size for i in positions]
            _, k, v = self.random_qkv(count, spec)
            k, v = self.store(group, torch.tensor(places, dtype=torch.int64, device=self.device), k, v)
            history.keys[group].append(k)
            history.values[group].append(v)
        state.length += count

    def free_behind_windows(self, history: History) -> None:
        """Give back the blocks that neither the next token nor any later one sees."""
        block_size = self.case.block_size
        for spec in self.specs:
            if spec.window is None:
                continue
            table = history.state.tables[spec.kv_group]
            for column in range(max(0, history.state.length - spec.window + 1) // block_size):
                if table[column] != self.poison_block:
                    self.blocks.free.insert(0, table[column])
                    table[column] = self.poison_block

    def batch(self, *work: Work, shape: BatchShape | None = None, table_shape: tuple[int, int] | None = None) -> Step:
        """Make a batch of the work, decode rows first, with each kind's q, k and v, and store them."""
        for history, _ in work:
            self.free_behind_windows(history)
        states = [(history.state, [0] * count) for history, count in work]
        shape = shape or shape_of(states)
        batch = make_batch(states, self.kv_cache, self.backend, self.blocks, shape=shape, table_shape=table_shape)
        starts = _starts([count for _, count in work], shape)
        inputs = []
        for spec in self.specs:
            group = spec.kv_group
            q, k, v = self.random_qkv(batch.num_tokens, spec)
            keys, values = self.store(group, batch.slot_mapping[group], k, v)
            for (history, count), start in zip(work, starts, strict=True):
                history.keys[group].append(keys[start : start + count].clone())
                history.values[group].append(values[start : start + count].clone())
            inputs.append((q, k, v))
        extent = self.specs[0].bias_extent
        biases = [self.random(batch.num_tokens, spec.num_heads, extent) for spec in self.specs if extent is not None]
        return Step(self, batch, list(work), starts, inputs, biases)

    def step(self, *work: Work, shape: BatchShape | None = None) -> None:
        """Attend the work with every kind of attention, and compare."""
        step = self.batch(*work, shape=shape)
        step.check(step.forward())


@dataclass
class Step:
    """A planned batch whose keys and values are stored."""

    bench: Bench
    batch: ForwardBatch
    work: list[Work]
    starts: list[int]
    """First token of each request."""
    inputs: list[tuple[Tensor, Tensor, Tensor]]
    """q, k, v of each kind of attention."""
    biases: list[Tensor]
    """What tokens add to scores in each kind; empty: nothing."""

    def forward(self) -> list[Tensor]:
        """Run each kind of attention, and return the results."""
        backend = self.bench.backend
        results = []
        for index, (spec, layer, (q, k, v)) in enumerate(
            zip(self.bench.specs, self.bench.layers, self.inputs, strict=True)
        ):
            bias = DistanceBias(self.biases[index], self.batch.positions) if self.biases else None
            attended = AttentionLayer(spec, layer, self.bench.sinks, bias)
            results.append(backend.forward(attended, q, k if backend.reads_new_keys else None, v, self.batch))
        return results

    def check(self, outs: list[Tensor]) -> None:
        """Check that every request's result is what the formula says, and that padding gives finite results."""
        biases = self.biases or [None] * len(outs)
        for spec, (q, _, _), bias, out in zip(self.bench.specs, self.inputs, biases, outs, strict=True):
            assert out.shape == (*q.shape[:2], spec.result_dim)
            assert out.is_contiguous()
            assert out.isfinite().all()
            for (history, count), start in zip(self.work, self.starts, strict=True):
                tokens = slice(start, start + count)
                keys, values = torch.cat(history.keys[spec.kv_group]), torch.cat(history.values[spec.kv_group])
                near = None if bias is None else bias[tokens]
                expected = written_out(q[tokens], keys, values, spec, self.bench.sinks, near)
                error = (out[tokens].double() - expected).norm(dim=-1) / expected.norm(dim=-1)  # NaN fails below
                assert bool((error < TOLERANCE[self.bench.dtype]).all()), (
                    f"off by {error.max().item():.1e}: {spec}, {count} tokens of {history.state.length}"
                )


def _starts(counts: list[int], shape: BatchShape) -> list[int]:
    """First token of each request in a batch of this shape."""
    starts, start, row = [], 0, 0
    for count in counts:
        if row < shape.decode_rows and count == shape.tokens_per_row:
            starts.append(start)
        else:
            start = max(start, shape.decode_tokens)
            row = shape.decode_rows
            starts.append(start)
        start += count
        row += 1
    return starts


def written_out(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ scale) v for one request whose last tokens `q` belongs to, in float64. A sink is a key whose value
    is 0. bias: [tokens, heads, distances], added to the scores of near keys."""
    num_new, num_heads, _ = q.shape
    length, num_kv_heads, _ = keys.shape
    q = q.double().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    keys, values = keys.double(), values.double()
    parts = []
    for first in range(0, num_new, 1024):  # bounds the scores' memory
        rows = torch.arange(first, min(first + 1024, num_new), device=q.device)
        position = (length - num_new + rows).unsqueeze(1)
        key = torch.arange(length, device=q.device)
        reach = (spec.window or length) - 1 if spec.both_ways else 0
        hidden = key > position + reach
        if spec.window is not None:
            hidden |= key < position - spec.window + 1
        scores = torch.einsum("nkgd,mkd->kgnm", q[rows], keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        for distance in range(0 if bias is None else bias.shape[2]):
            assert bias is not None
            heads = bias[rows, :, distance].double().T.view(num_kv_heads, -1, len(rows), 1)
            scores += heads * (position - key == distance)
        scores = scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            heads = sinks.double().view(num_kv_heads, -1, 1, 1).expand(-1, -1, len(rows), 1)
            scores = torch.cat((scores, heads), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        parts.append(torch.einsum("kgnm,mkd->nkgd", weights, values).flatten(1, 2))
    return torch.cat(parts)
