"""What is said of GPUs, from reports as machines in each state would give them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nvcli.core.system.nvidia_smi import SmiGpu, SmiProcess, SmiReport
from nvcli.tools.doctor.device_probe import DeviceReport, GpuReport, probe
from nvcli.tools.doctor.findings import Finding, Level
from nvcli.tools.doctor.gpus import check_fp8, check_gpus, free_bytes

GIB = 1 << 30
NO_SMI = SmiReport(gpus={}, processes=(), links={})


def gpu(index: int, **changes: Any) -> GpuReport:
    fields = {
        "index": index,
        "name": "NVIDIA H200",
        "uuid": f"uuid-{index}",
        "capability": (9, 0),
        "total_bytes": 140 * GIB,
        "free_bytes": 139 * GIB,
        **changes,
    }
    return GpuReport(**fields)


def device_report(*gpus: GpuReport, **changes: Any) -> DeviceReport:
    indices = [one.index for one in gpus]
    fields = {
        "driver_cuda": (13, 0),
        "driver_failure": "",
        "torch_cuda": "13.0",
        "is_available": bool(gpus),
        "nccl": "2.28.9",
        "gpus": list(gpus),
        "peers": [(a, b) for a in indices for b in indices if a != b],
        "pinned_failure": "",
        **changes,
    }
    return DeviceReport(**fields)


def smi_report(
    num_gpus: int, *, used: int = 0, mig: bool = False, processes: Any = (), link: str = "NV18"
) -> SmiReport:
    gpus = [
        SmiGpu(
            index=n,
            uuid=f"uuid-{n}",
            name="NVIDIA H200",
            driver="580.65.06",
            total_bytes=140 * GIB,
            used_bytes=used,
            mig=mig,
        )
        for n in range(num_gpus)
    ]
    links = {(a, b): link for a in range(num_gpus) for b in range(num_gpus) if a < b}
    return SmiReport(gpus={one.uuid: one for one in gpus}, processes=tuple(processes), links=links)


def check(report: DeviceReport | str, smi: SmiReport = NO_SMI, **how: Any) -> dict[str, Finding]:
    given = {"device": "cuda", "num_gpus": 1, "is_explicit": False, **how}
    return {finding.name: finding for finding in check_gpus(report, smi, **given)}


def test_a_sound_machine() -> None:
    findings = check(device_report(gpu(0), gpu(1)), smi_report(2), num_gpus=2)
    assert {finding.level for finding in findings.values()} == {Level.OK}
    assert findings["driver"].found == "580.65.06 (CUDA up to 13.0)"
    assert "140.0 GiB of 140.0 GiB free" in findings["GPU 1"].found
    assert findings["peer access"].found == "between all 2 GPUs over NVLink (NV18)"


def test_a_machine_without_gpus_is_no_problem() -> None:
    findings = check(device_report(driver_cuda=None, driver_failure="no libcuda", torch_cuda=None), device="cpu")
    assert {finding.level for finding in findings.values()} <= {Level.OK, Level.NOTE}
    assert "runs use the CPU" in findings["GPUs"].found


@pytest.mark.parametrize(
    ("report", "named"),
    [
        (device_report(driver_cuda=None, driver_failure="no libcuda"), "no NVIDIA driver"),
        (device_report(torch_cuda=None), "built without CUDA"),
        (device_report(driver_cuda=(12, 4)), "supports CUDA up to 12.4, but torch is built for 13.0"),
        (device_report(driver_failure="CUDA_ERROR_SYSTEM_NOT_READY"), "CUDA_ERROR_SYSTEM_NOT_READY"),
        (device_report(gpu(0, failure="RuntimeError: no kernel image")), "no kernel image"),
        (device_report(gpu(0), pinned_failure="out of memory"), "out of memory"),
        ("no answer within 60 s", "no answer within 60 s"),
    ],
)
def test_what_stops_a_run_on_gpus(report: DeviceReport | str, named: str) -> None:
    problems = [f for f in check(report, is_explicit=True).values() if f.level == Level.PROBLEM]
    assert [named in finding.found for finding in problems] == [True]


def test_a_fabric_manager_that_does_not_run() -> None:
    report = device_report(driver_failure="CUDA_ERROR_SYSTEM_NOT_READY")
    assert "nvidia-fabricmanager" in check(report)["driver"].advice


def test_a_torch_without_cuda_beside_gpus_is_warned_of() -> None:
    report = device_report(torch_cuda=None)
    assert check(report, device="cpu")["GPUs"].level == Level.WARNING
    assert check(report, device="cpu", is_explicit=True)["GPUs"].level == Level.NOTE


def test_too_few_gpus() -> None:
    finding = check(device_report(gpu(0), gpu(1)), num_gpus=4)["number of GPUs"]
    assert (finding.level, finding.found) == (Level.PROBLEM, "the run needs 4, but 2 can be seen")


def test_who_holds_memory_is_named() -> None:
    holder = SmiProcess(gpu_uuid="uuid-0", pid=123, name="python", used_bytes=60 * GIB)
    findings = check(device_report(gpu(0), gpu(1)), smi_report(2, used=60 * GIB, processes=[holder]))
    assert findings["GPU 0"].level == Level.WARNING
    assert "80.0 GiB of 140.0 GiB free" in findings["GPU 0"].found
    assert "python (pid 123) holds 60.0 GiB" in findings["GPU 0"].found
    assert "programs that are not visible" in findings["GPU 1"].found
    assert findings["GPU 1"].level == Level.NOTE, "the run does not need it"


def test_gpus_that_the_run_passes_over_are_not_warned_of() -> None:
    report = device_report(gpu(0), gpu(1, capability=(7, 5)))
    smi = smi_report(2, processes=[SmiProcess(gpu_uuid="uuid-0", pid=7, name="python", used_bytes=130 * GIB)])
    found = check(report, smi, chosen=(1,))
    assert (found["GPU 0"].level, found["GPU 1"].level) == (Level.NOTE, Level.WARNING)


def test_free_memory_is_that_before_our_probes() -> None:
    assert free_bytes(gpu(0), smi_report(1, used=GIB)) == 139 * GIB
    assert free_bytes(gpu(0, free_bytes=7), NO_SMI) == 7


def test_free_memory_that_the_drivers_tool_does_not_tell() -> None:
    smi = smi_report(1)
    untold = SmiReport(
        gpus={uuid: replace(one, total_bytes=0) for uuid, one in smi.gpus.items()}, processes=(), links={}
    )
    assert "139.0 GiB of 140.0 GiB free" in check(device_report(gpu(0)), untold)["GPU 0"].found


def test_peers_that_cannot_reach_each_other() -> None:
    report = device_report(gpu(0), gpu(1), peers=[(0, 1)])
    finding = check(report, smi_report(2, link="SYS"), num_gpus=2)["peer access"]
    assert finding.level == Level.WARNING
    assert "between no GPUs over PCIe (SYS)" in finding.found
    assert check(report, num_gpus=1)["peer access"].level == Level.NOTE


def test_mig() -> None:
    report = device_report(gpu(0, uuid="MIG-1"))
    assert check(report, smi_report(1, mig=True))["MIG"].level == Level.NOTE
    assert check(report, smi_report(1, mig=True), num_gpus=2)["MIG"].level == Level.WARNING


def test_an_old_gpu() -> None:
    assert check(device_report(gpu(0, capability=(7, 5))))["GPU 0"].level == Level.WARNING


def test_the_probe_runs_here() -> None:
    report = probe()
    assert report.is_available == bool(report.gpus)


def test_fp8_units() -> None:
    old = gpu(1, capability=(8, 0), name="NVIDIA A100")
    assert check_fp8(device_report(gpu(0)), chosen=()).level is Level.OK
    assert check_fp8(device_report(gpu(0), old), chosen=(0,)).level is Level.OK
    found = check_fp8(device_report(gpu(0), old), chosen=())
    assert found.level is Level.NOTE
    assert "NVIDIA A100; weights are dequantised" in found.found
