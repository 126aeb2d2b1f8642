"""TensorParallelGroup: the ranks that share one replica's layers, and their collectives.

Sums go through the process group, or through a `PeerMemory` if the group has one that holds their rows. With
`sums_in_order`, every rank gets all parts and adds them up itself, in the order of ranks: a library's order may depend
on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nvcli.kernels.fp8 import norm_and_quantise
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.norm import add_rms_norm, rms_norm, sum_in_order, sum_rms_norm
from nvcli.kernels.peer_memory import PeerMemory
from nvcli.kernels.weight_formats import FP8Scaling

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The same functions; torch 2.13 warns about the older names."""


@dataclass(frozen=True, slots=True)
class StageState:
    """The tensors that a rank sends to its counterpart in the next pipeline stage, for T tokens (SGLang's proxy
    tensors)."""

    residual: Tensor
    """[T, H], the residual stream. With several ranks, a rank's copy may be up to date only in the rows that it will
    read again (see `add_rms_norm`); its counterpart reads the same rows, as long as T is the same. Of several streams
    [T, N × H], side by side, all rows are up to date."""
    delta: Tensor | None
    """[T, H], this rank's part of what the last layer computed: to be summed over the ranks and added to the residual.
    None where it has been added already, as to several streams."""


class TensorParallelGroup:
    """One rank's view of the group. Methods are collective unless they say otherwise: every rank calls them alike, with
    tensors of equal shapes."""

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        """`process_group` is None for a lone rank. `device` is the device that holds this rank's tensors."""
        self.process_group = process_group
        self.device = device
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.peer_memory: PeerMemory | None = None
        """Memory shared with the other ranks, set by the runner before the first forward pass on all ranks or on
        none."""
        self.sums_in_order = False
        """Whether a row's sums have the same bits whatever the other rows are. Set by the runner, too; such a group has
        no `peer_memory`."""

    @staticmethod
    def single() -> TensorParallelGroup:
        """A group of one rank, which needs no `torch.distributed`."""
        return TensorParallelGroup(None, torch.device("cpu"))

    # ------------------------------------------------------------------ sums of a forward pass

    def partial_sum_buffer(
        self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, first: bool = False
    ) -> Tensor | None:
        """Return the memory in which this rank should write its part of the next sum, of this shape; not collective.

        None: any memory will do. A part that is written elsewhere costs a copy. `first` marks the first sum of a
        forward pass: that of `sum`, or the one prepared by `recv_stage`.
        """
        memory = self._peer_memory_for(shape, dtype)
        return None if memory is None else memory.part(shape[0], first=first)

    def sum(self, part: Tensor) -> Tensor:
        """Sum `part` over the ranks: [T, H] → [T, H], maybe in place. It is the first sum of a forward pass, or rows of
        another size than the residual stream's. A lone rank's part, or parts, stay as they are."""
        memory = self._peer_memory_for(part.shape, part.dtype)
        return self._all_reduce(part) if memory is None else memory.sum(part)

    def add_rms_norm(
        self,
        part: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        scaling: FP8Scaling | None = None,
        *,
        is_centered: bool = False,
    ) -> Activations:
        """Sum the ranks' parts, add the sum to `residual` in place, norm the result, and quantise it as `scaling` says.
        [T, H] each → [T, H].

        A lone rank may give float32 parts [P, T, H] instead, which are summed here. The result holds until the next
        call. `residual` may be read by the next call only: a rank updates the rows that it will read again, and maybe
        no others.
        """
        memory = None if is_centered else self._peer_memory_for(part.shape, part.dtype)
        if memory is not None:
            return memory.add_rms_norm(part, residual, weight, eps, scaling)
        summed = self._parts(part) if self.sums_in_order else self._all_reduce(part)
        if scaling is None:
            return add_rms_norm(summed, residual, weight, eps, is_centered=is_centered)
        return norm_and_quantise(summed, residual, weight, eps, scaling, is_centered=is_centered)

    def sum_rms_norm(self, part: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Sum the ranks' parts and norm the sum: [T, H], or a lone rank's float32 parts [P, T, H] → [T, H] of `dtype`.

        The result holds until the next sum.
        """
        if part.dim() == 3:
            return sum_rms_norm(part, weight, eps, dtype)
        memory = self._peer_memory_for(part.shape, part.dtype)
        if self.sums_in_order and self.size > 1:
            return sum_rms_norm(self._parts(part), weight, eps, dtype)
        if memory is None:
            return rms_norm(self._all_reduce(part), weight, eps)
        normed = memory.add_rms_norm(part, torch.zeros_like(part), weight, eps)
        assert isinstance(normed, Tensor)
        return normed

    def add_sum(self, part: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream plus the sum of the ranks' parts, up to date on every rank: [T, H], or a lone
        rank's parts [P, T, H], and [T, H] → [T, H]. `residual` is overwritten."""
        # It comes first: the next sum's part may be written where the last sum is still read.
        total = sum_in_order(part) if part.dim() == 3 else self.sum(part)
        return self.whole_residual(residual).add_(total)

    def residual_rows(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Select rows of the residual stream, up to date on every rank: [T, H], [N] int64 → [N, H].

        The stream was last updated by `add_rms_norm`, or is equal on all ranks. N is at least 1.
        """
        memory = self._peer_memory_for(residual.shape, residual.dtype)
        if memory is None or len(residual) < memory.two_shot_rows:
            return residual[rows]
        return memory.sum(memory.own_rows(residual, rows))

    def whole_residual(self, residual: Tensor) -> Tensor:
        """Return the residual stream [T, H], up to date on every rank (see `residual_rows`)."""
        if self.size == 1:
            return residual
        return self.residual_rows(residual, torch.arange(len(residual), device=residual.device))

    def sum_of_squares(self, squares: Tensor) -> Tensor:
        """Sum float32 numbers over the ranks, in place, always through the process group and never through
        `PeerMemory`."""
        return self._all_reduce(squares)

    def send_stage(self, delta: Tensor | None, residual: Tensor) -> StageState:
        """Make what the next stage needs, at the end of a stage that is not the last; not collective.

        `delta` and `residual` are as for `add_rms_norm`. A lone rank adds them up here, in place, if it has not done so
        (`delta` None); with several ranks the next stage's first norm sums them.
        """
        if self.size > 1 or delta is None:
            return StageState(residual, delta)
        return StageState(residual.add_(delta.sum(dim=0) if delta.dim() == 3 else delta), None)

    def recv_stage(self, state: StageState) -> tuple[Tensor | None, Tensor]:
        """Make (delta, residual) for `add_rms_norm` from what the stage before sent; not collective.

        It begins the forward pass of a stage that is not the first.
        """
        delta = state.delta
        if delta is not None:
            buffer = self.partial_sum_buffer(delta.shape, delta.dtype, first=True)
            delta = delta if buffer is None else buffer.copy_(delta)
        return delta, state.residual

    def _peer_memory_for(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> PeerMemory | None:
        """The shared memory that a sum of this shape goes through, or None for the process group."""
        memory = self.peer_memory
        return memory if memory is not None and memory.takes(shape, dtype) else None

    # ------------------------------------------------------------------ choosing tokens

    def without_padding(self, logits: Tensor, vocab_size: int) -> tuple[Tensor, int]:
        """Return this rank's logits [N, M] without the vocabulary's padding, and the token id of the first column;
        not collective."""
        size = logits.shape[1]
        start = min(self.rank * size, vocab_size)
        return logits[:, : min(size, vocab_size - start)], start

    def max(self, keys: Tensor) -> Tensor:
        """The largest key over all ranks, element by element, maybe in place: [N] int64 → [N] int64."""
        memory = self.peer_memory
        if self.size == 1 or len(keys) == 0:
            return keys
        if memory is not None and len(keys) <= memory.layout.max_rows:
            return memory.max(keys)
        dist.all_reduce(keys, op=dist.ReduceOp.MAX, group=self.process_group)
        return keys

    def gather(self, shard: Tensor) -> Tensor | None:
        """Concatenate the ranks' shards: [N, V / size] on each rank → [N, V] on rank 0, None on the others."""
        if self.size == 1:
            return shard
        shard = shard.contiguous()
        if self.rank != 0:
            if shard.numel() > 0:
                dist.gather(shard, None, group=self.process_group, group_dst=0)
            return None
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        if shard.numel() > 0:
            dist.gather(shard, parts, group=self.process_group, group_dst=0)
        return torch.cat(parts, dim=-1)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gather the ranks' own rows, in rank order: [T, ...] → [size × T, ...] on every rank."""
        return self.all_gather(rows).flatten(0, 1)

    def scatter_sum(self, part: Tensor) -> Tensor:
        """Sum the ranks' parts of all rows, each on the rank whose own it is: [size × T, H] → [T, H]."""
        own = torch.empty(len(part) // self.size, *part.shape[1:], dtype=part.dtype, device=part.device)
        if own.numel() > 0:
            _reduce_scatter(own, part.contiguous(), group=self.process_group)
        return own

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather each rank's `x`, in rank order: [N, ...] → [size, N, ...] on every rank."""
        if self.size == 1:
            return x[None]
        everyone = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if x.numel() > 0:
            _all_gather(everyone.flatten(0, 1), x.contiguous(), group=self.process_group)
        return everyone

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's values into every rank's `x`, in place."""
        if self.size > 1 and x.numel() > 0:
            dist.broadcast(x, group=self.process_group, group_src=0)
        return x

    # ------------------------------------------------------------------ start-up

    def min(self, value: int) -> int:
        """The smallest `value` over all ranks. Waits for the device."""
        if self.size == 1:
            return value
        x = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MIN, group=self.process_group)
        return int(x.item())

    def _parts(self, part: Tensor) -> Tensor:
        """The parts of all ranks [size, T, H], to be added up in rank order; a lone rank's parts as they are."""
        return part if self.size == 1 else self.all_gather(part)

    def _all_reduce(self, x: Tensor) -> Tensor:
        if self.sums_in_order and self.size > 1:
            return sum_in_order(self.all_gather(x))
        if self.size > 1 and x.numel() > 0:
            dist.all_reduce(x, group=self.process_group)
        return x
