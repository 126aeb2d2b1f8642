"""Times the attention backends on this GPU: decode by lengths and rows, prompts by shapes.

    python scripts/bench_attention.py [--only decode|prompts] [--backends triton,flash-attn,…] [--rows 1,16,64,…]
                                      [--window N] [--width N]

bf16 on random data, KV heads 8 × 128. Decode lengths are uniform in 100 to 1,620. With a width, decode rows have so
many tokens each: the last one and drafts. A time is that of a layer: the median
of several replays of a CUDA graph over several layers' caches, so that no layer finds its keys in the L2 cache. With a
window, bytes and operations count the keys that are seen alone. Plans are those of a step, on the host and on the GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from benchmark import Case, Figures, gpu_microseconds, run_benchmark, wall_seconds
from nvcli.attention import selection
from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, BatchShape, ForwardBatch
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.spec import AttentionSpec
from nvcli.errors import ConfigError

DEVICE = torch.device("cuda")
NUM_KV_HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
CACHE_BYTES = 32 << 30
"""The caches of all layers together."""


def make_case(
    num_heads: int,
    block_size: int,
    window: int | None,
    max_num_seqs: int = 1024,
    max_tokens: int = 16_384,
    width: int = 1,
) -> AttentionCase:
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, window=window
    )
    return AttentionCase(
        device=DEVICE,
        dtype=DTYPE,
        specs=(spec,),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_decode_width=width,
        max_draft_step_tokens=max_num_seqs * width if width > 1 else 0,
    )


@cache
def memory_pool() -> Tensor:
    """Random values that all caches are cut from: where memory lies physically changes times by some percent, so
    backends are compared on the same memory."""
    pool = torch.empty(CACHE_BYTES // DTYPE.itemsize, dtype=DTYPE, device=DEVICE)
    for part in pool.split(1 << 28):
        part.normal_()
    return pool


class PooledCache(KVCache):
    """A cache whose memory is cut from the pool."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index, 0], self.data[index, 1]


def make_cache(num_blocks: int, block_size: int) -> KVCache:
    """A cache of as many layers as the pool has room for, 28 at most."""
    block = (block_size, NUM_KV_HEADS, HEAD_DIM)
    layer_size = 2 * num_blocks * math.prod(block)
    num_layers = min(28, memory_pool().numel() // layer_size)
    assert num_layers >= 2, "one layer would be timed in the L2 cache"
    spec = KVCacheSpec(
        group_layers=(tuple(range(num_layers)),),
        group_heads=((NUM_KV_HEADS, HEAD_DIM),),
        block_size=block_size,
        dtype=DTYPE,
    )
    kv_cache = PooledCache(spec, 1, DEVICE)
    kv_cache.num_blocks = num_blocks
    kv_cache.data = memory_pool()[: num_layers * layer_size].view(num_layers, 2, num_blocks, *block)
    return kv_cache


def make_batch(
    chunk_lens: list[int],
    seq_lens: np.ndarray,
    block_size: int,
    backend: AttentionBackend,
    spread: int = 1,
    width: int = 1,
) -> ForwardBatch:
    """Prefill chunks of these lengths, or decode rows of `width` tokens where there are none; blocks in random order
    among `spread` times as many; in order where it is 0."""
    num_blocks = -(-seq_lens // block_size)
    total = int(num_blocks.sum())
    ids = np.random.default_rng(0).permutation(spread * total)[:total] + 1 if spread else np.arange(total) + 1
    tables = np.zeros((len(seq_lens), int(num_blocks.max())), dtype=np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(num_blocks), num_blocks, strict=True)):
        tables[row, :count] = ids[end - count : end]
    num_rows = len(seq_lens)
    query_lens = np.array(chunk_lens or [width] * num_rows)
    nothing = torch.empty(0, device=DEVICE)
    slots = np.random.default_rng(2).permutation(num_rows)
    slot_tables = np.zeros_like(tables)
    slot_tables[slots] = tables
    shape = BatchShape(decode_rows=num_rows, tokens_per_row=width)
    if chunk_lens:
        shape = BatchShape(prefill_rows=num_rows, prefill_tokens=sum(chunk_lens))
    return ForwardBatch(
        shape=shape,
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        slots=torch.from_numpy(slots).to(DEVICE),
        block_tables=torch.from_numpy(slot_tables).to(DEVICE)[None],
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(DEVICE),
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=DEVICE),
        logits_rows=nothing,
        num_tokens_host=query_lens,
        seq_lens_host=seq_lens,
        kv_cache=make_cache(max(spread, 1) * total + 1, block_size),
        backend=backend,
    )


@dataclass
class Layers:
    """One call of `forward` for each layer of a batch."""

    batch: ForwardBatch
    spec: AttentionSpec

    def __post_init__(self) -> None:
        num_heads = self.spec.num_heads
        heads = torch.randn((self.batch.num_tokens, num_heads + 2 * NUM_KV_HEADS, HEAD_DIM), device=DEVICE).to(DTYPE)
        self.q = heads[:, :num_heads]
        self.k, self.v = heads[:, num_heads:].chunk(2, dim=1)
        self.count = len(self.batch.kv_cache.spec.group_layers[0])

    def __call__(self) -> None:
        for layer in range(self.count):
            self.batch.backend.forward(AttentionLayer(self.spec, layer), self.q, self.k, self.v, self.batch)

    def microseconds(self) -> float:
        return gpu_microseconds(self, 1) / self.count


def block_size_of(name: str) -> int:
    return 256 if name == "flash-attn" else 64


def plan_times(batch: ForwardBatch) -> Figures:
    """Return the times of a plan on the host, while the GPU is idle, and on the GPU."""

    def plan() -> float:
        torch.cuda.synchronize()
        return wall_seconds(lambda: batch.backend.plan(batch))

    def plan_on_device() -> None:
        nothing.zero_()  # where a plan launches nothing, there would be nothing to capture
        for _ in range(20):
            batch.backend.plan_on_device(batch)

    nothing = torch.zeros(1, device=DEVICE)
    return {
        "host plan, µs": statistics.median(plan() for _ in range(9)) * 1e6,
        "GPU plan, µs": gpu_microseconds(plan_on_device, 1) / 20,
    }


def measure_decode(name: str, num_heads: int, num_rows: int, window: int | None, width: int, number: int) -> Figures:
    lens = np.random.default_rng(1).integers(100, 1620, num_rows)
    num_keys = int(np.minimum(lens, window or lens.max()).sum())
    case = make_case(num_heads, block_size_of(name), window, width=width)
    backend = selection._load(name, case)(case)
    batch = make_batch([], lens, case.block_size, backend, width=width)
    backend.prepare_capture(batch)
    backend.plan(batch)
    backend.plan_on_device(batch)
    microseconds = Layers(batch, case.specs[0]).microseconds()
    num_bytes = num_keys * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    return {"µs": microseconds, "GB/s of K and V": num_bytes / microseconds / 1e3, **plan_times(batch)}


PROMPTS = {
    "16 x 562": ([562] * 16, [562] * 16),
    "2 x 8k": ([8192] * 2, [8192] * 2),
    "8k behind 24k": ([8192], [32768]),
    "64 x (64 behind 2k)": ([64] * 64, [2112] * 64),
}


def count_pairs(num_tokens: int, length: int, window: int | None) -> int:
    """Count the pairs of a token and a key that it sees, of the last `num_tokens` of a request."""
    seen = np.arange(length - num_tokens + 1, length + 1)
    return int(np.minimum(seen, window or length).sum())


def measure_prompts(name: str, num_heads: int, title: str, window: int | None, number: int) -> Figures:
    chunk_lens, seq_lens = PROMPTS[title]
    pairs = sum(count_pairs(n, length, window) for n, length in zip(chunk_lens, seq_lens, strict=True))
    case = make_case(num_heads, block_size_of(name), window)
    backend = selection._load(name, case)(case)
    batch = make_batch(chunk_lens, np.array(seq_lens), case.block_size, backend)
    backend.plan(batch)
    backend.plan_on_device(batch)
    layers = Layers(batch, case.specs[0])
    layers.count = min(layers.count, 4)
    microseconds = layers.microseconds()
    flops = 4 * num_heads * HEAD_DIM * pairs
    return {"µs": microseconds, "TFLOP/s": flops / microseconds / 1e6, **plan_times(batch)}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def usable(names: Sequence[str], num_heads: int, window: int | None) -> list[str]:
    """Return the backends that work here, and say why others do not."""
    found = []
    for name in names:
        try:
            selection._choose(name, make_case(num_heads, block_size_of(name), window), [])
            found.append(name)
        except ConfigError as error:
            print(error)
    return found


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    stack.enter_context(torch.inference_mode())
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    window = options.window
    names = usable(options.backends.split(","), options.heads[0], window)
    for num_heads in options.heads:
        heads = f"{num_heads}/{NUM_KV_HEADS} heads"
        for num_rows in options.rows:
            for name in names:
                measure = partial(measure_decode, name, num_heads, num_rows, window, options.width)
                yield Case(f"decode, {heads}, {num_rows} rows: {name}", measure)
        for title in PROMPTS:
            for name in names:
                measure = partial(measure_prompts, name, num_heads, title, window)
                yield Case(f"prompts, {heads}, {title}: {name}", measure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", default="triton,flash-attn,flashinfer")
    parser.add_argument("--rows", type=numbers, default="1,16,64,256,1024")
    parser.add_argument("--heads", type=numbers, default="16,32")
    parser.add_argument("--window", type=int)
    parser.add_argument("--width", type=int, default=1)


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options)
