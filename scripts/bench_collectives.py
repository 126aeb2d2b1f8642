"""Times sums over GPUs, by NCCL and through the memory that they share: `python scripts/bench_collectives.py`.

Takes all GPUs that can be seen (`--ranks N`: the first N). Each call is one of 20 in a CUDA graph; a time is that of
the slowest rank. `keys` is the choice of tokens: NCCL's all-reduce of a maximum against the exchange of words.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from nvcli.distributed.peer_memory import open_peer_memory
from nvcli.distributed.tensor_parallel import TensorParallelGroup
from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.peer_memory import PeerLayout

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COLUMNS = ("NCCL", "NCCL + norm", "one shot", "two shots", "NCCL keys", "keys")
CALLS = 20
NEVER = 1 << 30


def microseconds(function: Callable[[], object], device: torch.device) -> float:
    """Of one call, the median of seven replays, on the slowest rank."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            function()
    torch.cuda.synchronize()
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(9):
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS / 10)
    slowest = torch.tensor(sorted(times[2:])[3], device=device)
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
        print("| rows |", " | ".join(f"{name:>11}" for name in COLUMNS), "|", flush=True)
    weight = torch.ones(hidden_size, dtype=torch.bfloat16, device=device)
    for num_rows in rows:
        x = torch.zeros(num_rows, hidden_size, dtype=torch.bfloat16, device=device)
        residual = torch.randn_like(x)
        keys = torch.arange(num_rows, device=device)

        def nccl(x=x):  # type: ignore[no-untyped-def]
            dist.all_reduce(x)

        def nccl_and_norm(x=x, residual=residual):  # type: ignore[no-untyped-def]
            dist.all_reduce(x)
            add_rms_norm(x, residual, weight, 1e-6)

        def fused(num_rows=num_rows, residual=residual):  # type: ignore[no-untyped-def]
            memory.add_rms_norm(memory.part(num_rows), residual, weight, 1e-6)

        def nccl_keys(keys=keys):  # type: ignore[no-untyped-def]
            dist.all_reduce(keys, op=dist.ReduceOp.MAX)

        def exchange(num_rows=num_rows, residual=residual, keys=keys):  # type: ignore[no-untyped-def]
            # Keys need a sum between one exchange and the next: its time is taken away again.
            fused(num_rows, residual)
            memory.max(keys)

        times = [microseconds(nccl, device), microseconds(nccl_and_norm, device)]
        for two_shot_rows in (NEVER, 1):
            memory.two_shot_rows = two_shot_rows
            times.append(microseconds(fused, device))
        times += [microseconds(nccl_keys, device), microseconds(exchange, device) - times[-1]]
        if rank == 0:
            print(f"| {num_rows:4d} |", " | ".join(f"{time:11.1f}" for time in times), "|", flush=True)
    dist.barrier()
    dist.destroy_process_group()


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
