"""Whether weights fit, by figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_gpus import GIB, gpu

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.doctor.findings import Level
from nvcli.tools.doctor.machine import check_fit


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return load_model_config(write_shape("qwen3-8b", tmp_path))


def engine_config(model: ModelConfig, device: Any, **keys: Any) -> EngineConfig:
    return resolve_engine_config(RunConfig(model="m", device=device, **keys), Path("/m"), model)


@pytest.mark.parametrize(
    ("size_gib", "tp", "held_gib", "level", "told"),
    [
        (80, 1, 0, Level.OK, "leaves about 56.7 GiB"),  # 0.9 × 80 − 15.3
        (10, 2, 0, Level.WARNING, "leaves only about 1.4 GiB"),  # 0.9 × 10 − 7.6
        (10, 1, 0, Level.PROBLEM, "6.3 GiB more than gpu_memory_utilization allows"),
        (80, 1, 60, Level.PROBLEM, "3.3 GiB more"),
    ],
)
def test_gpus(model: ModelConfig, size_gib: int, tp: int, held_gib: int, level: Level, told: str) -> None:
    """Qwen3-8B has 15.26 GiB of weights in bfloat16."""
    gpus = [gpu(n, total_bytes=size_gib * GIB, free_bytes=(size_gib - held_gib) * GIB) for n in range(2)]
    config = engine_config(model, "cuda", tensor_parallel_size=tp)
    finding = check_fit(config, model, num_replicas=1, gpus=gpus, ram=0)
    assert (finding.level, told in finding.found) == (level, True), finding
    if level != Level.OK:
        assert f"--tp {2 * tp}" in finding.advice, "the next size that 32 heads and 8 KV heads can be cut into"


def test_stages_share_the_weights(model: ModelConfig) -> None:
    """Of two, the last has the LM head beside its 18 layers, as large as the first one's embedding."""
    gpus = [gpu(n, total_bytes=24 * GIB, free_bytes=24 * GIB) for n in range(2)]
    config = engine_config(model, "cuda", pipeline_parallel_size=2)
    finding = check_fit(config, model, num_replicas=1, gpus=gpus, ram=0)
    assert finding.level == Level.OK
    assert "7.6 GiB of weights (bfloat16) on each GPU; leaves about 14.0 GiB" in finding.found


def test_ram(model: ModelConfig) -> None:
    config = engine_config(model, "cpu")
    two_replicas = 2 * 4 * 8_190_735_360  # float32
    assert check_fit(config, model, num_replicas=2, gpus=[], ram=two_replicas + 1).level == Level.OK
    assert check_fit(config, model, num_replicas=2, gpus=[], ram=two_replicas).level == Level.PROBLEM
