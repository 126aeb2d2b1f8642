"""Measures the limits of a device: its memory bandwidth and its rate of matrix products.

Run as a module in its own process, so that the command itself never touches the device:

    python -m nvcli.tools.bench.ceilings DEVICE DTYPE   → {"bytes_per_second": …, "flops_per_second": …}
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.errors import WorkerError
from nvcli.tools.bench.roofline import Ceilings

_REPEATS = 10


def measure_ceilings(config: EngineConfig) -> Ceilings:
    """Measure the device whose steps are timed. Takes several seconds, mostly for imports. Raises WorkerError."""
    device = config.device if config.device == "cpu" else f"cuda:{config.gpu_index(config.output_rank)}"
    command = [sys.executable, "-P", "-m", "nvcli.tools.bench.ceilings", device, config.dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WorkerError(f"measuring the device's bandwidth and matrix rate failed: {reason}")
    return msgspec.json.decode(done.stdout, type=Ceilings)


def _measure(device: str, dtype_name: str) -> Ceilings:
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    on_gpu = device.startswith("cuda")
    # Many times larger than the caches; random, because zeros are faster than real data.
    num_bytes, size = 1 << 28, 1024
    if on_gpu:
        torch.cuda.set_device(device)
        num_bytes, size = min(8 << 30, torch.cuda.mem_get_info()[0] // 2 // 4 * 4), 8192
    values = torch.empty(num_bytes // 4, device=device)
    for part in torch.split(values, 1 << 28):
        part.normal_()
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = _gpu_seconds if on_gpu else _cpu_seconds

    def fastest(run: Callable[[], object]) -> float:
        run()  # a first run warms up
        return min(seconds(run) for _ in range(_REPEATS))

    return Ceilings(
        bytes_per_second=num_bytes / fastest(lambda: values.sum()),
        flops_per_second=2 * size**3 / fastest(lambda: left @ right),
    )


def _gpu_seconds(run: Callable[[], object]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(msgspec.json.encode(_measure(*sys.argv[1:])).decode())
