"""Sums through shared memory on real GPUs: right at every size, and no race however the ranks drift apart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nvcli.kernels.norm import add_rms_norm, rms_norm
from nvcli.kernels.peer_memory import PeerLayout, PeerMemory
from nvcli.worker.distributed.peer_memory import open_peer_memory
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from tensor_parallel_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("num_ranks", [2, 4, 8])]

EPS = 1e-6
ROWS = (1, 2, 3, 16, 17, 64, 100, 256, 512, 1000, 2048)
NEVER = 1 << 30


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
                out = memory.add_rms_norm(memory.part(num_rows).copy_(mine), ours, weight, EPS).float()
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


class Drift:
    """Passes of sums whose every number is known, between delays that differ from rank to rank.

    Parts are small whole numbers times a scale that the device changes before every sum, so sums are exact, and a part
    or a result of another sum than the present one shows. Mismatches are counted on the device: nothing waits for it.
    """

    HIDDEN_SIZE = 1024
    MAX_ROWS = 400

    def __init__(self, group: TensorParallelGroup, seed: int) -> None:
        self.group = group
        self.memory = open_memory(group, self.MAX_ROWS, self.HIDDEN_SIZE)
        self.common = random.Random(seed)
        self.own = random.Random(seed * 100 + group.rank)
        generator = torch.Generator().manual_seed(seed)
        shape = (group.size, self.MAX_ROWS, self.HIDDEN_SIZE)
        bases = torch.randint(-1, 2, shape, generator=generator).to(group.device, torch.bfloat16)
        self.mine, self.total = bases[group.rank].clone(), bases.float().sum(dim=0)
        keys = torch.randint(-(1 << 62), 1 << 62, (group.size, self.MAX_ROWS), generator=generator).to(group.device)
        self.my_keys, self.largest_keys = keys[group.rank].clone(), keys.max(dim=0).values
        self.weight = torch.ones(self.HIDDEN_SIZE, dtype=torch.bfloat16, device=group.device)
        self.scale = torch.ones((), dtype=torch.bfloat16, device=group.device)
        self.bad = torch.zeros(4, dtype=torch.int64, device=group.device)

    def delay(self) -> None:
        if self.own.random() < 0.3:
            torch.cuda._sleep(self.own.choice([500, 5_000, 50_000, 200_000]))

    def next_part(self, num_rows: int, *, first: bool = False) -> Tensor:
        self.scale.copy_(self.scale % 5 + 1)
        place = self.memory.part(num_rows, first=first)
        torch.mul(self.mine[:num_rows], self.scale, out=place)
        self.delay()
        return place

    def count(self, kind: int, wrong: Tensor) -> None:
        self.bad[kind] += wrong.sum()

    def one_pass(self, num_rows: int, num_sums: int, num_keys: int, two_shot: bool) -> None:
        """A forward pass: its first sum, sums with norms, and tokens chosen."""
        memory, group, total = self.memory, self.group, self.total[:num_rows]
        memory.two_shot_rows = 1 if two_shot else NEVER
        residual = memory.sum(self.next_part(num_rows, first=True))
        expected = total * self.scale
        self.count(0, residual.float() != expected)
        for _ in range(num_sums):
            part = self.next_part(num_rows)
            expected = expected + total * self.scale
            out = memory.add_rms_norm(part, residual, self.weight, EPS)
            self.delay()
            rows = slice(group.rank, None, group.size) if two_shot else slice(None)
            self.count(1, residual[rows].float() != expected[rows])
            wanted = rms_norm(expected.to(torch.bfloat16), self.weight, EPS).float()
            self.count(2, (out.float() - wanted).abs() > 0.01 * wanted.abs() + 0.001)
        if num_keys:
            offset = self.scale.long()  # keys of another pass differ
            best = memory.max(self.my_keys[:num_keys] + offset)
            self.delay()
            self.count(3, best != self.largest_keys[:num_keys] + offset)

    def random_pass(self) -> tuple[int, int, int, bool]:
        rows = self.common.choice([1, 2, 3, 5, 17, 64, 150, 300, self.MAX_ROWS])
        return rows, self.common.randrange(1, 5), self.common.choice([0, 1, 7, 40, 300]), self.common.random() < 0.5


def drift(group: TensorParallelGroup, seed: int, num_passes: int) -> list[int]:
    """Mismatches of (opening sums, residuals, norms, keys) over eager passes and replays of graphs, mixed."""
    run = Drift(group, seed)
    graphs = []
    stream = torch.cuda.Stream()
    for _ in range(12):
        shape = run.random_pass()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run.one_pass(*shape)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(run.common.randrange(1, 4)):
                run.one_pass(*shape)
        graphs.append(graph)
    filler = torch.ones(64, 64, device=group.device)
    for _ in range(num_passes):
        kind = run.common.random()
        if kind < 0.5:
            run.common.choice(graphs).replay()
        elif kind < 0.97:
            run.one_pass(*run.random_pass())
        else:  # a pass that sums by NCCL
            dist.all_reduce(filler, group=group.process_group)
            filler.fill_(1.0)
        run.delay()
    return [int(n) for n in run.bad.tolist()]


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_drift_apart(num_ranks: int, seed: int, tmp_path: Path) -> None:
    for bad in run_ranks(num_ranks, drift, tmp_path, seed, 4000, device="cuda", seconds=280):
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
        return memory.add_rms_norm(memory.part(64).copy_(mine), residual, weight, EPS)

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
