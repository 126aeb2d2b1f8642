#!/usr/bin/env python3
"""What a layer of a decode step takes of this GPU's time and energy: its matrix products, and attention where rows
share prefixes. At the power limit a run takes as long as the energy of all its parts, whatever they overlap.

    python3 scripts/bench_energy.py [--rows 1024] [--shared-prefix 1024,1024:8] [--own-keys 128] [--seconds 1]

The layer is Qwen3-8B's in bfloat16, with random numbers. Each part is a CUDA graph over several layers, replayed for
--seconds without a pause. Energy is what NVML's counter says meanwhile, and the clock is the median of the SMs' own.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from bench_attention import DEVICE, DTYPE, Layers, make_batch, make_case
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.triton_backend import TritonBackend
from nvcli.bench.command import parse_shared_prefix
from nvcli.bench.workload import PrefixLevel
from nvcli.errors import ConfigError
from nvcli.kernels.segment_tables import SegmentTables

NUM_HEADS, BLOCK_SIZE = 32, 64
PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""Output and input features of the layer's matrices."""
MOST_LAYERS = 6
QUEUED_SECONDS = 0.12
"""The counter moves every 20 to 100 ms. So much work is queued while it is waited for, and the GPU is never idle."""


class Meter:
    """NVML's counter of this GPU's energy, and its clock."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}"
        self._check(self._nvml.nvmlInit_v2())
        self._check(self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)))

    def next_joules(self) -> tuple[float, float]:
        """Wait until the counter moves, and return it with the time in seconds."""
        before = now = self._joules()
        while now == before:
            now = self._joules()
        return now, time.perf_counter()

    def clock(self) -> int:
        """Return the SMs' clock in MHz."""
        clock = ctypes.c_uint()
        sm_clock = 1
        self._check(self._nvml.nvmlDeviceGetClockInfo(self._device, sm_clock, ctypes.byref(clock)))
        return clock.value

    def _joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)))
        return millijoules.value / 1e3

    def _check(self, code: int) -> None:
        if code:
            raise SystemExit(f"NVML answers with error {code}: this GPU or its driver has no counter of energy")


@dataclass(frozen=True, slots=True)
class Products:
    """The matrix products of the layers, for some rows; their results are thrown away."""

    weights: list[list[Tensor]]
    """By layer and product."""
    inputs: list[Tensor]
    outputs: list[Tensor]

    @classmethod
    def random(cls, num_layers: int, num_rows: int) -> Products:
        shapes = PRODUCTS.values()
        return cls(
            [[torch.randn(shape, device=DEVICE, dtype=DTYPE) * 0.02 for shape in shapes] for _ in range(num_layers)],
            [torch.randn(num_rows, features, device=DEVICE, dtype=DTYPE) for _, features in shapes],
            [torch.empty(num_rows, features, device=DEVICE, dtype=DTYPE) for features, _ in shapes],
        )

    def run(self, layer: int, names: Sequence[str] = tuple(PRODUCTS)) -> None:
        for place, name in enumerate(PRODUCTS):
            if name in names:
                torch.mm(self.inputs[place], self.weights[layer][place].t(), out=self.outputs[place])

    def clear(self) -> None:
        """Make all numbers zeros."""
        for tensor in (*self.inputs, *chain.from_iterable(self.weights)):
            tensor.zero_()


def share_prefixes(block_tables: Tensor, slots: Tensor, levels: Sequence[PrefixLevel]) -> SegmentTables:
    """Let rows have the blocks of prefixes in common, of which neighbouring rows have different ones, and return what
    is shared. block_tables: [slots, blocks] int32, written; slots: [rows] int64."""
    rows = torch.arange(len(slots), device=slots.device)
    segments = [(0, 0, 0)]
    last, begin, num_groups = torch.zeros_like(rows), 0, 1
    for level in levels:
        end = begin + level.num_tokens
        num_groups *= level.num_groups
        # The first rows of the batch stand for the groups.
        group = rows % num_groups
        columns = slice(begin // BLOCK_SIZE, end // BLOCK_SIZE)
        block_tables[slots, columns] = block_tables[slots[group], columns]
        parents = last[:num_groups].tolist()
        last = len(segments) + group
        segments += [(begin, end, parent) for parent in parents]
        begin = end
    tables = SegmentTables.empty(1, len(segments) - 1, len(block_tables), slots.device)
    tables.segments[0] = torch.tensor(segments)
    tables.slot_segments[0, slots] = last.int()
    return tables


def sharing(batch: ForwardBatch, levels: Sequence[PrefixLevel]) -> ForwardBatch:
    """Return the batch with prefixes that its rows share, and that are read once for all."""
    segments = share_prefixes(batch.block_tables[0], batch.slots, levels)
    return replace(batch, shape=replace(batch.shape, shares_segments=True), segments=segments)


def measure(name: str, run: Callable[[], None], num_layers: int, seconds: float, meter: Meter) -> None:
    """Replay a graph of `run`, and print what a layer takes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def timed(count: int) -> torch.cuda.Event:
        for _ in range(count):
            graph.replay()
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return done

    start, end = timed(1), timed(10)
    end.synchronize()
    a_replay = start.elapsed_time(end) / 1e4
    burst = max(1, round(0.01 / a_replay))
    queued = round(QUEUED_SECONDS / a_replay / burst) * burst
    timed(2 * queued)
    first_joules, first_time = meter.next_joules()
    bursts, clocks = [timed(1)], []
    num_bursts = max(5, round(seconds / a_replay / burst))
    for number in range(num_bursts):
        bursts.append(timed(burst))
        if number >= 4:
            bursts[number - 4].synchronize()
            clocks.append(meter.clock())
    timed(queued)
    last_joules, last_time = meter.next_joules()
    torch.cuda.synchronize()
    layer_seconds = bursts[0].elapsed_time(bursts[-1]) / 1e3 / (num_bursts * burst * num_layers)
    watts = (last_joules - first_joules) / (last_time - first_time)
    print(
        f"{name:52s} {layer_seconds * 1e6:7.0f} µs {watts * layer_seconds * 1e3:8.1f} mJ {watts:6.0f} W "
        f"{statistics.median(clocks):6.0f} MHz",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="requests that run at a time")
    parser.add_argument(
        "--shared-prefix", default="1024,1024:8", help="as in `nvcli bench`, in whole blocks of 64 tokens"
    )
    parser.add_argument("--own-keys", type=int, default=128, help="keys of each row behind the prefix")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each part runs")
    options = parser.parse_args()
    try:
        levels = parse_shared_prefix(options.shared_prefix)
    except ConfigError as error:
        parser.error(str(error))
    if any(level.num_tokens % BLOCK_SIZE for level in levels):
        parser.error(f"--shared-prefix {options.shared_prefix}: each level must be a multiple of {BLOCK_SIZE} tokens")
    if options.own_keys < 1:
        parser.error(f"--own-keys {options.own_keys}: each row has one at least, its last token's")
    meter = Meter()
    num_shared = sum(level.num_tokens for level in levels)
    case = replace(make_case(NUM_HEADS, BLOCK_SIZE, None, options.rows), max_shared_rows=options.rows)
    backend = TritonBackend(case)

    def attention(num_keys: int) -> Layers:
        lens = np.full(options.rows, num_keys)
        layers = Layers(make_batch([], lens, BLOCK_SIZE, backend), case.specs[0])
        layers.count = min(layers.count, MOST_LAYERS)
        return layers

    both = attention(num_shared + options.own_keys)
    plain_batch, both.batch = both.batch, sharing(both.batch, levels)
    num_layers = both.count
    products = Products.random(num_layers, options.rows)

    def show(name: str, run: Callable[[], None], layers: Layers | None = None) -> None:
        if layers is not None:
            backend.plan(layers.batch)
            backend.plan_on_device(layers.batch)
        measure(name, run, num_layers if layers is None else layers.count, options.seconds, meter)

    def run_products(names: Sequence[str] = tuple(PRODUCTS)) -> None:
        for layer in range(num_layers):
            products.run(layer, names)

    def run_layers() -> None:
        run_products()
        both()

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {options.rows:,} rows; a layer takes:")
    for name in PRODUCTS:
        show(f"product {name}", partial(run_products, (name,)))
    show("all products", run_products)
    own = attention(options.own_keys)
    show(f"attention, {options.own_keys:,} own keys of each row", own, own)
    least = attention(num_shared + 1)
    least.batch = sharing(least.batch, levels)
    show(f"attention, shared keys {options.shared_prefix} and one of its own", least, least)
    show("attention, all these keys, shared ones read once", both, both)
    show("all products, and attention likewise", run_layers, both)
    both.batch = plain_batch
    show("attention, all these keys, by each row", both, both)
    show("all products, and attention likewise", run_layers, both)
    products.clear()
    show("all products of zeros", run_products)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
