"""The ranks' process groups: gloo on CPUs, NCCL on GPUs. The ranks of a replica meet over a store that only they can
open (`rendezvous.py`), and the sockets of both libraries listen on the loopback interface alone.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nvcli.core.engine_config import EngineConfig
from nvcli.errors import ConfigError
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

_LOOPBACK_ONLY = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_RAS_ENABLE": "0",
}
"""Environment variables of gloo and NCCL, overriding the user's: all ranks are on this machine, and neither library
asks who connects. NCCL's RAS service would listen on a fixed port for a tool that is not used here."""
_COLLECTIVE_GRACE_SECONDS = 10.0
"""A collective waits this much longer for a missing rank than the executor does, because only the executor can tell
which rank is missing."""
_NO_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a replica, and the store through which they met."""

    group: TensorParallelGroup
    store: dist.Store | None  # type: ignore[name-defined]
    """None where the replica has only one rank."""

    def meet(self, place: str) -> None:
        """Wait until every rank has called this with the same `place`. Each place can be used once.

        It never times out, unlike a collective: the executor ends the wait when a rank dies.
        """
        if self.store is not None:
            self.store.set(f"{place}/{self.group.rank}", "")
            self.store.wait([f"{place}/{rank}" for rank in range(self.group.size)], _NO_TIMEOUT)


def join_process_group(rank: int, store_path: str, device: torch.device, *, size: int, timeout_seconds: float) -> World:
    """Join the `size` ranks of a replica; collective. A lone rank makes no process group.

    `store_path` is the file over which they meet. `timeout_seconds` is the time after which the executor ends a run
    whose ranks do not answer. Raises ConfigError if the loopback interface is down.
    """
    if size == 1:
        return World(TensorParallelGroup(None, device), None)
    timeout = _collective_timeout(timeout_seconds)
    os.environ.update(_LOOPBACK_ONLY)
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    except RuntimeError as error:
        if _has_loopback():
            raise
        raise ConfigError(
            "ranks of one model talk over the loopback interface, which is down here: ip link set lo up (a container "
            "or sandbox may have to allow it), or use one rank: --tp 1 --pp 1"
        ) from error
    return World(TensorParallelGroup(dist.group.WORLD, device), store)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The groups that one rank of a replica belongs to."""

    world: TensorParallelGroup
    """All ranks of the replica."""
    tensor: TensorParallelGroup
    """The ranks that share the layers of this rank's stage."""
    previous: dist.ProcessGroup | None = None
    """The link to the stage before: its rank 0 is this rank's counterpart there. Each link has a group of its own, so
    that sending does not wait for receiving, and sums wait for neither. None in the first stage."""
    next: dist.ProcessGroup | None = None
    """The link to the next stage: its rank 0 is this rank. None in the last stage."""


def divide_ranks(config: EngineConfig, world: TensorParallelGroup, rank: int) -> RankGroups:
    """Make the groups of the pipeline stages and of the links between them; collective over all ranks."""
    num_stages, tp = config.pipeline_parallel_size, config.tensor_parallel_size
    if num_stages == 1:
        return RankGroups(world=world, tensor=world)
    timeout = _collective_timeout(config.step_timeout)

    # Every rank must take part in making every group, in the same order.
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


def _has_loopback() -> bool:
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # sends nothing
        except OSError:
            return False
    return True


def _collective_timeout(step_timeout: float) -> timedelta:
    return timedelta(seconds=step_timeout + _COLLECTIVE_GRACE_SECONDS)
