"""Sums through shared memory by ranks that take turns on one GPU: each runs ahead as far as it can, in every turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peer_drift import DRIFT_ROWS, drift
from torch.multiprocessing.reductions import reduce_tensor

from nvcli.kernels.peer_memory import PeerLayout, PeerMemory
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from tensor_parallel_ranks import run_ranks

pytestmark = pytest.mark.gpu


def drift_in_turns(group: TensorParallelGroup, num_passes: int) -> list[int]:
    layout = PeerLayout(num_ranks=group.size, max_rows=DRIFT_ROWS, hidden_size=1024, dtype=torch.bfloat16)
    block = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=group.device)
    torch.cuda.synchronize()
    found = [None] * group.size
    dist.all_gather_object(found, reduce_tensor(block), group=group.process_group)
    blocks = [block if rank == group.rank else open_it(*given) for rank, (open_it, given) in enumerate(found)]
    return drift(PeerMemory(layout, blocks, group.rank), group.device, 1, num_passes, lambda: None)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_take_turns(num_ranks: int, tmp_path: Path) -> None:
    for bad in run_ranks(num_ranks, drift_in_turns, tmp_path, 300, device="cuda:0", seconds=60):
        assert bad == [0, 0, 0, 0]
