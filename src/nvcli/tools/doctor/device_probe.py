"""Probe: reports the GPUs as torch and the driver see them. It runs as `nvcli.tools.doctor.device_probe:main`."""

from __future__ import annotations

import ctypes
from multiprocessing.connection import Connection

import msgspec

from nvcli.core.system.versions import driver_cuda
from nvcli.errors import first_line


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as torch numbers it."""

    index: int
    name: str
    uuid: str
    """The uuid as nvidia-smi spells it, without `GPU-`; empty if torch does not report it."""
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    failure: str = ""
    """Why a first computation failed; empty if it worked."""


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of the probe."""

    driver_cuda: tuple[int, int] | None
    """The newest CUDA version that the driver supports; None: no driver."""
    driver_failure: str
    """Why the driver could not be initialised; empty if it could."""
    torch_cuda: str | None
    is_available: bool
    nccl: str
    gpus: list[GpuReport]
    peers: list[tuple[int, int]]
    """Ordered pairs of GPUs of which the first can read the second's memory."""
    pinned_failure: str
    """Why page-locked memory could not be allocated; empty if it could."""


def main(_: None, control: Connection) -> None:
    control.send(probe())


def probe() -> DeviceReport:
    """Examine the driver and the GPUs. Imports torch."""
    driver_cuda, driver_failure = _ask_driver()
    import torch

    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    gpus = [_probe_gpu(index) for index in range(count)]
    usable = [gpu.index for gpu in gpus if not gpu.failure]
    return DeviceReport(
        driver_cuda=driver_cuda,
        driver_failure=driver_failure,
        torch_cuda=torch.version.cuda,
        is_available=available,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if available else "",  # type: ignore[no-untyped-call]
        gpus=gpus,
        peers=[(a, b) for a in usable for b in usable if a != b and torch.cuda.can_device_access_peer(a, b)],
        pinned_failure=_pin_memory() if usable else "",
    )


def _ask_driver() -> tuple[tuple[int, int] | None, str]:
    """Return the CUDA version that the driver supports, and why it cannot be initialised."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return None, str(error)
    code = driver.cuInit(0)
    name = ctypes.c_char_p()
    if code:
        driver.cuGetErrorName(code, ctypes.byref(name))
    failure = (name.value or f"error {code}".encode()).decode() if code else ""
    return driver_cuda(), failure


def _probe_gpu(index: int) -> GpuReport:
    import torch

    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    failure, free, total = "", 0, properties.total_memory
    try:
        free, total = torch.cuda.mem_get_info(device)
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        result = float((ones @ ones).sum().item())
        if result != 64.0**3:
            failure = f"a matrix product of ones gave {result:g} and not {64.0**3:g}"
    except Exception as error:  # torch raises many classes of errors for a device
        failure = first_line(error)
    return GpuReport(
        index=index,
        name=properties.name,
        uuid=str(getattr(properties, "uuid", "")).removeprefix("GPU-"),
        capability=(properties.major, properties.minor),
        total_bytes=total,
        free_bytes=free,
        failure=failure,
    )


def _pin_memory() -> str:
    import torch

    try:
        torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return (str(error).splitlines() or [""])[0]
    return ""
