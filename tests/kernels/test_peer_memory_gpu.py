"""Sums through shared memory on real GPUs: right at every size, and no race however the ranks drift apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peer_drift import DRIFT_ROWS, EPS, NEVER, drift
from torch import Tensor

from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.peer_memory import PeerLayout, PeerMemory
from nvcli.worker.distributed.peer_memory import open_peer_memory
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from tensor_parallel_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("num_ranks", [2, 4, 8])]

ROWS = (1, 2, 3, 16, 17, 64, 100, 256, 512, 1000, 2048)


@pytest.fixture(autouse=True)
def enough_gpus(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")


def open_memory(group: TensorParallelGroup, max_rows: int, hidden_size: int) -> PeerMemory:
    layout = PeerLayout(num_ranks=group.size, max_rows=max_rows, hidden_size=hidden_size, dtype=torch.bfloat16)
    memory = open_peer_memory(group, layout)
    group.min(0)  # all have it
    return memory


# ------------------------------------------------------------------ sizes


def compare_sizes(group: TensorParallelGroup) -> list[str]:
    """What went wrong, of sums of every size by one shot and by two, against NCCL and the plain norm."""
    wrong = []
    for hidden_size in (1024, 4096, 5120):
        memory = open_memory(group, max(ROWS), hidden_size)
        weight = torch.randn(hidden_size, generator=torch.Generator().manual_seed(1)).to(group.device, torch.bfloat16)
        for num_rows in ROWS:
            generator = torch.Generator().manual_seed(num_rows)
            parts = torch.randn(group.size, num_rows, hidden_size, generator=generator).to(torch.bfloat16)
            residual = torch.randn(num_rows, hidden_size, generator=generator).to(group.device, torch.bfloat16)
            mine = parts[group.rank].to(group.device)
            total = mine.float()
            dist.all_reduce(total, group=group.process_group)
            expected_residual = residual.float()
            expected = add_rms_norm(total, expected_residual, weight.float(), EPS)
            for two_shot_rows in (1, NEVER):
                memory.two_shot_rows = two_shot_rows
                ours = residual.clone()
                out = memory.add_rms_norm(memory.part(num_rows).copy_(mine), ours, weight, EPS)
                assert isinstance(out, Tensor)
                out = out.float()
                rows = slice(group.rank, None, group.size) if two_shot_rows == 1 else slice(None)
                for name, a, b in (("norm", out, expected), ("residual", ours[rows].float(), expected_residual[rows])):
                    if a.numel() and not torch.allclose(a, b, atol=2e-2, rtol=1.6e-2):
                        wrong.append(f"{name} {num_rows} x {hidden_size}, two shots from {two_shot_rows}: {a - b}")
            opening = memory.part(num_rows, first=True).copy_(mine)
            if not torch.allclose(memory.sum(opening).float(), total, atol=2e-2, rtol=1.6e-2):
                wrong.append(f"sum {num_rows} x {hidden_size}")
    return wrong


def test_right_at_every_size(num_ranks: int, tmp_path: Path) -> None:
    for wrong in run_ranks(num_ranks, compare_sizes, tmp_path, device="cuda", seconds=240):
        assert wrong == []


# ------------------------------------------------------------------ races


def drift_apart(group: TensorParallelGroup, seed: int, num_passes: int) -> list[int]:
    memory = open_memory(group, DRIFT_ROWS, 1024)
    filler = torch.ones(64, 64, device=group.device)

    def sum_by_nccl() -> None:
        dist.all_reduce(filler, group=group.process_group)
        filler.fill_(1.0)

    return drift(memory, group.device, seed, num_passes, sum_by_nccl)


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_drift_apart(num_ranks: int, seed: int, tmp_path: Path) -> None:
    for bad in run_ranks(num_ranks, drift_apart, tmp_path, seed, 4000, device="cuda", seconds=280):
        assert bad == [0, 0, 0, 0]


# ------------------------------------------------------------------ graphs


def replay_and_eager(group: TensorParallelGroup) -> dict[str, Any]:
    """A captured sum follows its inputs, and gives the bits that an eager one gives, by one shot and by two."""
    memory = open_memory(group, 64, 4096)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=group.device)
    mine = torch.empty(64, 4096, dtype=torch.bfloat16, device=group.device)
    residual = torch.empty_like(mine)

    def step() -> Tensor:
        memory.sum(memory.part(64, first=True).zero_())
        out = memory.add_rms_norm(memory.part(64).copy_(mine), residual, weight, EPS)
        assert isinstance(out, Tensor)
        return out

    outs: dict[str, list[Tensor]] = {"one": [], "two": [], "graph one": [], "graph two": []}
    for name, two_shot_rows in (("one", NEVER), ("two", 1)):
        memory.two_shot_rows = two_shot_rows
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(64, 4096, generator=generator)
            for kind in ("", "graph "):
                mine.copy_(torch.randn(64, 4096, generator=torch.Generator().manual_seed(seed * 10 + group.rank)))
                residual.copy_(start)
                if kind:
                    graph.replay()
                outs[kind + name].append((out if kind else step()).cpu())
    return {name: torch.stack(found) for name, found in outs.items()}


def test_graphs_and_both_ways_give_the_same_bits(num_ranks: int, tmp_path: Path) -> None:
    ranks = run_ranks(num_ranks, replay_and_eager, tmp_path, device="cuda")
    expected = ranks[0]["one"]
    assert not torch.equal(expected[0], expected[1])
    for rank in ranks:
        for name, found in rank.items():
            assert torch.equal(found, expected), name
