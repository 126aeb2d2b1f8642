"""MergedWeights: the weights of a rank that adapters change, one of which is merged into them at a time.

Another adapter is merged from the base weights, never from those of the adapter before it, so that the weights are
those that the loader makes of the checkpoint and the adapter. The base is kept on the device where it fits, else in
host memory: for weights in FP8 the numbers that they were quantised from, which are quantised again with each adapter.
Of weights that ranks keep in another type for other reasons, and where memory is short, it is read from the checkpoint
again. Only weights that some adapter changes are kept. All parameters stay where they are, so that CUDA graphs go on
serving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.lora_config import BASE_SHARE, PAGE_RANKS
from nvcli.core.messages import NO_ADAPTER
from nvcli.core.system.host_memory import available_ram
from nvcli.errors import LoadError
from nvcli.kernels.fp8 import dequantise_weight, quantise_weight_to
from nvcli.kernels.fp8_types import FP8, LowRankSum
from nvcli.kernels.low_rank_merge import merge_low_rank
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.adapters.adapter import Adapter, with_own_head
from nvcli.models.adapters.merge import are_finite, check_finite, read_features, read_stored
from nvcli.models.causal_lm import CausalLM
from nvcli.models.checkpoint_check import TIED_HEAD, TIED_TO, read_model_tensors
from nvcli.models.host_adapters import HostAdapters
from nvcli.models.loader import assignments_of
from nvcli.models.stored_values import OpenFiles
from nvcli.models.tensor_info import LowRankChange, TensorInfo
from nvcli.models.weight_reader import Assignment, begin_to_read
from nvcli.models.weights import length

Place = Literal["device", "host", "files"]
_HOST_SHARE = 0.5
"""Share of the free RAM that the base weights of all ranks of a machine take at most."""
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NUMBERS_AT_ONCE = 16 << 20
"""Numbers of a weight that are quantised at a time."""
_READING_THREADS = 2
"""Threads that read adapters ahead of use."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """The place of a low-rank change's matrices, of this rank's part of a weight, in the memory of an adapter."""

    weight: int
    """The index of the weight."""
    rank: int
    rows: int
    columns: int
    scaling: float
    first: int
    """The first element of A, [rank, columns], which B, [rows, rank], follows."""

    def matrices(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return B [rank, rows] and A [rank, columns] in the adapter's memory."""
        middle = self.first + self.rank * self.columns
        down = values[self.first : middle].view(self.rank, self.columns)
        up = values[middle : middle + self.rank * self.rows].view(self.rows, self.rank)
        return up.t(), down


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostProducts:
    """The products of an adapter, in one piece of host memory, which is pinned if the model is on a GPU."""

    values: Tensor
    """All matrices, in the type of the adapter's file."""
    products: tuple[_Product, ...]


class MergedWeights:
    """The weights that some adapters change, with the base values of each."""

    def __init__(
        self,
        model: CausalLM,
        path: Path | None,
        adapters: Mapping[int, Adapter],
        *,
        max_host_bytes: int,
        num_ranks: int = 1,
    ) -> None:
        """Keep the base of a model whose weights are loaded. `path` is the checkpoint; None: weights are made up.
        `adapters` have numbers, at most `max_host_bytes` of them are kept in host memory, and `num_ranks` ranks share
        it."""
        located = _made_up(model) if path is None else read_model_tensors(model.config, path).tensors
        self._base = located if model.config.tie_word_embeddings else with_own_head(located)
        self._changed = {number: self._over(adapter) for number, adapter in adapters.items()}
        self._names = {name for tensors in self._changed.values() for name in tensors}
        self._weights = [
            one for one in assignments_of(model) if one.source.stored_name in self._names and one.target.numel() > 0
        ]
        self._device = self._weights[0].target.device if self._weights else _CPU
        self._base_types = [self._base_type(one) for one in self._weights]
        """The type in which each base is kept; None: it is not."""
        self.num_bytes = sum(
            one.target.numel() * dtype.itemsize
            for one, dtype in zip(self._weights, self._base_types, strict=True)
            if dtype is not None
        )
        self.place = self._choose_place(num_ranks)
        self._copies = self._copy_base(is_made_up=path is None)
        self._compile_changes()
        self._current: int | None = NO_ADAPTER
        """The adapter that is merged; None: a change was interrupted."""
        sizes = {number: _product_bytes(adapter) for number, adapter in adapters.items()}
        gpu = self._device if self._device.type == "cuda" else None
        self._products = HostAdapters(self._read_products, sizes, max_bytes=max_host_bytes, gpu=gpu)
        self._products.read_ahead(_READING_THREADS)

    @property
    def note(self) -> str:
        """Return a line for the user on where the base weights are kept."""
        read = "read from the checkpoint at each change"
        where = {"device": "kept on each GPU" if self._device.type == "cuda" else "kept in RAM", "host": "kept in RAM"}
        kept = f"{format_bytes(self.num_bytes)} of the weights that they change are {where.get(self.place, read)}"
        num_others = self._base_types.count(None)
        others = f"{num_others:,} weights are {read}, because they are kept in another type" if num_others else ""
        return f"LoRA adapters are merged in turn: {', and '.join(filter(None, (kept * (self.num_bytes > 0), others)))}"

    def merge(self, number: int) -> LoadError | None:
        """Merge adapter `number` into the base weights in place of the one before, in stream order; NO_ADAPTER: none.

        Returns the error if a file cannot be read, or an adapter holds NaN or infinity; the weights that it changes are
        then NaN.
        """
        if number == self._current:
            return None
        before = self._changed.get(self._current, {}) if self._current is not None else None
        self._current = None
        changed = self._changed.get(number, {})
        try:
            products, values = {}, torch.empty(0)
            if number != NO_ADAPTER:
                on_host = self._products.get(number)
                products = {product.weight: product for product in on_host.products}
                values = on_host.values.to(self._device, non_blocking=True)
            names = {*changed, *(self._names if before is None else before)}
            unkept = [
                weight
                for index, weight in enumerate(self._weights)
                if weight.source.stored_name in names
                and not self._set(index, changed.get(weight.source.stored_name), products.get(index), values)
            ]
            begin_to_read(unkept, {**self._base, **changed})()
        except LoadError as error:
            self._spoil(changed)
            return error
        self._current = number
        return None

    def _over(self, adapter: Adapter) -> dict[str, TensorInfo]:
        """Return the tensors that an adapter changes, as it makes them."""
        found = adapter.over(self._base)
        if adapter.keeps_tie and TIED_HEAD in self._base:
            found[TIED_HEAD] = found[TIED_TO]
        return {name: info for name, info in found.items() if info != self._base.get(name)}

    def _base_type(self, weight: Assignment) -> torch.dtype | None:
        """Return the type in which the base of a parameter is kept: its own if it holds the checkpoint's numbers as
        they are, so that a copy of it is the base, or the checkpoint's if they were quantised to FP8; None: it is not
        kept."""
        info, tensor, target = self._base[weight.source.stored_name], weight.source.tensor, weight.target
        dtype = _STORED.get(info.dtype)
        is_plain = weight.order is None and info.codes is None and info.flat is None and tensor.row_order is None
        if dtype is None or not is_plain or (tensor.offset, tensor.factor) != (0.0, 1.0):
            return None
        if weight.scales is not None:
            return dtype if target.dtype == FP8 and target.dim() == 2 else None
        return target.dtype if target.dtype in (dtype, torch.float32) else None

    def _choose_place(self, num_ranks: int) -> Place:
        ram = available_ram() * _HOST_SHARE / num_ranks
        if self._device.type == "cuda":
            if self.num_bytes <= torch.cuda.mem_get_info(self._device)[0] * BASE_SHARE:
                return "device"
            return "host" if self.num_bytes <= ram else "files"
        return "device" if self.num_bytes <= ram else "files"

    def _copy_base(self, *, is_made_up: bool) -> list[Tensor | None]:
        """Copy the base of each weight to its place; None: it is not kept."""
        copies: list[Tensor | None] = []
        unread: list[Assignment] = []
        for weight, dtype in zip(self._weights, self._base_types, strict=True):
            if dtype is None or self.place == "files":
                copies.append(None)
                continue
            on_host = self.place == "host"
            device = _CPU if on_host else self._device
            copy = torch.empty(weight.target.shape, dtype=dtype, device=device, pin_memory=on_host)
            copies.append(copy)
            if weight.scales is None:
                copy.copy_(weight.target)
            elif is_made_up:
                copy.copy_(dequantise_weight(weight.target, weight.scales))
            else:
                unread.append(replace(weight, source=replace(weight.source, scales=None), target=copy, scales=None))
        begin_to_read(unread, self._base)()
        return copies

    def _compile_changes(self) -> None:
        """Change rows of zeros, in FP8 of each width, without and with a product, so that the first change waits for no
        kernels to be compiled."""
        kept = [(one, base) for one, base in zip(self._weights, self._copies, strict=True) if base is not None]
        for dtype in {one.target.dtype for one, _ in kept if one.scales is None}:
            row = torch.zeros(1, PAGE_RANKS, dtype=dtype, device=self._device)
            merge_low_rank(row, row, row.t(), row.expand(PAGE_RANKS, -1), 0.0)
        scaled = ((one.scales, base) for one, base in kept if one.scales is not None)
        for width, dtype in {(base.shape[1], base.dtype) for scales, base in scaled if scales.dim() == 1}:
            row = torch.zeros(1, width, device=self._device)
            codes, scales = torch.empty_like(row, dtype=FP8), torch.empty(1, device=self._device)
            for low_rank in (None, LowRankSum(row[:, :1], row, 0.0)):
                quantise_weight_to(row.to(dtype), "channel", codes, scales, low_rank)

    def _set(self, index: int, info: TensorInfo | None, product: _Product | None, values: Tensor) -> bool:
        """Set a weight to its base with an adapter's changes, from what is kept; return whether that is possible.
        `info` None: without changes. `values` are those of the adapter's products."""
        weight, base = self._weights[index], self._copies[index]
        if base is None or (info is not None and product is None):
            return False
        if weight.scales is not None:
            self._quantise(weight, base, product, values)
            return True
        if product is None or self.place == "host":
            weight.target.copy_(base, non_blocking=True)
            base = weight.target
        if product is not None:
            up, down = product.matrices(values)
            merge_low_rank(weight.target, base, up, down, product.scaling)
        return True

    def _quantise(self, weight: Assignment, base: Tensor, product: _Product | None, values: Tensor) -> None:
        """Set a weight in FP8 to its base with an adapter's product, as the loader does: quantised from float32. It is
        done in blocks of rows, whose numbers take little memory."""
        assert weight.scales is not None
        scaling: FP8Scaling = "block" if weight.scales.dim() == 2 else "channel"
        rows_per_scale = FP8_BLOCK if scaling == "block" else 1
        num_rows, num_columns = base.shape
        step = min(num_rows, FP8_BLOCK * max(1, _NUMBERS_AT_ONCE // (FP8_BLOCK * num_columns)))
        low_rank = None
        if product is not None:
            up, down = product.matrices(values)
            low_rank = LowRankSum(up.t().float(), down.float(), product.scaling)
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            first_scale, last_scale = first // rows_per_scale, ceil_div(last, rows_per_scale)
            quantise_weight_to(
                base[first:last].to(self._device, non_blocking=True),
                scaling,
                weight.target[first:last],
                weight.scales[first_scale:last_scale],
                None if low_rank is None else low_rank._replace(up=low_rank.up[first:last]),
            )

    def _spoil(self, changed: Mapping[str, TensorInfo]) -> None:
        """Make the results of an adapter that cannot be merged NaN, on whichever rank it was."""
        for weight in self._weights:
            if weight.source.stored_name in changed:
                (weight.target if weight.scales is None else weight.scales).fill_(math.nan)

    def _read_products(self, number: int) -> _HostProducts:
        """Read the matrices of an adapter's plain products for the weights whose base is kept, on a thread of its
        own. Raises LoadError."""
        changes = list(self._plain_products(number))
        products, first = [], 0
        for index, change in changes:
            num_rows, num_columns = map(length, self._weights[index].source.read)
            product = _Product(
                weight=index,
                rank=change.down.shape[0],
                rows=num_rows,
                columns=num_columns,
                scaling=change.scaling,
                first=first,
            )
            products.append(product)
            first += product.rank * (num_rows + num_columns)
        types = {info.dtype for _, change in changes for info in (change.up, change.down)}
        dtype = _STORED.get(types.pop(), torch.float32) if len(types) == 1 else torch.float32
        is_pinned = self._device.type == "cuda"
        with torch.inference_mode(), OpenFiles() as files:
            values = torch.empty(first, dtype=dtype, device=_CPU, pin_memory=is_pinned)
            for product, (index, change) in zip(products, changes, strict=True):
                rows, columns = self._weights[index].source.read
                up, down = product.matrices(values)
                up.copy_(read_features(files, change.up, change.features, rows, _CPU))
                down.copy_(read_stored(files, change.down, (slice(0, product.rank), columns), _CPU))
            if not are_finite(values):
                for product, (_, change) in zip(products, changes, strict=True):
                    for matrix, info in zip(product.matrices(values), (change.up, change.down), strict=True):
                        check_finite(matrix, info)
        return _HostProducts(values=values, products=tuple(products))

    def _plain_products(self, number: int) -> Iterator[tuple[int, LowRankChange]]:
        """Yield each weight of which a copy is kept and that an adapter changes by a single product."""
        for index, weight in enumerate(self._weights):
            info = self._changed[number].get(weight.source.stored_name)
            if info is None or self._copies[index] is None or len(info.changes) != 1:
                continue
            (change,) = info.changes
            is_same_base = replace(info, changes=()) == self._base[weight.source.stored_name]
            if isinstance(change, LowRankChange) and change.magnitude is None and is_same_base:
                yield index, change


def _product_bytes(adapter: Adapter) -> int:
    """Return the most bytes that an adapter's products take in float32."""
    return 4 * sum(math.prod(one.down.shape) + math.prod(one.up.shape) for one in adapter.products)


def _made_up(model: CausalLM) -> dict[str, TensorInfo]:
    """Return the tensors of a model whose weights are made up, as if files held them in the types that ranks keep, or
    those in FP8 in 16 bits."""
    types = {dtype: name for name, dtype in _STORED.items()}
    return {
        name: TensorInfo(
            file=Path("made-up weights"),
            name=name,
            shape=tensor.stored_shape,
            dtype=types.get(getattr(torch, tensor.dtype), "BF16" if tensor.scaling is not None else tensor.dtype),
            num_bytes=0,
        )
        for tensor in model.tensors.values()
        for name in tensor.stored_names
    }
