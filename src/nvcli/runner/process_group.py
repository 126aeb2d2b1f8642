"""The ranks' process group: gloo on CPUs, NCCL on GPUs, met over a store that rank 0 holds on a port of its choice; and
on GPUs that reach each other the memory that they share for small sums.
"""

from __future__ import annotations

import os
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

from nvcli.config import EngineConfig
from nvcli.kernels.peer_memory import SUPPORTED_RANKS, PeerLayout, PeerMemory
from nvcli.models.group import TensorParallelGroup
from nvcli.runner.graph_sizes import most_captured_tokens
from nvcli.runner.interface import RankContext

_LOCALHOST = "127.0.0.1"
_LATER_SECONDS = 10.0
"""How much later than the executor a collective gives up on a rank that does not come: the executor can tell which."""
_MOST_PART_BYTES = 32 << 20
"""Of one rank's part of a sum: above it NCCL moves the bytes as fast, and the buffers would take memory from the KV
cache. Two H200s still gain at 16 MiB: 64 µs against 95."""


def join_process_group(
    context: RankContext, device: torch.device, *, size: int, timeout_seconds: float
) -> TensorParallelGroup:
    """Collective over all `size` ranks. One rank needs no group and makes none.

    `timeout_seconds`: after which the executor ends a run whose ranks do not answer.
    """
    if size == 1:
        return TensorParallelGroup(None, device)
    timeout = timedelta(seconds=timeout_seconds + _LATER_SECONDS)
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


def share_memory(config: EngineConfig, group: TensorParallelGroup, hidden_size: int, dtype: torch.dtype) -> list[str]:
    """Give the group a `PeerMemory` for sums of the steps that are captured; collective over all ranks.

    Where that cannot be, sums go through the process group. → notes for the log: why it cannot.
    """
    if group.size == 1 or group.device.type != "cuda":
        return []
    most_rows = most_captured_tokens(config.max_num_seqs, config.max_num_batched_tokens)
    layout = PeerLayout(
        num_ranks=group.size,
        max_rows=max(1, min(most_rows, _MOST_PART_BYTES // (hidden_size * dtype.itemsize))),
        hidden_size=hidden_size,
        dtype=dtype,
    )
    memory, obstacle = None, _obstacle(config, group)
    # Together, or some would wait for ranks that do not come.
    if group.min(int(obstacle is None)):
        try:
            memory = open_peer_memory(group, layout)
        except RuntimeError as error:  # torch has no narrower one
            obstacle = (str(error).strip().splitlines() or [""])[0]
    # Behind the zeros of all ranks, too: this waits for the device.
    if group.min(int(memory is not None)):
        group.peer_memory = memory
        return []
    return [f"sums over the ranks go through NCCL alone, symmetric memory being out: {obstacle or 'on another rank'}"]


def open_peer_memory(group: TensorParallelGroup, layout: PeerLayout) -> PeerMemory:
    """Collective. No rank may use it before all have it. Raises RuntimeError where the driver or torch refuses."""
    import torch.distributed._symmetric_memory as symmetric_memory

    process_group = group.process_group
    assert process_group is not None
    block = symmetric_memory.empty(layout.num_bytes, dtype=torch.uint8, device=group.device)
    block.zero_()
    handle = symmetric_memory.rendezvous(block, process_group)
    blocks = [
        block if rank == group.rank else handle.get_buffer(rank, block.shape, block.dtype) for rank in range(group.size)
    ]
    return PeerMemory(layout, blocks, group.rank, handle)


def _obstacle(config: EngineConfig, group: TensorParallelGroup) -> str | None:
    """What keeps this rank from the other ranks' memory, as far as that can be known beforehand."""
    if group.size not in SUPPORTED_RANKS:
        return f"tensor_parallel_size is {group.size}, and it serves {', '.join(map(str, SUPPORTED_RANKS))}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    mine = config.gpu_index(group.rank)
    for rank in range(group.size):
        other = config.gpu_index(rank)
        if other != mine and not torch.cuda.can_device_access_peer(mine, other):
            return f"GPU {mine} cannot reach GPU {other}'s memory (see `nvidia-smi topo -p2p r`)"
    return None
