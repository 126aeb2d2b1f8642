"""GraphRunner: captures steps as CUDA graphs, by the shape of their batch, and replays them.

A graph covers the whole step on the device, from its rows in the input buffers to the sampled ids in the slot table. A
step is padded to the captured shape that computes the fewest tokens; padding never touches a request's data. Graphs are
captured from the largest down into one memory pool, so that small ones reuse the memory of the largest (as in SGLang's
CudaGraphRunner).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nvcli.attention.forward_batch import BatchShape
from nvcli.worker.runner.device import wait_for_gpu

_USES_OF_OTHER = 64
"""Uses of a graph that does more than a step needs, before one is captured that does no more."""


T = TypeVar("T")


class GraphRunner(Generic[T]):
    """The graphs of one rank."""

    def __init__(
        self,
        shapes: Sequence[BatchShape],
        run: Callable[[BatchShape], T],
        *,
        prepare: Callable[[BatchShape], None] = lambda shape: None,
        view: Callable[[T], T] = lambda output: output,
    ) -> None:
        """`shapes` are to be captured, those with the most tokens first. `run` launches a step of a shape on static
        tensors; `prepare` makes them ready, outside the graph. `view` returns what is kept of a step's output: the same
        with its large tensors `unowned`."""
        self.shapes = list(shapes)
        self._run, self._prepare, self._view = run, prepare, view
        self._graphs: dict[BatchShape, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[BatchShape, T] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._uncaptured: Counter[BatchShape] = Counter()
        """How often steps wanted a graph that is not captured."""
        self._smallest_first = sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_rows))

    def capture(self, shapes: Sequence[BatchShape]) -> None:
        """Capture the graphs of these shapes, in order, and wait for the device. `shapes_to_run` run once before they
        are captured, which loads and compiles the kernels that most others launch, too."""
        run_first = shapes_to_run(shapes)
        for shape in shapes:
            self._prepare(shape)
            stream = self._capture_stream()
            stream.wait_stream(torch.cuda.current_stream())
            if shape in run_first:
                with torch.cuda.stream(stream):
                    self._run(shape)
            torch.cuda.current_stream().wait_stream(stream)
            self._capture(shape, "thread_local" if shape in run_first else "relaxed")
        torch.cuda.synchronize()

    def run(self) -> None:
        """Run a step of every shape once, without graphs, waiting for each."""
        for shape in self.shapes:
            self._prepare(shape)
            self._run(shape)
            wait_for_gpu()  # the memory of uploads serves the next steps, too

    def padded_shape(self, shape: BatchShape) -> BatchShape | None:
        """Return the shape of the graph that serves a batch; None if none does. For some time a captured graph serves
        instead of one that is not, if a head takes in prompts there that it need not take in, or drafts for up to twice
        as many rows: that costs less than capturing another."""
        found = next((candidate for candidate in self._smallest_first if candidate.holds(shape)), None)
        if found is None or self.has_captured(found) or not (found.prefill_rows or found.extends_drafts):
            return found
        self._uncaptured[found] += 1
        if self._uncaptured[found] >= _USES_OF_OTHER:
            return found
        if found.prefill_rows:
            extended = replace(found, extends_drafts=True)
            return extended if self.has_captured(extended) else found
        others = (other for other in self._smallest_first if other.holds(shape) and self.has_captured(other))
        return next((other for other in others if other.decode_rows <= 2 * found.decode_rows), found)

    def has_captured(self, shape: BatchShape) -> bool:
        """Whether the graph of a shape can be replayed."""
        return shape in self._graphs

    def output(self, shape: BatchShape) -> T:
        """Return the output of a captured shape's graph."""
        return self._outputs[shape]

    def capture_late(self, shape: BatchShape) -> None:
        """Capture the graph of a shape in the middle of a run, replacing an earlier one.

        It runs nothing and waits for nothing: the device continues with the steps already launched, unless the driver
        makes it wait while finding room for the graph. Everything that the step launches should have been launched
        before, in steps of other shapes, so that nothing needs compiling now; and no tensor that a module keeps may be
        created in here.
        """
        if shape in self._graphs:
            torch.cuda.synchronize()  # the device may still be in the earlier one
        self._capture(shape, "relaxed")

    def replay(self, shape: BatchShape) -> T:
        """Replay the graph of a captured shape. Its output is valid until the next replay of any graph."""
        self._graphs[shape].replay()
        return self._outputs[shape]

    def _capture_stream(self) -> torch.cuda.Stream:
        """Return the stream of all captures: the allocator reuses freed memory only on the stream that used it."""
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        return self._stream

    def _capture(self, shape: BatchShape, error_mode: str) -> None:
        """`error_mode`: "relaxed" allows kernels to be loaded; "thread_local" reports operations that no graph can
        hold. Either lets other threads wait for the device, as the thread that posts outputs does."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream()), no_garbage_collection():
            # Not torch.cuda.graph: before each capture it collects garbage and gives all cached memory back.
            graph.capture_begin(pool=self._pool, capture_error_mode=error_mode)
            try:
                output = self._run(shape)
            finally:
                graph.capture_end()
        self._graphs[shape], self._outputs[shape] = graph, self._view(output)


def shapes_to_run(shapes: Sequence[BatchShape]) -> set[BatchShape]:
    """Return one shape of each kind of step per power of two of tokens: the first. Other shapes may still launch a
    kernel that none of these does, which is then loaded during capture."""
    first: dict[object, BatchShape] = {}
    for shape in shapes:
        kind = shape.decode_rows > 0, shape.prefill_rows > 0, shape.tokens_per_row, shape.traits
        first.setdefault((kind, (shape.num_tokens - 1).bit_length()), shape)
    return set(first.values())


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection, which could free CUDA memory in the middle of a capture and break it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _DeviceMemory:
    """Describes a tensor's memory to torch without owning it."""

    def __init__(self, tensor: Tensor) -> None:
        bits = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor.view(torch.int32)
        self.__cuda_array_interface__ = bits.__cuda_array_interface__


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not keep it allocated.

    Graphs that are captured later may then use the memory too, since no two graphs run at the same time. If every graph
    kept its large output, the outputs would add up to more memory than everything else in the graphs.
    """
    return torch.as_tensor(_DeviceMemory(tensor), device=tensor.device).view(tensor.dtype)
