"""LoadedAdapters: the LoRA adapters that rows choose from, on the device and in host memory.

Each rank keeps the parts of A and B that match its shard of a linear layer: all of A and part of B if the layer is
sharded by outputs, part of A and all of B if it is sharded by inputs. Adapters are kept in host memory as far as there
is room (`host_adapters.py`), laid out in the device's pages (`kernels/lora.py`), and loading one takes one copy per
page. If it cannot be read, its rows' results are NaN, so that they alone fail, on whichever rank it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.errors import LoadError
from nvcli.kernels.lora_types import AdaptedLayer, AdapterBank, feature_blocks, page_columns
from nvcli.kernels.whole_numbers import ceil_div, round_up
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.adapters.merge import check_finite, read_features, read_stored
from nvcli.models.host_adapters import HostAdapters
from nvcli.models.kept_values import in_order
from nvcli.models.parallel import LinearPiece, ShardedLinear
from nvcli.models.stored_values import OpenFiles
from nvcli.models.tensor_info import LowRankChange
from nvcli.models.weights import length

BLOCK_FEATURES = 256
"""Output features per tile of a product."""
_PAGE_ALIGN = 64
"""Elements. Matrices in a page start at multiples of it, so that kernels can read 16 bytes at a time."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearPlan:
    """A linear layer that some adapters change."""

    linear: ShardedLinear
    names: tuple[str, ...]
    """The weight's name of each projection."""
    layer: AdaptedLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostAdapter:
    """A rank's part of an adapter, in host memory."""

    pages: Tensor
    """[its pages, elements], in the model's type."""
    ranks: Tensor
    """[projections of all layers] int32."""
    scales: Tensor
    """[projections of all layers] float32."""


class LoadedAdapters:
    """The adapters of one rank. Everything that it gives to the device keeps its address."""

    bank: AdapterBank

    def __init__(
        self, model: nn.Module, adapters: Mapping[int, Adapter], dtype: torch.dtype, *, max_host_bytes: int
    ) -> None:
        """Find the linear layers that `adapters`, by their numbers, change in a model that has its memory. Reads no
        adapter and allocates no places. At most `max_host_bytes` of adapters are kept in host memory."""
        self._adapters, self._dtype = adapters, dtype
        self._device = next(model.parameters()).device
        self._plans, self._num_elements = _plan(model, list(adapters.values()), self._device)
        self._largest = sorted((_num_pages(adapter) for adapter in adapters.values()), reverse=True)
        """The pages of each adapter, the largest first."""
        self._free_pages: list[int] = []
        self._pages: dict[int, list[int]] = {}
        """Place → the pages of the adapter there."""
        page_bytes = self._num_elements * dtype.itemsize
        sizes = {number: _num_pages(adapter) * page_bytes for number, adapter in adapters.items()}
        gpu = self._device if self._device.type == "cuda" else None
        self.on_host = HostAdapters(self._read, sizes, max_bytes=max_host_bytes, gpu=gpu)

    def num_bytes(self, num_places: int) -> int:
        """Return the device memory that `num_places` places take, whichever adapters they hold."""
        return sum(self._largest[:num_places]) * self._num_elements * self._dtype.itemsize

    def make_places(self, num_places: int) -> None:
        """Allocate places on the device, and attach the products of the adapters there to the linear layers."""
        device, dtype, num_pages = self._device, self._dtype, sum(self._largest[:num_places])
        num_projections = sum(len(plan.names) for plan in self._plans)
        columns = page_columns(max(adapter.max_rank for adapter in self._adapters.values()))
        self.bank = AdapterBank(
            pages=torch.zeros(num_pages, self._num_elements, dtype=dtype, device=device),
            page_table=torch.zeros(num_places, columns, dtype=torch.int32, device=device),
            ranks=torch.zeros(num_places, num_projections, dtype=torch.int32, device=device),
            scales=torch.zeros(num_places, num_projections, dtype=torch.float32, device=device),
        )
        for plan in self._plans:
            plan.linear.low_rank = self.bank, plan.layer
        self._free_pages = list(range(num_pages))

    def load(self, place: int, number: int) -> LoadError | None:
        """Copy adapter `number` into `place`, both counted from 1, in stream order. It replaces the adapter that was
        there.

        Returns the error if its file cannot be read, or holds NaN or infinity; its rows then get NaN.
        """
        problem = None
        try:
            on_host = self.on_host.get(number)
        except LoadError as error:
            problem, on_host = error, self._broken()
        self._free_pages += self._pages.pop(place, [])
        mine = self._pages[place] = [self._free_pages.pop() for _ in range(len(on_host.pages))]
        for page, values in zip(mine, on_host.pages, strict=True):
            self.bank.pages[page].copy_(values, non_blocking=True)
        row = self.bank.page_table[place - 1, : len(mine)]
        row.copy_(self._pinned(torch.tensor(mine, dtype=torch.int32, device=_CPU)), non_blocking=True)
        self.bank.ranks[place - 1].copy_(on_host.ranks, non_blocking=True)
        self.bank.scales[place - 1].copy_(on_host.scales, non_blocking=True)
        return problem

    def _broken(self) -> _HostAdapter:
        """Return an adapter of rank 1 in every projection, whose products are NaN."""
        bank, num_projections = self.bank, self.bank.ranks.shape[1]
        return _HostAdapter(
            pages=torch.zeros(1, bank.pages.shape[1], dtype=bank.pages.dtype, device=_CPU),
            ranks=torch.ones(num_projections, dtype=torch.int32, device=_CPU),
            scales=torch.full((num_projections,), math.nan, device=_CPU),
        )

    def _pinned(self, values: Tensor) -> Tensor:
        """Return the values in pinned memory if the bank is on a GPU, so that copies do not block the host. The
        allocator keeps the memory until the copy has finished."""
        return values.pin_memory() if self._device.type == "cuda" else values

    def _read(self, number: int) -> _HostAdapter:
        """Read an adapter, on a thread of its own. Ranks that it does not have are left undefined."""
        adapter, is_pinned = self._adapters[number], self._device.type == "cuda"
        pages = torch.empty(_num_pages(adapter), self._num_elements, dtype=self._dtype, pin_memory=is_pinned)
        ranks, scales = [], []
        with OpenFiles() as files:
            for plan in self._plans:
                for projection, name in enumerate(plan.names):
                    change = _low_rank_change(adapter, name)
                    if change is not None:
                        _fill(files, pages, plan, projection, change)
                    ranks.append(0 if change is None else change.down.shape[0])
                    scales.append(0.0 if change is None else change.scaling)
        return _HostAdapter(
            pages=pages,
            ranks=self._pinned(torch.tensor(ranks, dtype=torch.int32, device=_CPU)),
            scales=self._pinned(torch.tensor(scales, dtype=torch.float32, device=_CPU)),
        )


def _plan(model: nn.Module, adapters: Sequence[Adapter], device: torch.device) -> tuple[list[_LinearPlan], int]:
    """Return the linear layers that adapters change, with their offsets in a page, and the number of elements in a
    page."""
    changed = {name for adapter in adapters for name in adapter.changes}
    plans: list[_LinearPlan] = []
    offset = first_projection = 0
    for linear in model.modules():
        if not isinstance(linear, ShardedLinear):
            continue
        names = tuple(dict.fromkeys(piece.weight.name for piece in linear.pieces))
        if changed.isdisjoint(names):
            continue
        runs = [(length(piece.rows), names.index(piece.weight.name)) for piece in linear.pieces]
        in_features = length(linear.pieces[0].columns)
        out_features = sum(num_features for num_features, _ in runs)
        up_offset = _aligned(offset + len(names) * PAGE_RANKS * in_features)
        blocks, align = feature_blocks(_merged(runs), BLOCK_FEATURES)
        layer = AdaptedLayer(
            in_features=in_features,
            out_features=out_features,
            first_projection=first_projection,
            num_projections=len(names),
            down_offset=offset,
            up_offset=up_offset,
            blocks=torch.tensor(blocks, dtype=torch.int32, device=device),
            block_features=BLOCK_FEATURES,
            feature_align=align,
        )
        plans.append(_LinearPlan(linear=linear, names=names, layer=layer))
        first_projection += len(names)
        offset = _aligned(up_offset + PAGE_RANKS * out_features)
    return plans, offset


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring runs of features of the same projection."""
    joined: list[tuple[int, int]] = []
    for num_features, projection in runs:
        if joined and joined[-1][1] == projection:
            num_features += joined.pop()[0]
        joined.append((num_features, projection))
    return joined


def _fill(files: OpenFiles, pages: Tensor, plan: _LinearPlan, projection: int, change: LowRankChange) -> None:
    """Read an adapter's A and B of one projection into its pages."""
    layer, rank = plan.layer, change.down.shape[0]
    size = PAGE_RANKS * layer.in_features
    downs = pages[:, layer.down_offset + projection * size :][:, :size].view(len(pages), PAGE_RANKS, -1)
    ups = pages[:, layer.up_offset :][:, : PAGE_RANKS * layer.out_features].view(len(pages), PAGE_RANKS, -1)
    first_feature, is_first = 0, True
    for piece in plan.linear.pieces:
        features = slice(first_feature, first_feature + length(piece.rows))
        first_feature = features.stop
        if piece.weight.name != plan.names[projection]:
            continue
        if is_first:
            down = read_stored(files, change.down, (slice(0, rank), piece.columns), _CPU)
            check_finite(down, change.down)
            for page, rows in _page_rows(down):
                downs[page, : len(rows)] = rows
            is_first = False
        for page, rows in _page_rows(_read_up(files, piece, change)):
            ups[page, : len(rows), features] = rows


def _read_up(files: OpenFiles, piece: LinearPiece, change: LowRankChange) -> Tensor:
    """Read B of a piece, [rank, rows of the piece], in the row order that ranks keep, in float32 or the file's type."""
    up = read_features(files, change.up, change.features, piece.rows, _CPU)
    check_finite(up.t(), change.up)  # as files have it
    assert piece.weight.offset == 0.0
    ordered = in_order(up.t(), piece.weight.row_order).t()
    return ordered if piece.weight.factor == 1.0 else ordered.float() * piece.weight.factor


def _page_rows(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Split a matrix [rank, features] into (page number, rows of that page)."""
    firsts = range(0, len(values), PAGE_RANKS)
    return ((number, values[first : first + PAGE_RANKS]) for number, first in enumerate(firsts))


def _low_rank_change(adapter: Adapter, name: str) -> LowRankChange | None:
    changes = adapter.changes.get(name, ())
    return next((change for change in changes if isinstance(change, LowRankChange)), None)


def _num_pages(adapter: Adapter) -> int:
    return ceil_div(adapter.max_rank, PAGE_RANKS)


def _aligned(elements: int) -> int:
    return round_up(elements, _PAGE_ALIGN)
