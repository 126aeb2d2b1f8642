"""Times sums over GPUs, by NCCL and through the memory that they share: `python scripts/bench_collectives.py`.

Takes all GPUs that can be seen (`--ranks N`: the first N). Each call is one of many in a CUDA graph; a time is that of
the slowest rank, in microseconds. `keys` is the choice of tokens: NCCL's all-reduce of a maximum against the exchange
of words.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmark import Case, Figures, gpu_microseconds, measure_cases
from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.peer_memory import PeerLayout, PeerMemory
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.worker.distributed.peer_memory import open_peer_memory
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CALLS = 200
NEVER = 1 << 30


def microseconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call on the slowest rank."""
    dist.barrier()
    slowest = torch.tensor(gpu_microseconds(function, CALLS, repeats=7), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def run_rank(rank: int, size: int, store_path: str, hidden_size: int, rows: list[int]) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(store_path, size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    group = TensorParallelGroup(dist.group.WORLD, device)
    layout = PeerLayout(num_ranks=size, max_rows=max(rows), hidden_size=hidden_size, dtype=torch.bfloat16)
    memory = open_peer_memory(group, layout)
    group.min(0)  # all have it
    if rank == 0:
        print(f"{size} × {torch.cuda.get_device_name()}, hidden size {hidden_size}, bf16; µs in a CUDA graph")
        print(f"two shots are taken from {memory.two_shot_rows} rows on")
    cases = [Case(f"{num_rows} rows", partial(measure, memory, num_rows, hidden_size, device)) for num_rows in rows]
    measure_cases(cases, is_shown=rank == 0)
    dist.barrier()
    dist.destroy_process_group()


def measure(memory: PeerMemory, num_rows: int, hidden_size: int, device: torch.device, number: int) -> Figures:
    weight = torch.ones(hidden_size, dtype=torch.bfloat16, device=device)
    x = torch.zeros(num_rows, hidden_size, dtype=torch.bfloat16, device=device)
    residual = torch.randn_like(x)
    keys = torch.arange(num_rows, device=device)

    def nccl_and_norm() -> None:
        dist.all_reduce(x)
        add_rms_norm(x, residual, weight, 1e-6)

    def fused(scaling: FP8Scaling | None = None) -> None:
        memory.add_rms_norm(memory.part(num_rows), residual, weight, 1e-6, scaling)

    def exchange() -> None:
        # Keys need a sum between one exchange and the next: its time is taken away again.
        fused()
        memory.max(keys)

    found = {
        "NCCL": microseconds(lambda: dist.all_reduce(x), device),
        "NCCL + norm": microseconds(nccl_and_norm, device),
    }
    for name, two_shot_rows in (("one shot", NEVER), ("two shots", 1)):
        memory.two_shot_rows = two_shot_rows
        found[name] = microseconds(fused, device)
        found[f"{name}, FP8"] = microseconds(partial(fused, "channel"), device)
    found["NCCL keys"] = microseconds(lambda: dist.all_reduce(keys, op=dist.ReduceOp.MAX), device)
    found["keys"] = microseconds(exchange, device) - found["two shots"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=run_rank, args=(rank, options.ranks, f"{folder}/store", options.hidden, options.rows)
            )
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            time.sleep(0.1)
            if any(process.exitcode for process in processes):  # the others would wait for it for ever
                for process in processes:
                    process.kill()
    sys.exit(int(any(process.exitcode for process in processes)))


if __name__ == "__main__":
    main()
