"""A model that the RAM cannot hold is refused before any process is started for it, with ways to make it fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.core.config import RunConfig
from nvcli.errors import CapacityError
from nvcli.job.row_set import AnsweredRows
from nvcli.job.run import plan
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.job.run.resolve import resolve_job
from nvcli.models.config import load_model_config
from nvcli.sizing.ram import check_ram
from nvcli.tools.bench import command as bench_command
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.profile import command as profile_command
from weightless_model import write_weightless_model

PARAMETERS = 8_190_735_360
"""Weights of Qwen3-8B."""


@pytest.mark.parametrize(
    ("dtype", "device", "num_replicas", "available", "told"),
    [
        ("float32", "cpu", 1, 4 * PARAMETERS + 1, None),
        ("float32", "cpu", 1, 4 * PARAMETERS, "weights take 30.51 GiB in float32, but 30.51 GiB of RAM are free"),
        ("float32", "cpu", 2, 6 * PARAMETERS, "--dtype bfloat16, which halves it, fewer copies than --dp 2"),
        ("bfloat16", "cpu", 2, 4 * PARAMETERS + 1, "weights and processes of 2 copies take 30.64 GiB"),
        ("bfloat16", "cpu", 1, 2 * PARAMETERS, "use a smaller model, more RAM, or a GPU"),
        ("bfloat16", "cuda", 1, 1, None),
    ],
)
def test_weights_against_ram(
    tmp_path: Path, dtype: str, device: str, num_replicas: int, available: int, told: str | None
) -> None:
    model = load_model_config(write_shape("qwen3-8b", tmp_path))
    run = RunConfig(model="m", dtype=dtype, device=device)  # type: ignore[arg-type]
    config = resolve_engine_config(run, tmp_path, model)
    if told is None:
        check_ram(config, model, num_replicas=num_replicas, available=available)
        return
    with pytest.raises(CapacityError, match=told):
        check_ram(config, model, num_replicas=num_replicas, available=available)


def test_every_command_looks_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, bench_command, profile_command):
        monkeypatch.setattr(module, "available_ram", lambda: 1000)
    (tmp_path / "model").mkdir()
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    run = RunConfig(model=str(write_weightless_model(tmp_path / "model")), device="cpu")
    job = resolve_job(run, inputs=[str(tmp_path / "in.jsonl")], output=None, limit=None)
    shape = RunConfig(model="qwen3-0.6b", device="cpu")
    with pytest.raises(CapacityError, match="1000 B of RAM are free"):
        plan.plan_run(job, AnsweredRows())
    with pytest.raises(CapacityError, match="1000 B of RAM are free"):
        bench_command.run_bench(shape, bench_command.BenchOptions(shape="qwen3-0.6b", num_requests=1), say=print)
    with pytest.raises(CapacityError, match="1000 B of RAM are free"):
        profile_command.run_profile(
            shape, shape="qwen3-0.6b", input_file=None, dry_run=False, gpu_memory=None, say=print
        )
