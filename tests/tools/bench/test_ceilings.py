"""What a device gives is measured where the steps ran."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvcli.core.config import RunConfig
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.models.config import load_model_config
from nvcli.tools.bench.ceilings import measure_ceilings
from nvcli.tools.bench.shapes import write_shape


@pytest.mark.parametrize(
    ("values", "gpus", "expected"),
    [
        ({}, (), ["cuda:0", "bfloat16"]),
        ({"tensor_parallel_size": 2}, (2, 3), ["cuda:2", "bfloat16"]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (1, 2, 4, 5), ["cuda:4", "bfloat16"]),
        ({"device": "cpu"}, (), ["cpu", "float32"]),
    ],
)
def test_the_device_whose_steps_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], gpus: tuple[int, ...], expected: list[str]
) -> None:
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.extend(command[-2:])
        return subprocess.CompletedProcess(command, 0, '{"bytes_per_second": 1.0, "flops_per_second": 2.0}', "")

    path = write_shape("qwen3-0.6b", tmp_path)
    config = resolve_engine_config(RunConfig(model="x", **{"device": "cuda"} | values), path, load_model_config(path))
    monkeypatch.setattr(subprocess, "run", run)
    assert measure_ceilings(msgspec.structs.replace(config, gpus=gpus)).flops_per_second == 2.0
    assert asked == expected
