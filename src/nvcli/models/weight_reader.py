"""Filling parameters from files on threads: which thread reads what, and which weights are decoded together.

A task is the weights of a stretch of a file. Its thread reads all of that in one go and computes on a stream of its
own, so that it waits for its own work alone, and other threads' bytes are on their way meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from nvcli.kernels.fp4_rows import has_kernel
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.mxfp4 import byte_pairs
from nvcli.kernels.weight_formats import FP8_BLOCK
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.kept_values import KeptPart, has_kept_codes, read_kept, read_kept_together, together_key
from nvcli.models.pinned_upload import PinnedUpload
from nvcli.models.rounded_rows import RoundedRows, RowTally
from nvcli.models.stacked_values import stack_ranges
from nvcli.models.stored_values import OpenFiles, reading
from nvcli.models.tensor_info import FileRange, TensorInfo
from nvcli.models.tensor_spec import Sharding
from nvcli.models.weights import WeightSource, length

_MAX_THREADS = 8
_BYTES_PER_TASK = 128 << 20
"""Files with more of a model's weights are read by several threads."""
_BYTES_IN_ORDER = 2 << 30
"""So many bytes of weights are put in the order of their file before tasks are made of them."""
_MOST_STAGED = 512 << 20
"""A task with more bytes, as of one large weight, is read piece by piece."""
_PIECE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Weights that are dequantised or quantised are read in pieces of about this many numbers: on a CPU, a float32 piece
fits in its cache; on a GPU, it takes little memory next to the weights."""
_STORED_PIECES = {"cpu": 2, "cuda": 16}
"""How many times as large pieces are that stay as they are stored, or that one kernel converts."""
_WORDS = (torch.int64, torch.int32, torch.int16)
"""Types of which several numbers are copied as one, the largest first: no numbers in FP8 can be indexed."""


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """One source with the parameter that it fills, once the parameter has memory."""

    source: WeightSource
    target: Tensor
    scales: Tensor | None
    """The parameter for scales, where `target` takes codes."""
    order: Tensor | None
    """The parameter for the order of the columns, if they have one."""

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.target.element_size()


class _Found(NamedTuple):
    """An assignment, and where its values are."""

    assignment: Assignment
    info: TensorInfo

    @property
    def offset(self) -> int:
        """The place in its file where it begins, about."""
        return 0 if self.info.stored is None else self.info.stored.offset


def begin_to_read(assignments: Iterable[Assignment], tensors: Mapping[str, TensorInfo]) -> Callable[[], RoundedRows]:
    """Start threads that read assignments, the first while later ones are gone through. Return a function that waits
    for them, which returns how much of FP4 was rounded, and raises LoadError for files that cannot be read."""
    reader = _Reader()
    waiting: dict[Path, list[_Found]] = {}
    num_bytes: Counter[Path] = Counter()

    def read(file: Path) -> None:
        num_bytes[file] = 0
        reader.read(file, sorted(waiting.pop(file), key=lambda found: found.offset))

    for a in assignments:
        if a.target.numel() > 0:
            info = tensors[a.source.stored_name]
            waiting.setdefault(info.file, []).append(_Found(a, info))
            num_bytes[info.file] += a.num_bytes
            if num_bytes[info.file] >= _BYTES_IN_ORDER:
                read(info.file)
    for file in [*waiting]:
        read(file)
    return reader.finish


class _Reader:
    """The threads, and what they read with."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=_MAX_THREADS, thread_name_prefix="load")
        self._readings: list[Future[RoundedRows]] = []
        self._uploads: SimpleQueue[PinnedUpload] = SimpleQueue()
        """Uploads that no thread has."""
        self._zeroed: torch.cuda.Event | None = None
        """When parameters on a GPU can be written."""

    def read(self, file: Path, ordered: Sequence[_Found]) -> None:
        """Start to read assignments from one file."""
        device = ordered[0].assignment.target.device
        if device.type == "cuda" and self._zeroed is None:
            self._zeroed = torch.cuda.current_stream(device).record_event()
        first = num_bytes = 0
        for index, found in enumerate(ordered, 1):
            num_bytes += found.assignment.num_bytes
            if num_bytes >= _BYTES_PER_TASK or index == len(ordered):
                self._readings.append(self._pool.submit(self._read_task, file, ordered[first:index], device))
                first, num_bytes = index, 0

    def finish(self) -> RoundedRows:
        """Wait for what was begun. Raises LoadError."""
        try:
            return sum((one.result() for one in self._readings), RoundedRows())
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _read_task(self, file: Path, task: Sequence[_Found], device: torch.device) -> RoundedRows:
        # Inference mode is per thread, and parameters made in it may only be written in it.
        with reading(file), torch.inference_mode():
            if self._zeroed is None:
                return _fill_all(task, None, device)
            torch.cuda.set_device(device)  # per thread as well
            try:
                upload = self._uploads.get_nowait()
            except Empty:
                upload = PinnedUpload(device)
            with torch.cuda.stream(upload.stream):
                self._zeroed.wait()
                rounded = _fill_all(task, upload, device)
                torch.cuda.current_stream(device).synchronize()
            self._uploads.put(upload)
            return rounded


def _fill_all(task: Sequence[_Found], upload: PinnedUpload | None, device: torch.device) -> RoundedRows:
    """Fill the parameters of a task."""
    pairs, tally = byte_pairs(device), RowTally(device)
    alike: dict[Hashable, list[_Found]] = {}
    alone: list[_Found] = []
    for found in task:
        key = together_key(found.info, found.assignment.source)
        (alone if key is None else alike.setdefault(key, [])).append(found)
    with OpenFiles(upload) as files:
        if upload is not None:
            _stage(upload, alike.values())
        for group in _groups(alike.values()):
            a, info = group[0]
            if len(group) > 1:
                infos = [found.info for found in group]
                kept = read_kept_together(files, infos, a.source, device, pairs, tally)
                _fill_together([found.assignment for found in group], kept)
                continue
            for piece in _pieces(a, info):
                if _is_fp4(info):
                    _fill_together([piece], read_kept_together(files, [info], piece.source, device, pairs, tally))
                else:
                    _fill(piece, read_kept(files, info, piece.source, device))
        for a, info in alone:
            for piece in _pieces(a, info):
                _fill(piece, read_kept(files, info, piece.source, device))
        return tally.counts()


def _stage(upload: PinnedUpload, groups: Iterable[Sequence[_Found]]) -> None:
    """Read all that groups of alike weights need, unless it is much."""
    ranges: list[FileRange] = []
    for group in groups:
        ranges += stack_ranges([found.info for found in group], group[0].assignment.source.read)
    if sum(one.end - one.begin for one in ranges) <= _MOST_STAGED:
        upload.stage(ranges)


def _groups(groups: Iterable[Sequence[_Found]]) -> Iterator[Sequence[_Found]]:
    """Cut groups of alike weights to those that a piece has room for."""
    for group in groups:
        size = math.prod(map(length, group[0].assignment.source.read))
        step = max(1, _most_numbers(group[0]) // max(size, 1))
        for first in range(0, len(group), step):
            yield group[first : first + step]


def _most_numbers(found: _Found) -> int:
    a, info = found
    stays = has_kept_codes(info, a.source) or (info.codes is None and a.source.scales is None)
    is_one_kernel = _is_fp4(info) and a.target.dtype == FP8 and has_kernel(a.target.device)
    kind = a.target.device.type
    return _PIECE_NUMBERS[kind] * (_STORED_PIECES[kind] if stays or is_one_kernel else 1)


def _is_fp4(info: TensorInfo) -> bool:
    return info.codes is not None and info.codes.numbers == "fp4"


def _fill(a: Assignment, kept: KeptPart) -> None:
    for target, values in ((a.target, kept.weight), (a.scales, kept.scales), (a.order, kept.order)):
        if target is not None and values is not None:
            target.copy_(values)


def _fill_together(group: Sequence[Assignment], kept: KeptPart) -> None:
    """Fill parameters with the parts of a stack [len(group), ...]: those in one piece of memory, as experts' are, at
    once."""
    for targets, values in (([a.target for a in group], kept.weight), ([a.scales for a in group], kept.scales)):
        if values is None:
            continue
        found = [target for target in targets if target is not None]
        offsets = [target.storage_offset() for target in found]
        first = min(offsets)
        step = math.gcd(*(offset - first for offset in offsets))
        places = [(offset - first) // step if step else 0 for offset in offsets]
        is_in_order = places == [*range(len(found))]
        # Weights of one shape may be parts of parameters of several: a query and an output projection, with its scales.
        # Those of several types have places in units of their own: a router in float32, and projections in bfloat16.
        kinds = {(target.untyped_storage().data_ptr(), target.stride(), target.dtype) for target in found}
        is_stack = len(kinds) == 1
        if not (is_stack and step and (is_in_order or step >= _extent(found[0]))):
            for target, value in zip(found, values, strict=True):
                target.copy_(value)
            continue
        shape, strides = (max(places) + 1, *found[0].shape), (step, *found[0].stride())
        stack = found[0].as_strided(shape, strides, first)
        if is_in_order:
            stack.copy_(values)
        else:
            _copy_to(stack, places, values.to(stack.dtype).contiguous())


def _extent(values: Tensor) -> int:
    """Return how many numbers of its memory a tensor spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))


def _copy_to(stack: Tensor, places: Sequence[int], values: Tensor) -> None:
    """Copy values [n, ...] to these n places of a stack of the same type."""
    wide = next((one for one in _WORDS if _is_of_words(stack, one) and _is_of_words(values, one)), torch.uint8)
    indices = torch.tensor(places, device=stack.device)
    stack.view(wide).index_copy_(0, indices, values.view(wide))


def _is_of_words(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor can be seen as one of numbers of this type."""
    sizes = (values.shape[-1], values.storage_offset(), *values.stride()[:-1])
    return values.stride(-1) == 1 and all(size * values.element_size() % dtype.itemsize == 0 for size in sizes)


def _pieces(a: Assignment, info: TensorInfo) -> Iterator[Assignment]:
    """Split an assignment into whole blocks of rows if its numbers have to be computed, or are on a GPU before they are
    in their place; otherwise it stays one piece."""
    is_computed = (a.target.dtype == FP8 or bool(info.changes)) and not info.is_transposed and a.target.dim() == 2
    is_words = a.scales is not None and a.target.dtype != FP8
    has_codes = info.codes is not None or info.flat is not None or info.form is not None
    has_codes &= a.target.dim() == 2
    is_uploaded = a.target.device.type == "cuda" and not info.is_transposed and a.target.dim() == 2
    if is_words and a.source.tensor.sharding is not Sharding.VOCAB:  # of layers, which are small
        yield a
        return
    if not (is_computed or is_uploaded or has_codes) or has_kept_codes(info, a.source):
        yield a
        return
    num_rows, num_columns = a.target.shape
    unit = math.lcm(FP8_BLOCK, len(a.source.tensor.row_order or (0,)))
    step = unit * max(1, _PIECE_NUMBERS[a.target.device.type] // (unit * num_columns))
    if num_rows <= step:
        yield a
        return
    rows, columns = a.source.read
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        scales = a.scales
        if scales is not None and is_words:
            scales = scales[:, first:last]
        elif scales is not None:
            per_scale = FP8_BLOCK if scales.dim() == 2 else 1
            scales = scales[first // per_scale : ceil_div(last, per_scale)]
        source = replace(a.source, read=(slice(rows.start + first, rows.start + last), columns))
        yield replace(a, source=source, target=a.target[first:last], scales=scales)
