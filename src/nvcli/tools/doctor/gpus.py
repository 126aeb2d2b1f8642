"""Findings about GPUs: the driver, each GPU and the users of its memory, and peer access."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from nvcli.core.system.nvidia_smi import SmiGpu, SmiReport
from nvcli.core.system.versions import cuda_torch_advice
from nvcli.kernels.weight_formats import FP8_CAPABILITY
from nvcli.tools.doctor.device_probe import DeviceReport, GpuReport
from nvcli.tools.doctor.findings import Finding, format_gib, note, ok, problem, warning

_MIN_CAPABILITY = (8, 0)
_HELD_SHARE = 0.02
"""Used memory below this share of a GPU's total belongs to the driver itself."""

_DRIVER_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "check `nvidia-smi` and CUDA_VISIBLE_DEVICES; start the container with --gpus all",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the fabric manager: systemctl start nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and libcuda have different versions: reboot, or reinstall one of them",
}


def check_gpus(
    report: DeviceReport | str,
    smi: SmiReport,
    *,
    device: Literal["cpu", "cuda"],
    num_gpus: int,
    is_explicit: bool,
    chosen: Sequence[int] = (),
) -> list[Finding]:
    """Check driver and GPUs.

    `report` is the probe's, or the reason why there is none. `num_gpus` is the number that a run on cuda needs,
    and `chosen` says which, as `Layout.gpus` does. `is_explicit`: the user named the device.
    """
    if isinstance(report, str):
        level = problem if device == "cuda" else warning
        return [level("torch", f"cannot list GPUs: {report}", "make `python -c 'import torch'` work first")]
    findings = [ok("torch", _describe_torch(report))]
    if report.is_available:
        findings.append(_driver(report, smi))
    else:
        findings.append(_no_gpus(report, smi, device=device, is_explicit=is_explicit))
    if smi.failure:
        findings.append(warning("nvidia-smi", smi.failure, "check `dmesg` for messages from the driver (NVRM, Xid)"))
    if hidden := os.environ.get("CUDA_VISIBLE_DEVICES"):
        findings.append(note("visible GPUs", f"CUDA_VISIBLE_DEVICES={hidden}"))
    needed = num_gpus if device == "cuda" else 0
    findings += _mig(smi, is_needed=needed > 1)
    taken = (chosen or range(needed)) if needed else ()
    findings += [_gpu(gpu, smi, is_needed=gpu.index in taken) for gpu in report.gpus]
    if report.is_available and len(report.gpus) < needed:
        findings.append(
            problem(
                "number of GPUs",
                f"the run needs {needed}, but {len(report.gpus)} can be seen",
                "lower --tp or data_parallel_size, or check CUDA_VISIBLE_DEVICES",
            )
        )
    if report.pinned_failure:
        findings.append(
            problem("page-locked memory", report.pinned_failure, "free some RAM, or raise the container's memory limit")
        )
    if len(report.gpus) > 1:
        findings.append(_peers(report, smi, is_needed=needed > 1))
    return findings


def check_fp8(report: DeviceReport, *, chosen: Sequence[int]) -> Finding:
    """Check whether the run's GPUs can multiply in FP8. `chosen` is `Layout.gpus`; empty: all."""
    lacking = [gpu for gpu in report.gpus if gpu.capability < FP8_CAPABILITY and (not chosen or gpu.index in chosen)]
    if not lacking:
        return ok("FP8", "the GPUs have FP8 tensor cores")
    names = ", ".join(dict.fromkeys(gpu.name for gpu in lacking))
    return note("FP8", f"no FP8 tensor cores: {names}; weights are dequantised for each product")


def free_bytes(gpu: GpuReport, smi: SmiReport) -> int:
    """Return the free bytes of a GPU.

    nvidia-smi was run before our own probes took memory; without it, their memory counts as used.
    """
    known = smi.gpus.get(gpu.uuid)
    if known is None or not known.total_bytes:
        return gpu.free_bytes
    # nvidia-smi also counts memory that programs cannot allocate.
    return min(known.total_bytes - known.used_bytes, gpu.total_bytes)


def _describe_torch(report: DeviceReport) -> str:
    if report.torch_cuda is None:
        return "imports; built without CUDA"
    return f"imports; built for CUDA {report.torch_cuda}{f', NCCL {report.nccl}' if report.nccl else ''}"


def _driver(report: DeviceReport, smi: SmiReport) -> Finding:
    """Check that the driver supports torch's CUDA: its major version must be the same or later."""
    driver = next((gpu.driver for gpu in smi.gpus.values()), "")
    serves = ".".join(map(str, report.driver_cuda)) if report.driver_cuda else "?"
    return ok("driver", f"{driver} (CUDA up to {serves})".lstrip())


def _no_gpus(report: DeviceReport, smi: SmiReport, *, device: Literal["cpu", "cuda"], is_explicit: bool) -> Finding:
    """Report why torch sees no GPU, and whether that stops the run."""
    if report.driver_cuda is None and not smi.gpus:
        if device == "cuda" and not is_explicit:
            return problem(
                "driver",
                f"there are GPUs (/dev/nvidia*), but no driver library: {report.driver_failure}",
                "install the driver's libcuda.so.1; start a container with --gpus all",
            )
        if device == "cuda":
            return problem("GPUs", "none: this machine has no NVIDIA driver", "use `device: cpu`, or `device: auto`")
        return note("GPUs", "no NVIDIA GPU on this machine: runs use the CPU")
    if device == "cpu":
        why = "torch is built without CUDA" if report.torch_cuda is None else "the run is on the CPU"
        if is_explicit or report.torch_cuda is not None:
            return note("GPUs", f"not used: {why}")
        return warning("GPUs", f"not used: {why}", cuda_torch_advice(report.driver_cuda))
    if report.torch_cuda is None:
        return problem("GPUs", "torch is built without CUDA", cuda_torch_advice(report.driver_cuda))
    if report.driver_cuda and report.driver_cuda[0] < int(report.torch_cuda.partition(".")[0]):
        serves = ".".join(map(str, report.driver_cuda))
        return problem(
            "driver",
            f"supports CUDA up to {serves}, but torch is built for {report.torch_cuda}",
            f"install a newer driver, or another torch: {cuda_torch_advice(report.driver_cuda)}",
        )
    reason = report.driver_failure or "torch finds no GPU"
    advice = _DRIVER_ADVICE.get(reason, "check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and `dmesg` for Xid errors")
    return problem("driver", f"does not start: {reason}", advice)


def _mig(smi: SmiReport, *, is_needed: bool) -> list[Finding]:
    """Check for GPUs that are cut into slices (MIG): a process sees one slice, and NCCL works with none."""
    cut = [str(gpu.index) for gpu in smi.gpus.values() if gpu.mig]
    if not cut:
        return []
    found = f"on for GPU {', '.join(cut)} as nvidia-smi numbers them: a run can use one slice"
    if is_needed:
        return [warning("MIG", found, "use --tp 1, or ask the machine's owner for a whole GPU")]
    return [note("MIG", found)]


def _gpu(gpu: GpuReport, smi: SmiReport, *, is_needed: bool) -> Finding:
    """Check one GPU. A GPU that the run does not need causes no warning."""
    name = f"GPU {gpu.index}"
    capability = ".".join(map(str, gpu.capability))
    known = smi.gpus.get(gpu.uuid)
    memory = f"{format_gib(free_bytes(gpu, smi))} of {format_gib(gpu.total_bytes)} free"
    found = f"{gpu.name}, compute capability {capability}, {memory}"
    if gpu.failure:
        fail = problem if is_needed else warning
        return fail(name, f"{found}; cannot compute: {gpu.failure}", f"check `nvidia-smi -i {gpu.index}` and `dmesg`")
    if held := _held(gpu, known, smi):
        found = f"{found}; {held}"
        if is_needed:
            return warning(name, found, "end those programs, or choose other GPUs with CUDA_VISIBLE_DEVICES")
        return note(name, found)
    if gpu.capability < _MIN_CAPABILITY and is_needed:
        wanted = ".".join(map(str, _MIN_CAPABILITY))
        return warning(name, f"{found}: below {wanted}, only plain torch attention works", "use a newer GPU for speed")
    return ok(name, found)


def _held(gpu: GpuReport, known: SmiGpu | None, smi: SmiReport) -> str:
    """Describe the programs that hold memory of the GPU; empty if none does."""
    if known is None:
        return ""  # torch's figure includes our own probes
    programs = [p for p in smi.processes if p.gpu_uuid == gpu.uuid]
    if programs:
        return ", ".join(f"{p.name} (pid {p.pid}) holds {format_gib(p.used_bytes)}" for p in programs)
    if known.used_bytes > _HELD_SHARE * known.total_bytes:
        return f"{format_gib(known.used_bytes)} are held by programs that are not visible from here"
    return ""


def _peers(report: DeviceReport, smi: SmiReport, *, is_needed: bool) -> Finding:
    """Check the GPUs' access to each other's memory, and name the links."""
    indices = [gpu.index for gpu in report.gpus]
    peers = set(report.peers)
    pairs = [(a, b) for a in indices for b in indices if a < b]
    apart = [f"{a}–{b}" for a, b in pairs if (a, b) not in peers or (b, a) not in peers]
    links = _links(report, smi)
    via = f" over {links}" if links else ""
    if not apart:
        return ok("peer access", f"between all {len(indices)} GPUs{via}")
    which = "between no GPUs" if len(apart) == len(pairs) else f"not between {', '.join(apart[:8])}"
    found = f"{which}{via}; collectives go through the host's memory"
    if not is_needed:
        return note("peer access", found)
    return warning(
        "peer access", found, "prefer --dp to --tp; if NVLink or one PCIe switch joins them, check IOMMU and ACS"
    )


def _links(report: DeviceReport, smi: SmiReport) -> str:
    """Return the kinds of links without repeats, such as `NVLink (NV18)` or `PCIe (PHB)`."""
    by_torch = [smi.gpus[gpu.uuid].index for gpu in report.gpus if gpu.uuid in smi.gpus]
    kinds = {smi.links.get((min(a, b), max(a, b)), "") for a in by_torch for b in by_torch if a != b} - {""}
    return ", ".join(f"{'NVLink' if kind.startswith('NV') else 'PCIe'} ({kind})" for kind in sorted(kinds))
