"""nvidia-smi's output, as two machines gave it, and its failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.core.system.nvidia_smi import (
    SmiProcess,
    SmiReport,
    ask_nvidia_smi,
    parse_gpus,
    parse_links,
    parse_processes,
    visible_gpus,
)

GPUS = """\
0, GPU-aaaa, NVIDIA H200, 580.65.06, 143771, 4, Disabled
1, GPU-bbbb, NVIDIA H200, 580.65.06, 143771, 2055, Enabled, 9.0
this line is of another version
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def write_nvidia_smi(folder: Path, script: str) -> None:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_gpus() -> None:
    first, second = parse_gpus(GPUS).values()
    assert (first.index, first.uuid, first.name, first.driver) == (0, "aaaa", "NVIDIA H200", "580.65.06")
    assert (first.total_bytes, first.used_bytes, first.mig) == (143771 << 20, 4 << 20, False)
    assert second.mig
    assert (first.capability, second.capability) == (None, (9, 0))


def test_processes() -> None:
    text = "GPU-aaaa, 123, /usr/bin/python, with a comma, 2051\nGPU-bbbb, 7, [Not Found], [N/A]\n"
    assert parse_processes(text) == (
        SmiProcess(gpu_uuid="aaaa", pid=123, name="/usr/bin/python, with a comma", used_bytes=2051 << 20),
        SmiProcess(gpu_uuid="bbbb", pid=7, name="[Not Found]", used_bytes=0),
    )
    assert parse_processes("") == ()


def test_links() -> None:
    assert parse_links(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert parse_links("Failed to initialize NVML") == {}


def test_a_machine_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = ask_nvidia_smi()
    assert (report.gpus, report.failure) == ({}, "")


def test_a_broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "version mismatch" in ask_nvidia_smi().failure


def test_an_nvidia_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, "exec sleep 1000")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("nvcli.core.system.nvidia_smi._SECONDS", 0.2)
    assert "no answer within 0.2 s" in ask_nvidia_smi().failure


FOUR = "".join(f"{n}, GPU-{uuid}, NVIDIA H200, 580, 143771, 4, Disabled\n" for n, uuid in enumerate("abcd"))


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-d,1"}, [3, 1]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,9"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": ""}, "lists no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1-2"}, "slices"),
    ],
)
def test_the_gpus_that_cuda_sees(environ: dict[str, str], seen: list[int] | str) -> None:
    found = visible_gpus(SmiReport(gpus=parse_gpus(FOUR), processes=(), links={}), environ)
    if isinstance(seen, str):
        assert isinstance(found, str)
        assert seen in found
    else:
        assert not isinstance(found, str)
        assert [gpu.index for gpu in found] == seen


def test_gpus_whose_numbers_cannot_be_told() -> None:
    def found(text: str, **environ: str) -> object:
        return visible_gpus(SmiReport(gpus=parse_gpus(text), processes=(), links={}), environ)

    assert "slices" in str(found(GPUS))
    mixed = FOUR + "4, GPU-e, NVIDIA A100, 580, 81920, 4, Disabled\n"
    assert "CUDA_DEVICE_ORDER" in str(found(mixed))
    assert len(found(mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID")) == 5  # type: ignore[arg-type]
    assert found("") == "nvidia-smi lists no GPU"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ("[N/A], [N/A], [N/A]", "how much memory"),
        ("143771, [Insufficient Permissions], Enabled", "slices"),
        ("[Unknown Error], [Unknown Error], [Unknown Error]", "how much memory"),
    ],
)
def test_a_gpu_whose_memory_is_not_told_still_has_its_number(fields: str, named: str) -> None:
    gpus = parse_gpus(f"0, GPU-z, NVIDIA H200, 580, {fields}\n1, GPU-y, NVIDIA H200, 580, 143771, 4, Disabled\n")
    report = SmiReport(gpus=gpus, processes=(), links={})
    assert named in str(visible_gpus(report, {}))
    assert visible_gpus(report, {"CUDA_VISIBLE_DEVICES": "1"}) == [gpus["y"]]
