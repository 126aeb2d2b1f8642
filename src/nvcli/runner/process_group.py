"""The ranks' process group: gloo on CPUs, NCCL on GPUs, met over a store that rank 0 holds on a port of its choice."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from nvcli.models.parallel import TensorParallelGroup
from nvcli.runner.interface import RankContext

_LOCALHOST = "127.0.0.1"


def join_process_group(
    context: RankContext, device: torch.device, *, size: int, timeout_seconds: float
) -> TensorParallelGroup:
    """Collective over all `size` ranks. One rank needs no group and makes none."""
    if size == 1:
        return TensorParallelGroup(None, device)
    timeout = timedelta(seconds=timeout_seconds)
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
    return TensorParallelGroup(dist.group.WORLD, device)
