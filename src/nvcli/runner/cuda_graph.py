"""CUDA graphs: how steps are captured, and the decode steps that are.

A decode graph covers the whole step, from the slots that take part to the sampled ids in the slot table. Its only input
is the static buffer of slots; a batch is padded with the padding slot to the next captured size, and padding rows touch
nothing that belongs to a request. Graphs are captured from the largest down into one memory pool, so that the small
ones use the memory of the largest (SGLang's CudaGraphRunner works so too).
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from nvcli.runner.decode_step import DecodeOutput
from nvcli.runner.stage_link import PassedOn
from nvcli.sizing.graph_sizes import decode_sizes

_WARM_UP_RUNS = 2


class GraphOutput(Protocol):
    """Tensors that a step leaves behind."""

    def unowned(self) -> Self:
        """The same with large tensors replaced by `unowned` ones."""
        ...


T = TypeVar("T", bound=GraphOutput)


@dataclass(frozen=True, slots=True)
class CapturedGraph(Generic[T]):
    graph: torch.cuda.CUDAGraph
    output: T
    """Tensors that a replay fills; the large ones hold until the next replay of any graph."""

    def replay(self) -> T:
        self.graph.replay()
        return self.output


class GraphPool:
    """Memory that all graphs of a rank share: no two of them run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: the allocator keeps what was freed for the stream that used it.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], T]) -> CapturedGraph[T]:
        """`run` launches kernels only, on static tensors. It is run a few times before it is captured."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            for _ in range(_WARM_UP_RUNS):
                run()
            # Not torch.cuda.graph: before each capture it collects garbage and gives all cached memory back.
            graph.capture_begin(pool=self._pool)
            try:
                output = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CapturedGraph(graph, output.unowned())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a capture may free CUDA memory, which breaks the capture."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class DecodeGraphs:
    """Decode steps of one rank, for any number of requests up to `max_num_decodes`."""

    def __init__(
        self,
        pool: GraphPool,
        decode: Callable[[Tensor], DecodeOutput | PassedOn],
        max_num_decodes: int,
        padding_slot: int,
        device: torch.device,
    ) -> None:
        """`decode`: slots [B] int64 on the device → what a decode step of them gives."""
        self._pool = pool
        self._decode = decode
        self.sizes = decode_sizes(max_num_decodes)
        self._padding_slot = padding_slot
        self._slots = torch.full((max_num_decodes,), padding_slot, dtype=torch.int64, device=device)
        self._graphs: dict[int, CapturedGraph[DecodeOutput | PassedOn]] = {}

    def capture(self, sizes: list[int] | None = None) -> None:
        """Capture graphs of these sizes (None: all), largest first."""
        for size in sorted(self.sizes if sizes is None else sizes, reverse=True):
            slots = self._slots[:size]
            self._graphs[size] = self._pool.capture(lambda slots=slots: self._decode(slots))  # type: ignore[misc]
        torch.cuda.synchronize()

    def padded_size(self, num_seqs: int) -> int:
        """Rows of the graph that serves this many requests."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, slots: Tensor) -> DecodeOutput | PassedOn:
        """Run the step for these slots: [n] int64 on the device. Views of static tensors."""
        num_seqs = slots.shape[0]
        size = self.padded_size(num_seqs)
        self._slots[:num_seqs].copy_(slots, non_blocking=True)
        if size > num_seqs:
            self._slots[num_seqs:size].fill_(self._padding_slot)
        return self._graphs[size].replay().head(num_seqs)
