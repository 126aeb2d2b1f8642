#!/usr/bin/env python3
"""Time the attention backends on this GPU: decode by lengths and rows, prefill by shapes; a table at the end.

    python3 scripts/bench_attention.py [--only decode|prefill] [--backends triton,flash-attn,…] [--rows 1,16,64,…]

bf16 on random data, KV heads 8 × 128. Decode lengths are uniform in 100 to 1,620. Each figure is the median of several
replays of a CUDA graph over several layers' caches, so that no layer finds its keys in the L2 cache.
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
from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionSpec
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.errors import ConfigError
from nvcli.messages import ForwardMode

DEVICE = torch.device("cuda")
NUM_KV_HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
CACHE_BYTES = 32 << 30
"""Of all layers together."""


def make_case(num_heads: int, block_size: int, max_num_seqs: int = 1024) -> AttentionCase:
    return AttentionCase(
        device=DEVICE,
        dtype=DTYPE,
        num_heads=num_heads,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
    )


@cache
def memory_pool() -> Tensor:
    """Random values that all caches are cut from: where memory lies physically changes times by some percent, so
    backends are compared on the same memory."""
    pool = torch.empty(CACHE_BYTES // DTYPE.itemsize, dtype=DTYPE, device=DEVICE)
    for part in pool.split(1 << 28):
        part.normal_()
    return pool


def make_cache(num_blocks: int, block_size: int) -> KVCache:
    """Of as many layers as the pool has room for, 28 at most."""
    block = (block_size, NUM_KV_HEADS, HEAD_DIM)
    layer_size = 2 * num_blocks * math.prod(block)
    num_layers = min(28, memory_pool().numel() // layer_size)
    assert num_layers >= 2, "one layer would be timed in the L2 cache"
    spec = KVCacheSpec(
        num_layers=num_layers, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, dtype=DTYPE
    )
    kv_cache = KVCache(spec, 0, DEVICE)
    kv_cache.num_blocks = num_blocks
    kv_cache.data = memory_pool()[: num_layers * layer_size].view(num_layers, 2, num_blocks, *block)
    return kv_cache


def make_batch(
    extend_lens: list[int], seq_lens: np.ndarray, block_size: int, backend: AttentionBackend, spread: int = 1
) -> ForwardBatch:
    """Prompt slices of these lengths, or decode rows where there are none; blocks in random order among `spread` times
    as many; in order where it is 0."""
    num_blocks = -(-seq_lens // block_size)
    total = int(num_blocks.sum())
    ids = np.random.default_rng(0).permutation(spread * total)[:total] + 1 if spread else np.arange(total) + 1
    tables = np.zeros((len(seq_lens), int(num_blocks.max())), dtype=np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(num_blocks), num_blocks, strict=True)):
        tables[row, :count] = ids[end - count : end]
    query_lens = extend_lens or [1] * len(seq_lens)
    nothing = torch.empty(0, device=DEVICE)
    return ForwardBatch(
        mode=ForwardMode.EXTEND if extend_lens else ForwardMode.DECODE,
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        block_tables=torch.from_numpy(tables).to(DEVICE),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(DEVICE),
        seq_lens_host=seq_lens,
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=DEVICE),
        logits_rows=nothing,
        num_decodes=0 if extend_lens else len(seq_lens),
        extend_lens=extend_lens,
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
    num_heads: int

    def __post_init__(self) -> None:
        shape = (self.batch.num_tokens, self.num_heads + 2 * NUM_KV_HEADS, HEAD_DIM)
        heads = torch.randn(shape, device=DEVICE).to(DTYPE)
        self.q = heads[:, : self.num_heads]
        self.k, self.v = heads[:, self.num_heads :].chunk(2, dim=1)
        self.count = self.batch.kv_cache.spec.num_layers

    def __call__(self) -> None:
        spec = AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5
        )
        for layer in range(self.count):
            self.batch.backend.forward(spec, layer, self.q, self.k, self.v, self.batch)

    def seconds(self) -> float:
        return time_graph(self) / self.count


def block_size_of(name: str) -> int:
    return 256 if name == "flash-attn" else 64


def decode_table(names: list[str], heads: list[int], rows: list[int]) -> list[str]:
    lines = [
        "decode: µs per layer (GB/s of K and V); last, plan of a step: µs on the host + on the GPU",
        "heads  rows " + "".join(f"{name:>20}" for name in names),
    ]
    for num_heads in heads:
        for num_rows in rows:
            lens = np.random.default_rng(1).integers(100, 1620, num_rows)
            num_bytes = int(lens.sum()) * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
            cells, plans = [], []
            for name in names:
                case = make_case(num_heads, block_size_of(name))
                backend = selection._load(name)(case)
                batch = make_batch([], lens, case.block_size, backend)
                backend.prepare_capture(batch)
                backend.plan(batch)
                backend.plan_on_device(batch)
                seconds = Layers(batch, num_heads).seconds()
                cells.append(f"{seconds * 1e6:12.1f} ({num_bytes / seconds / 1e9:5.0f})")
                plans.append(f"{time_host_plan(batch) * 1e6:.0f}+{time_device_plan(batch) * 1e6:.0f}")
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


def prefill_table(names: list[str], heads: list[int]) -> list[str]:
    lines = ["prefill: µs per layer (TFLOP/s)", f"{'heads':5} {'prompts':20}" + "".join(f"{n:>20}" for n in names)]
    for num_heads in heads:
        for title, (extend_lens, seq_lens) in PROMPTS.items():
            pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(extend_lens, seq_lens, strict=True))
            flops = 4 * num_heads * HEAD_DIM * pairs
            cells = []
            for name in names:
                if name == "torch-varlen":
                    cells.append(_torch_varlen(num_heads, extend_lens, seq_lens, flops))
                    continue
                case = make_case(num_heads, block_size_of(name))
                backend = selection._load(name)(case)
                batch = make_batch(extend_lens, np.array(seq_lens), case.block_size, backend)
                backend.plan(batch)
                layers = Layers(batch, num_heads)
                layers.count = min(layers.count, 4)
                seconds = layers.seconds()
                cells.append(f"{seconds * 1e6:12.1f} ({flops / seconds / 1e12:5.0f})")
            lines.append(f"{num_heads:>3}/{NUM_KV_HEADS} {title:20}" + "".join(f"{cell:>20}" for cell in cells))
            print(lines[-1], flush=True)
    return lines


def _torch_varlen(num_heads: int, extend_lens: list[int], seq_lens: list[int], flops: int) -> str:
    """Torch's own FlashAttention 2, for fresh prompts only."""
    from torch.nn.attention.varlen import varlen_attn

    if extend_lens != seq_lens:
        return "-"
    q = torch.randn(sum(extend_lens), num_heads, HEAD_DIM, device=DEVICE).to(DTYPE)
    k, v = torch.randn(2, sum(extend_lens), NUM_KV_HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
    starts = torch.tensor([0, *accumulate(extend_lens)], dtype=torch.int32, device=DEVICE)
    longest = max(extend_lens)
    seconds = time_graph(lambda: varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0)))
    return f"{seconds * 1e6:12.1f} ({flops / seconds / 1e12:5.0f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--backends", default="triton,flash-attn,flashinfer")
    parser.add_argument("--rows", default="1,16,64,256,1024")
    parser.add_argument("--heads", default="16,32")
    args = parser.parse_args()
    heads = [int(text) for text in args.heads.split(",")]
    names = []
    for name in args.backends.split(","):
        try:
            selection._choose(name, make_case(heads[0], block_size_of(name)), [])
            names.append(name)
        except ConfigError as error:
            print(error)
    lines: list[str] = []
    with torch.inference_mode():
        if args.only != "prefill":
            lines += decode_table(names, heads, [int(text) for text in args.rows.split(",")])
        if args.only != "decode":
            lines += prefill_table([*names, "torch-varlen"], heads)
    print("\n" + torch.cuda.get_device_name(), "torch", torch.__version__)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
