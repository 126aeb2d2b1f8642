"""Times the experts of a layer on one rank of several: parts of every expert (`--tp N`), against whole experts
(`--tp N --ep`): `python scripts/bench_experts.py`, on one GPU, which takes each rank's place in turn.

A time is that of both products and the sum over a token's experts, in a CUDA graph, with random routes. Ranks with
parts all take the same. Of ranks with whole experts the mean and the slowest are shown, for which the others would
wait. The all-reduce behind them is the same for both, and is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial

import torch

from benchmark import Case, Figures, gpu_microseconds, run_benchmark
from nvcli.kernels.expert_settings import ExpertActivation, Routing
from nvcli.kernels.expert_types import ExpertWeights, Routes
from nvcli.kernels.experts import apply_experts
from nvcli.kernels.routing import route

SHAPES = {  # experts, experts per token, hidden size, intermediate size
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
SIZES = (2, 4)
ROWS = (1, 16, 64, 256, 1024, 8192)
SILU = ExpertActivation()


@cache
def random_weights(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0.0, 0.02)


def measure(name: str, size: int, rows: int, number: int) -> Figures:
    """Measure so many ranks with so many tokens."""
    num_experts, per_token, hidden, intermediate = SHAPES[name]
    gate_up = random_weights(num_experts, 2 * intermediate, hidden)
    down = random_weights(num_experts, hidden, intermediate)
    parts = ExpertWeights(
        gate_up[:, : 2 * intermediate // size].contiguous(), down[:, :, : intermediate // size].contiguous()
    )
    held = num_experts // size
    shares = [
        ExpertWeights(
            gate_up[first : first + held], down[first : first + held], first_expert=first, num_others=num_experts - held
        )
        for first in range(0, num_experts, held)
    ]
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    routing = Routing(num_experts=num_experts, experts_per_token=per_token, renormalise=True)
    routes = route(torch.randn(1, rows, num_experts, device="cuda"), routing)
    times = [rank_microseconds(x, routes, share) for share in shares]
    return {
        "parts, µs": rank_microseconds(x, routes, parts),
        "whole, µs": sum(times) / size,
        "slowest whole, µs": max(times),
    }


def rank_microseconds(x: torch.Tensor, routes: Routes, weights: ExpertWeights) -> float:
    return gpu_microseconds(lambda: apply_experts(x, routes, weights, SILU).sum(dim=0))


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in SHAPES:
        for size in SIZES:
            for rows in ROWS:
                yield Case(f"{shape}, {size} ranks, {rows} tokens", partial(measure, shape, size, rows))


if __name__ == "__main__":
    run_benchmark(__doc__, cases)
