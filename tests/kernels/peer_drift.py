"""Passes of sums between ranks that drift apart, for tests on one GPU and on several."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from nvcli.kernels.norm import rms_norm
from nvcli.kernels.peer_memory import PeerMemory
from nvcli.kernels.weight_formats import FP8Scaling

EPS = 1e-6
NEVER = 1 << 30
"""More rows than any sum has: no two shots."""
DRIFT_ROWS = 400
"""The rows of the memory that ranks share in these tests."""


class Drift:
    """Passes of sums whose every number is known, between delays that differ from rank to rank.

    Parts are small whole numbers times a scale that the device changes before every sum, so sums are exact, and a part
    or a result of another sum than the present one shows. Mismatches are counted on the device: nothing waits for it.
    """

    def __init__(self, memory: PeerMemory, device: torch.device, seed: int) -> None:
        """`memory` has DRIFT_ROWS rows."""
        self.memory, self.rank = memory, memory.rank
        num_ranks, max_rows = memory.layout.num_ranks, memory.layout.max_rows
        self.common = random.Random(seed)
        self.own = random.Random(seed * 100 + self.rank)
        generator = torch.Generator().manual_seed(seed)
        shape = (num_ranks, max_rows, memory.layout.hidden_size)
        bases = torch.randint(-1, 2, shape, generator=generator).to(device, torch.bfloat16)
        self.mine, self.total = bases[self.rank].clone(), bases.float().sum(dim=0)
        keys = torch.randint(-(1 << 62), 1 << 62, (num_ranks, max_rows), generator=generator).to(device)
        self.my_keys, self.largest_keys = keys[self.rank].clone(), keys.max(dim=0).values
        self.weight = torch.ones(shape[-1], dtype=torch.bfloat16, device=device)
        self.scale = torch.ones((), dtype=torch.bfloat16, device=device)
        self.bad = torch.zeros(4, dtype=torch.int64, device=device)

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

    def one_pass(self, num_rows: int, num_sums: int, num_keys: int, two_shot: bool, scaling: FP8Scaling | None) -> None:
        """A forward pass: its first sum, sums with norms, and tokens chosen."""
        memory, total = self.memory, self.total[:num_rows]
        memory.two_shot_rows = 1 if two_shot else NEVER
        residual = memory.sum(self.next_part(num_rows, first=True))
        expected = total * self.scale
        self.count(0, residual.float() != expected)
        for _ in range(num_sums):
            part = self.next_part(num_rows)
            expected = expected + total * self.scale
            out = memory.add_rms_norm(part, residual, self.weight, EPS, scaling)
            self.delay()
            rows = slice(self.rank, None, memory.layout.num_ranks) if two_shot else slice(None)
            self.count(1, residual[rows].float() != expected[rows])
            wanted = rms_norm(expected.to(torch.bfloat16), self.weight, EPS).float()
            error = 0.01
            if not isinstance(out, Tensor):
                groups = out.scales.view(num_rows, -1)
                out, error = (
                    (out.codes.float().unflatten(1, (groups.shape[1], -1)) * groups[:, :, None]).flatten(1),
                    0.07,
                )
            self.count(2, (out.float() - wanted).abs() > error * wanted.abs() + error / 10)
        offset = self.scale.long()  # keys of another pass differ
        for _ in range(2 if num_keys else 0):  # a second time without a sum in between
            best = memory.max(self.my_keys[:num_keys] + offset)
            self.delay()
            self.count(3, best != self.largest_keys[:num_keys] + offset)
            offset = offset + 7

    def random_pass(self) -> tuple[int, int, int, bool, FP8Scaling | None]:
        choice = self.common.choice
        rows, num_keys = choice([1, 2, 3, 5, 17, 64, 150, 300, DRIFT_ROWS]), choice([0, 1, 7, 40, 300])
        return rows, self.common.randrange(1, 5), num_keys, choice([False, True]), choice([None, "channel", "block"])


def drift(
    memory: PeerMemory, device: torch.device, seed: int, num_passes: int, sum_by_library: Callable[[], object]
) -> list[int]:
    """Mismatches of (opening sums, residuals, norms, keys) over eager passes and replays of graphs, mixed, and now and
    then a sum over the ranks that does not go through `memory`."""
    run = Drift(memory, device, seed)
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
    for _ in range(num_passes):
        kind = run.common.random()
        if kind < 0.5:
            run.common.choice(graphs).replay()
        elif kind < 0.97:
            run.one_pass(*run.random_pass())
        else:
            sum_by_library()
        run.delay()
    return [int(n) for n in run.bad.tolist()]
