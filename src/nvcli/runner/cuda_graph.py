"""GraphRunner: decode steps as CUDA graphs, captured once and replayed for any batch.

A graph covers the whole step, from the slots that take part to the sampled ids in the slot table. Its only input is the
static buffer of slots; a batch is padded with the padding slot to the next captured size, and padding rows touch
nothing that belongs to a request. Graphs are captured from the largest down into one memory pool, so that the small
ones use the memory of the largest (SGLang's CudaGraphRunner works so too).
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nvcli.runner.decode_step import DecodeOutput

_WARM_UP_RUNS = 2

DecodeFunction = Callable[[Tensor], DecodeOutput]
"""Slots [B] int64 on the device → what a decode step of these slots gives; launches kernels only."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture: padding costs at most a quarter, and the last is `max_num_seqs` itself."""
    sizes = [1, 2, 4, 8]
    step = 8
    while sizes[-1] < max_num_seqs:
        step = max(step, 1 << (max(sizes[-1], 1).bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class GraphRunner:
    """Decode graphs of one rank."""

    def __init__(self, decode: DecodeFunction, max_num_seqs: int, padding_slot: int, device: torch.device) -> None:
        self._decode = decode
        self.sizes = capture_sizes(max_num_seqs)
        self._padding_slot = padding_slot
        self._slots = torch.full((max_num_seqs,), padding_slot, dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}
        self._pool: Any = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def capture(self, sizes: list[int] | None = None) -> None:
        """Capture graphs of these sizes (None: all), largest first."""
        with _no_garbage_collection():
            for size in sorted(self.sizes if sizes is None else sizes, reverse=True):
                self._capture_one(size)
        torch.cuda.synchronize()

    def _capture_one(self, size: int) -> None:
        slots = self._slots[:size]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                self._decode(slots)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = self._decode(slots)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = (graph, output)

    def replay(self, slots: Tensor) -> DecodeOutput:
        """Run the step for these slots: [n] int64 on the device. Views of static tensors."""
        num_seqs = slots.shape[0]
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        self._slots[:num_seqs].copy_(slots, non_blocking=True)
        if size > num_seqs:
            self._slots[num_seqs:size].fill_(self._padding_slot)
        graph, output = self._graphs[size]
        graph.replay()
        return output.head(num_seqs)

    def release(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.clear()
        self._pool = None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a capture may free CUDA memory, which breaks the capture."""
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
