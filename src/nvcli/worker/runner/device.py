"""The device that a rank works on, and its kernels, which are imported while weights are read."""

from __future__ import annotations

import math
import os
import threading

import torch

from nvcli.core.config_types import FP8Accumulation
from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.control_group import container_cores
from nvcli.core.system.versions import cuda_torch_advice, driver_cuda
from nvcli.errors import ConfigError
from nvcli.kernels.triton.launch.compile_processes import import_kernels, import_triton
from nvcli.kernels.weight_formats import FP8_CAPABILITY
from nvcli.models.config import ModelConfig


def open_device(config: EngineConfig, rank: int) -> torch.device:
    """Open the rank's own GPU, or give it its share of the CPU's cores. Raises ConfigError if there is no such GPU."""
    if config.device == "cuda":
        return _open_gpu(config.gpu_index(rank))
    if "OMP_NUM_THREADS" not in os.environ:
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // config.num_ranks))
    return torch.device("cpu")


def own_cores(device: torch.device) -> int:
    """Count the cores, 0 or more, that a rank may use for work besides its own; other GPUs may have their own ranks."""
    num_shares = torch.cuda.device_count() if device.type == "cuda" else 1
    return int(min(float(len(os.sched_getaffinity(0))), container_cores() or math.inf) / max(1, num_shares))


def wait_for_gpu() -> None:
    """Wait for everything launched on the current GPU, if there is one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _open_gpu(index: int) -> torch.device:
    if not torch.cuda.is_available():
        built, driver = torch.version.cuda, driver_cuda()
        build = "was built without CUDA" if built is None else f"(CUDA {built}) finds no GPU"
        is_unfit = built is None or (driver is not None and driver[0] < int(built.partition(".")[0]))
        way_out = cuda_torch_advice(driver) if is_unfit else "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        raise ConfigError(f"`device` is cuda, but torch {torch.__version__} {build}: {way_out}; or use `device: cpu`")
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"the run needs at least {index + 1} GPUs, but sees {count}: lower tensor_parallel_size (--tp) or "
            "data_parallel_size (--dp), or check CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def has_fp8_units(device: torch.device, accumulation: FP8Accumulation = "exact") -> bool:
    """Whether a device multiplies in FP8; a CPU emulates it. Raises ConfigError if `fp8_accumulation` asks for sums in
    FP8 units that the GPU does not have."""
    has_units = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    if accumulation == "fast" and not has_units:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"`fp8_accumulation: fast` needs FP8 tensor cores, which this GPU ({name}) does not have: leave it out"
        )
    return has_units


def kept_weights_note(model: ModelConfig, dtype: str, *, has_units: bool) -> str | None:
    """Describe how the weights of linear layers are kept, if the checkpoint or the run has them in FP8; else None."""
    is_stored = model.quantisation is not None and (model.quantisation.numbers == "fp8" or model.has_fp8_beside)
    if model.quantization == "fp8":
        whose = "the checkpoint's weights of linear layers stay" if is_stored else "weights of linear layers are kept"
        units = "" if has_units else f", converted to {dtype} for each product: this GPU has no FP8 tensor cores"
        return f"{whose} in FP8{units} (quantization: none keeps them in {dtype})"
    if not is_stored or model.quantization != "none":
        return None
    return f"the checkpoint's FP8 weights are converted to {dtype} (quantization: fp8 keeps them)"


def import_on_thread() -> threading.Thread | None:
    """Import Triton and the modules that declare kernels on a thread, while weights are read. Returns the thread, or
    None without Triton."""

    if not import_triton():
        return None
    thread = threading.Thread(target=import_kernels, name="import-kernels", daemon=True)
    thread.start()
    return thread
