"""TensorParallelGroup: the ranks that share one replica's layers, and what they do together.

By the process group everywhere; where the runner has given the group a `PeerMemory`, sums of as many rows as it takes
go through that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.peer_memory import PeerMemory


@dataclass(frozen=True, slots=True)
class StageState:
    """What a rank hands over to its counterpart in the next pipeline stage, for T tokens (SGLang's proxy tensors)."""

    residual: Tensor
    """[T, H], the residual stream. With several ranks a rank's own may be up to date in the rows alone that it will
    read again (see `add_rms_norm`): its counterpart reads the same ones, as long as T is the same."""
    delta: Tensor | None
    """[T, H], this rank's part of what the last layer computed, to be summed over the ranks and added; None: it is in
    `residual` already."""


class TensorParallelGroup:
    """Methods are collective unless they say otherwise: every rank calls them alike, with tensors of equal shapes."""

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        """`process_group` None: one rank, no communication. `device`: where this rank's tensors live."""
        self.process_group = process_group
        self.device = device
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.peer_memory: PeerMemory | None = None
        """Set by the runner, on all ranks or on none, before the first forward pass."""

    @staticmethod
    def single() -> TensorParallelGroup:
        """A group of one, which needs no `torch.distributed`."""
        return TensorParallelGroup(None, torch.device("cpu"))

    # ------------------------------------------------------------------ sums of a forward pass

    def place_for_part(
        self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, opens: bool = False
    ) -> Tensor | None:
        """Where this rank should write its part of the next sum, of that shape; None: anywhere. A part that lies
        elsewhere costs a copy. `opens`: of the first sum of a forward pass: `sum`, or what `take_over` prepares.
        Not collective."""
        memory = self._memory_for(shape, dtype)
        return None if memory is None else memory.part(shape[0], opens=opens)

    def sum(self, part: Tensor) -> Tensor:
        """Over the ranks: [T, H] → [T, H], maybe in place. Opens a forward pass."""
        memory = self._memory_for(part.shape, part.dtype)
        return self._all_reduce(part) if memory is None else memory.sum(part)

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Sum the ranks' parts, add the sum to `residual` in place, and norm the result. [T, H] each → [T, H].

        With one rank the part may be float32 parts [P, T, H] of its own. What is returned holds until the next call.
        `residual` is for the next call alone: a rank may keep up only those of its rows that it will read again.
        """
        memory = self._memory_for(part.shape, part.dtype)
        if memory is None:
            return add_rms_norm(self._all_reduce(part), residual, weight, eps)
        return memory.add_rms_norm(part, residual, weight, eps)

    def hand_over(self, delta: Tensor, residual: Tensor) -> StageState:
        """The end of a stage that is not the last; delta and residual as for `add_rms_norm`. Not collective.

        One rank adds them up here, in place; of several, the next stage's do with their first norm.
        """
        if self.size > 1:
            return StageState(residual, delta)
        return StageState(residual.add_(delta.sum(dim=0) if delta.dim() == 3 else delta), None)

    def take_over(self, state: StageState) -> tuple[Tensor | None, Tensor]:
        """The beginning of a stage that is not the first: (delta, residual) for `add_rms_norm`. Opens a forward pass;
        not collective."""
        delta = state.delta
        if delta is not None:
            place = self.place_for_part(delta.shape, delta.dtype, opens=True)
            delta = delta if place is None else place.copy_(delta)
        return delta, state.residual

    def _memory_for(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> PeerMemory | None:
        """What a sum of this shape goes through; None: the process group."""
        memory = self.peer_memory
        return memory if memory is not None and memory.takes(shape, dtype) else None

    # ------------------------------------------------------------------ choosing tokens

    def max(self, keys: Tensor) -> Tensor:
        """The largest of all ranks, element by element, maybe in place: [N] int64 → [N] int64."""
        memory = self.peer_memory
        if self.size == 1 or len(keys) == 0:
            return keys
        if memory is not None and len(keys) <= memory.layout.max_rows:
            return memory.max(keys)
        dist.all_reduce(keys, op=dist.ReduceOp.MAX, group=self.process_group)
        return keys

    def gather(self, shard: Tensor) -> Tensor | None:
        """[N, V / size] of each rank → [N, V] on rank 0, None on the others."""
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

    def all_gather(self, x: Tensor) -> Tensor:
        """Each rank's `x`, in the order of ranks: [N, ...] → [size, N, ...] on every rank."""
        if self.size == 1:
            return x[None]
        everyone = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if x.numel() > 0:
            dist.all_gather_into_tensor(everyone.flatten(0, 1), x.contiguous(), group=self.process_group)
        return everyone

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values into every rank's `x`, in place."""
        if self.size > 1 and x.numel() > 0:
            dist.broadcast(x, group=self.process_group, group_src=0)
        return x

    # ------------------------------------------------------------------ start-up

    def min(self, value: int) -> int:
        """Smallest `value` of all ranks. Synchronises with the device."""
        if self.size == 1:
            return value
        x = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MIN, group=self.process_group)
        return int(x.item())

    def _all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1 and x.numel() > 0:
            dist.all_reduce(x, group=self.process_group)
        return x
