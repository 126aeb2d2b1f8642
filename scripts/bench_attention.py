#!/usr/bin/env python3
"""Time the attention backends on this GPU: decode by lengths and rows, prefill by shapes; a table at the end.

    python3 scripts/bench_attention.py [--only decode|prefill] [--backends triton,flash-attn,…] [--rows 1,16,64,…]
                                       [--window N]

bf16 on random data, KV heads 8 × 128. Decode lengths are uniform in 100 to 1,620. Each figure is the median of several
replays of a CUDA graph over several layers' caches, so that no layer finds its keys in the L2 cache. With a window,
bytes and operations count the keys that are seen alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nvcli.attention import selection
from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.spec import AttentionSpec
from nvcli.errors import ConfigError

DEVICE = torch.device("cuda")
NUM_KV_HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
CACHE_BYTES = 32 << 30
"""The caches of all layers together."""


def make_case(
    num_heads: int, block_size: int, window: int | None, max_num_seqs: int = 1024, max_tokens: int = 16_384
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
    chunk_lens: list[int], seq_lens: np.ndarray, block_size: int, backend: AttentionBackend, spread: int = 1
) -> ForwardBatch:
    """Prefill chunks of these lengths, or decode rows where there are none; blocks in random order among `spread` times
    as many; in order where it is 0."""
    num_blocks = -(-seq_lens // block_size)
    total = int(num_blocks.sum())
    ids = np.random.default_rng(0).permutation(spread * total)[:total] + 1 if spread else np.arange(total) + 1
    tables = np.zeros((len(seq_lens), int(num_blocks.max())), dtype=np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(num_blocks), num_blocks, strict=True)):
        tables[row, :count] = ids[end - count : end]
    num_rows = len(seq_lens)
    query_lens = np.array(chunk_lens or [1] * num_rows)
    nothing = torch.empty(0, device=DEVICE)
    slots = np.random.default_rng(2).permutation(num_rows)
    slot_tables = np.zeros_like(tables)
    slot_tables[slots] = tables
    shape = BatchShape(decode_rows=num_rows)
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


def time_graph(run: Callable[[], None], repeats: int = 9) -> float:
    """Seconds of one replay, the median."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def time_host_plan(batch: ForwardBatch) -> float:
    """Seconds of `plan`, the median, with an idle GPU."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        batch.backend.plan(batch)
        times.append(time.perf_counter() - start)
    return sorted(times)[4]


def time_device_plan(batch: ForwardBatch, repeats: int = 20) -> float:
    """Seconds of `plan_on_device`; where it launches nothing, nothing can be captured."""

    def run() -> None:
        nothing.zero_()
        for _ in range(repeats):
            batch.backend.plan_on_device(batch)

    nothing = torch.zeros(1, device=DEVICE)
    return time_graph(run) / repeats


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
            self.batch.backend.forward(self.spec, layer, self.q, self.k, self.v, self.batch)

    def seconds(self) -> float:
        return time_graph(self) / self.count


def block_size_of(name: str) -> int:
    return 256 if name == "flash-attn" else 64


def plan_times(batch: ForwardBatch) -> str:
    """µs on the host + on the GPU."""
    return f"{time_host_plan(batch) * 1e6:.0f}+{time_device_plan(batch) * 1e6:.0f}"


def decode_table(names: list[str], heads: list[int], rows: list[int], window: int | None) -> list[str]:
    lines = [
        "decode: µs per layer (GB/s of K and V); last, plan of a step: µs on the host + on the GPU",
        "heads  rows " + "".join(f"{name:>20}" for name in names),
    ]
    for num_heads in heads:
        for num_rows in rows:
            lens = np.random.default_rng(1).integers(100, 1620, num_rows)
            num_keys = int(np.minimum(lens, window or lens.max()).sum())
            num_bytes = num_keys * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
            cells, plans = [], []
            for name in names:
                case = make_case(num_heads, block_size_of(name), window)
                backend = selection._load(name)(case)
                batch = make_batch([], lens, case.block_size, backend)
                backend.prepare_capture(batch)
                backend.plan(batch)
                backend.plan_on_device(batch)
                seconds = Layers(batch, case.specs[0]).seconds()
                cells.append(f"{seconds * 1e6:12.1f} ({num_bytes / seconds / 1e9:5.0f})")
                plans.append(plan_times(batch))
            lines.append(f"{num_heads:>3}/{NUM_KV_HEADS} {num_rows:>5} " + "".join(f"{cell:>20}" for cell in cells))
            lines[-1] += "   " + " ".join(plans)
            print(lines[-1], flush=True)
    return lines


PROMPTS = {
    "16 x 562": ([562] * 16, [562] * 16),
    "2 x 8k": ([8192] * 2, [8192] * 2),
    "8k behind 24k": ([8192], [32768]),
    "64 x (64 behind 2k)": ([64] * 64, [2112] * 64),
}


def count_pairs(num_tokens: int, length: int, window: int | None) -> int:
    """Pairs of a token and a key that it sees, of the last `num_tokens` of a request."""
    seen = np.arange(length - num_tokens + 1, length + 1)
    return int(np.minimum(seen, window or length).sum())


def prefill_table(names: list[str], heads: list[int], window: int | None) -> list[str]:
    lines = [
        "prefill: µs per layer (TFLOP/s); last, plan of a step: µs on the host + on the GPU",
        f"{'heads':5} {'prompts':20}" + "".join(f"{n:>20}" for n in names),
    ]
    for num_heads in heads:
        for title, (chunk_lens, seq_lens) in PROMPTS.items():
            pairs = sum(count_pairs(n, length, window) for n, length in zip(chunk_lens, seq_lens, strict=True))
            flops = 4 * num_heads * HEAD_DIM * pairs
            cells, plans = [], []
            for name in names:
                if name == "torch-varlen":
                    cells.append(_torch_varlen(num_heads, chunk_lens, seq_lens, flops))
                    continue
                case = make_case(num_heads, block_size_of(name), window)
                backend = selection._load(name)(case)
                batch = make_batch(chunk_lens, np.array(seq_lens), case.block_size, backend)
                backend.plan(batch)
                backend.plan_on_device(batch)
                layers = Layers(batch, case.specs[0])
                layers.count = min(layers.count, 4)
                seconds = layers.seconds()
                cells.append(f"{seconds * 1e6:12.1f} ({flops / seconds / 1e12:5.0f})")
                plans.append(plan_times(batch))
            lines.append(f"{num_heads:>3}/{NUM_KV_HEADS} {title:20}" + "".join(f"{cell:>20}" for cell in cells))
            lines[-1] += "   " + " ".join(plans)
            print(lines[-1], flush=True)
    return lines


def _torch_varlen(num_heads: int, chunk_lens: list[int], seq_lens: list[int], flops: int) -> str:
    """Torch's own FlashAttention 2, for fresh prompts only."""
    from torch.nn.attention.varlen import varlen_attn

    if chunk_lens != seq_lens:
        return "-"
    q = torch.randn(sum(chunk_lens), num_heads, HEAD_DIM, device=DEVICE).to(DTYPE)
    k, v = torch.randn(2, sum(chunk_lens), NUM_KV_HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
    starts = torch.tensor([0, *accumulate(chunk_lens)], dtype=torch.int32, device=DEVICE)
    longest = max(chunk_lens)
    seconds = time_graph(lambda: varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0)))
    return f"{seconds * 1e6:12.1f} ({flops / seconds / 1e12:5.0f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--backends", default="triton,flash-attn,flashinfer")
    parser.add_argument("--rows", default="1,16,64,256,1024")
    parser.add_argument("--heads", default="16,32")
    parser.add_argument("--window", type=int)
    args = parser.parse_args()
    heads = [int(text) for text in args.heads.split(",")]
    names = []
    for name in args.backends.split(","):
        try:
            selection._choose(name, make_case(heads[0], block_size_of(name), args.window), [])
            names.append(name)
        except ConfigError as error:
            print(error)
    lines: list[str] = []
    with torch.inference_mode():
        if args.only != "prefill":
            lines += decode_table(names, heads, [int(text) for text in args.rows.split(",")], args.window)
        if args.only != "decode":
            others = [] if args.window else ["torch-varlen"]
            lines += prefill_table([*names, *others], heads, args.window)
    print("\n" + torch.cuda.get_device_name(), "torch", torch.__version__)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
