"""The ranks' process groups: gloo on CPUs, NCCL on GPUs, met over a store that rank 0 holds on a port of its choice;
and on GPUs that reach each other the memory that they share for small sums.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

from nvcli.config import EngineConfig
from nvcli.kernels.peer_memory import SUPPORTED_RANKS, PeerLayout, PeerMemory
from nvcli.models.group import TensorParallelGroup
from nvcli.models.sizes import rows_of_shared_sums
from nvcli.runner.interface import RankContext

_LOCALHOST = "127.0.0.1"
_LATER_SECONDS = 10.0
"""How much later than the executor a collective gives up on a rank that does not come: the executor can tell which."""


_AS_LONG_AS_IT_TAKES = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a replica."""

    group: TensorParallelGroup
    store: dist.Store | None  # type: ignore[name-defined]
    """Where they met; None: there is one rank."""

    def meet(self, place: str) -> None:
        """Wait until every rank is there. Collectives give up after a while; this does not, and the executor ends it
        when a rank dies. Each place once."""
        if self.store is not None:
            self.store.set(f"{place}/{self.group.rank}", "")
            self.store.wait([f"{place}/{rank}" for rank in range(self.group.size)], _AS_LONG_AS_IT_TAKES)


def join_process_group(context: RankContext, device: torch.device, *, size: int, timeout_seconds: float) -> World:
    """Collective over all `size` ranks. One rank needs no group and makes none.

    `timeout_seconds`: after which the executor ends a run whose ranks do not answer.
    """
    if size == 1:
        return World(TensorParallelGroup(None, device), None)
    timeout = _collective_timeout(timeout_seconds)
    # The host's name may not resolve, and no packet of ours leaves the machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    is_master = context.rank == 0
    port = 0 if is_master else context.wait_for_port()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _LOCALHOST, port, size, is_master, timeout=timeout, wait_for_workers=False
    )
    if is_master:
        context.publish_port(store.port)
    if device.type == "cuda":
        dist.init_process_group(
            "nccl", store=store, rank=context.rank, world_size=size, timeout=timeout, device_id=device
        )
    else:
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=size, timeout=timeout)
    return World(TensorParallelGroup(dist.group.WORLD, device), store)


def _collective_timeout(step_timeout: float) -> timedelta:
    return timedelta(seconds=step_timeout + _LATER_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Whom one rank of a replica works with."""

    world: TensorParallelGroup
    """All ranks of the replica."""
    tensor: TensorParallelGroup
    """Those that share the layers of its stage."""
    previous: dist.ProcessGroup | None = None
    """Its counterpart in the stage before, as rank 0, and itself. A group for each link, so that what is sent does not
    wait for what is received, and sums wait for neither."""
    next: dist.ProcessGroup | None = None
    """Itself, as rank 0, and its counterpart in the next stage."""


def divide_ranks(config: EngineConfig, world: TensorParallelGroup, rank: int) -> RankGroups:
    """The groups of pipeline stages and of the links between them; collective over all ranks."""
    num_stages, tp = config.pipeline_parallel_size, config.tensor_parallel_size
    if num_stages == 1:
        return RankGroups(world=world, tensor=world)
    timeout = _collective_timeout(config.step_timeout)

    # Every rank takes part in the making of every group, in the same order.
    def group_of(ranks: list[int]) -> dist.ProcessGroup | None:
        group = dist.new_group(ranks, timeout=timeout)
        return group if rank in ranks else None

    stages = [list(range(first, first + tp)) for first in range(0, config.num_ranks, tp)]
    own = [group_of(stage) for stage in stages] if tp > 1 else []
    links = {first: group_of([first, first + tp]) for first in range(config.num_ranks - tp)}
    return RankGroups(
        world=world,
        tensor=TensorParallelGroup(own[config.stage_of(rank)] if own else None, world.device),
        previous=links.get(rank - tp),
        next=links.get(rank),
    )


def share_memory(config: EngineConfig, groups: RankGroups, hidden_size: int, dtype: torch.dtype) -> list[str]:
    """Give the tensor group a `PeerMemory` for the sums of its steps; collective over all ranks.

    Where that cannot be, sums go through the process group, in every stage: the stages hand over what they hold by the
    same rule. → notes for the log: why it cannot.
    """
    world, group = groups.world, groups.tensor
    if group.size == 1 or group.device.type != "cuda":
        return []
    layout = PeerLayout(
        num_ranks=group.size,
        max_rows=rows_of_shared_sums(config.max_num_batched_tokens, hidden_size * dtype.itemsize),
        hidden_size=hidden_size,
        dtype=dtype,
    )
    memory, obstacle = None, _obstacle(config, group, first_rank=world.rank - group.rank)
    # Together, or some would wait for ranks that do not come.
    if world.min(int(obstacle is None)):
        try:
            memory = open_peer_memory(group, layout)
        except RuntimeError as error:  # torch has no narrower one
            obstacle = (str(error).strip().splitlines() or [""])[0]
    # Behind the zeros of all ranks, too: this waits for the device.
    if world.min(int(memory is not None)):
        group.peer_memory = memory
        return []
    return [f"sums over the ranks go through NCCL alone, symmetric memory being out: {obstacle or 'on another rank'}"]


def open_peer_memory(group: TensorParallelGroup, layout: PeerLayout) -> PeerMemory:
    """Collective. No rank may use it before all have it. Raises RuntimeError where the driver or torch refuses."""
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import _SymmetricMemory

    process_group = group.process_group
    assert process_group is not None
    # What `symmetric_memory.empty` calls, which itself imports torch's compiler first: 2.5 s.
    block = _SymmetricMemory.empty_strided_p2p((layout.num_bytes,), (1,), torch.uint8, group.device)
    block.zero_()
    handle = symmetric_memory.rendezvous(block, process_group)
    blocks = [
        block if rank == group.rank else handle.get_buffer(rank, block.shape, block.dtype) for rank in range(group.size)
    ]
    return PeerMemory(layout, blocks, group.rank, handle)


def _obstacle(config: EngineConfig, group: TensorParallelGroup, first_rank: int) -> str | None:
    """What keeps this rank from the other ranks' memory, as far as that can be known beforehand. `first_rank`: the
    number among all ranks of the group's first."""
    if group.size not in SUPPORTED_RANKS:
        return f"tensor_parallel_size is {group.size}, and it serves {', '.join(map(str, SUPPORTED_RANKS))}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    mine = config.gpu_index(first_rank + group.rank)
    for rank in range(first_rank, first_rank + group.size):
        other = config.gpu_index(rank)
        if other != mine and not torch.cuda.can_device_access_peer(mine, other):
            return f"GPU {mine} cannot reach GPU {other}'s memory (see `nvidia-smi topo -p2p r`)"
    return None
