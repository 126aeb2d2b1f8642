"""Opens memory that the GPUs of a tensor-parallel group share, and explains why it cannot.

The collectives over it are in `kernels/peer_memory.py`.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from nvcli.core.engine_config import EngineConfig
from nvcli.kernels.peer_memory import SUPPORTED_RANKS, PeerLayout, PeerMemory
from nvcli.worker.distributed.process_group import RankGroups
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


def share_memory(
    config: EngineConfig, groups: RankGroups, *, max_rows: int, hidden_size: int, dtype: torch.dtype
) -> list[str]:
    """Give the tensor group a `PeerMemory` for sums of up to `max_rows` × `hidden_size`. Collective over all ranks.

    If one rank cannot use it, no rank of any stage does, and sums go through the process group: a rank and its
    counterpart in the next stage must agree on which rows of a residual are up to date. Returns notes for the log that
    say why. A group that sums in order gets none, because the order here depends on the number of rows, and
    one with attention by rows none, because it gathers rows and scatters sums.
    """
    world, group = groups.world, groups.tensor
    if group.size == 1 or group.device.type != "cuda" or group.sums_in_order or config.enable_attention_dp:
        return []
    layout = PeerLayout(num_ranks=group.size, max_rows=max_rows, hidden_size=hidden_size, dtype=dtype)
    memory, obstacle = None, _obstacle(config, group, first_rank=world.rank - group.rank)
    # All ranks must go on together, or some would wait for ranks that never come.
    if world.min(int(obstacle is None)):
        try:
            memory = open_peer_memory(group, layout)
        except RuntimeError as error:  # the narrowest type that torch offers
            obstacle = (str(error).strip().splitlines() or [""])[0]
    # This waits for the device, so that all ranks' zeros are written as well.
    if world.min(int(memory is not None)):
        group.peer_memory = memory
        return []
    return [f"sums over the ranks use NCCL alone, not symmetric memory: {obstacle or 'another rank cannot use it'}"]


def open_peer_memory(group: TensorParallelGroup, layout: PeerLayout) -> PeerMemory:
    """Allocate this rank's block and map the other ranks' blocks. Collective; no rank may use it before all have it.

    Raises RuntimeError if the driver or torch refuses.
    """
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
    """Return the reason why this rank cannot map the other ranks' memory, if known beforehand; else None.

    `first_rank` is the number of the group's first rank among all ranks of the replica.
    """
    if group.size not in SUPPORTED_RANKS:
        return f"tensor_parallel_size is {group.size}; it supports {', '.join(map(str, SUPPORTED_RANKS))}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    mine = config.gpu_index(first_rank + group.rank)
    for rank in range(first_rank, first_rank + group.size):
        other = config.gpu_index(rank)
        if other != mine and not torch.cuda.can_device_access_peer(mine, other):
            return f"GPU {mine} cannot reach GPU {other}'s memory (see `nvidia-smi topo -p2p r`)"
    return None
