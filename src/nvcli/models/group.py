"""TensorParallelGroup: the ranks that share one replica's layers, and what they do together.

By the process group everywhere; where the runner has given the group a `PeerMemory`, sums of few rows go through that.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.peer_memory import PeerMemory


class TensorParallelGroup:
    """All methods but `place_for_part` are collective: every rank calls them alike, with tensors of equal shapes."""

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
        elsewhere costs a copy. `opens`: of the first sum of a forward pass, which is `sum`, and only that one is."""
        memory = self.peer_memory
        return memory.part(shape[0], opens=opens) if memory is not None and memory.takes(shape, dtype) else None

    def sum(self, part: Tensor) -> Tensor:
        """Over the ranks: [T, H] → [T, H], maybe in place. Opens a forward pass."""
        memory = self.peer_memory
        return (
            memory.sum(part) if memory is not None and memory.takes(part.shape, part.dtype) else self._all_reduce(part)
        )

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Sum the ranks' parts, add the sum to `residual` in place, and norm the result. [T, H] each → [T, H].

        With one rank the part may be float32 parts [P, T, H] of its own. What is returned holds until the next call.
        `residual` is for the next call alone: a rank may keep up only those of its rows that it will read again.
        """
        memory = self.peer_memory
        if memory is not None and memory.takes(part.shape, part.dtype):
            return memory.add_rms_norm(part, residual, weight, eps)
        return add_rms_norm(self._all_reduce(part), residual, weight, eps)

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
