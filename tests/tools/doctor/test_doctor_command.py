"""`nvcli doctor` as a user runs it: exit codes, JSON, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fake_command import ENVIRON, NvcliHere
from nvcli.demo import demo_path
from warm_process import run_warm


def doctor(*arguments: str, cwd: Path, run: Any = run_warm, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "nvcli", "doctor", *arguments]
    return run(command, cwd=cwd, env={**ENVIRON, **environ}, capture_output=True, text=True, timeout=200)


def findings(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert "Traceback" not in result.stderr, result.stderr
    return {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_a_sound_model_on_two_processes(tmp_path: Path) -> None:
    result = doctor("--device", "cpu", "--model", "demo", "--tp", "2", "--json", cwd=tmp_path)
    found = findings(result)
    assert result.returncode == 0, result.stdout
    assert {finding["level"] for finding in found.values()} <= {"ok", "note", "warning"}
    for name in ("Python", "torch", "RAM", "output", "choice", "weights", "tokenizer", "tensors", "memory"):
        assert found[name]["level"] == "ok", found[name]
    assert "gloo over 2 ranks: sums are right" in found["all-reduce"]["found"]
    assert found["output"]["found"].startswith(str(tmp_path))


def test_problems_end_with_code_1(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_path(), tmp_path / "model")
    os.truncate(folder / "model.safetensors", 1000)
    (folder / "tokenizer.json").unlink()
    (tmp_path / "nvcli.yaml").write_text("model: model\ndevice: cpu\nmax_model_len: 1000000\n")
    result = doctor("-o", "none/out.jsonl", cwd=tmp_path)
    assert result.returncode == 1, result.stdout
    assert result.stdout.count("  problem  ") == 4, result.stdout
    for part in ("mkdir -p", "truncated", "no tokenizer", "`max_model_len` is 1000000"):
        assert part in result.stdout
    assert result.stdout.endswith("4 problems, 0 warnings: a run would stop\n"), result.stdout


def test_sampling_defaults_that_a_run_would_refuse(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_path(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0], "top_p": 1.5}')
    found = findings(doctor("--device", "cpu", "--model", str(folder), "--json", cwd=tmp_path))
    assert found["configuration"]["level"] == "problem"
    assert "generation_config: none" in found["configuration"]["found"]


def test_gpus_that_are_not_there(tmp_path: Path) -> None:
    result = doctor("--device", "cuda", "--json", cwd=tmp_path, run=subprocess.run, CUDA_VISIBLE_DEVICES="-1")
    assert result.returncode == 1, result.stdout
    assert findings(result)["all-reduce"]["level"] == "note"


def test_checks_that_hang_end(tmp_path: Path) -> None:
    """A torch that never ends importing stands for a hanging driver."""
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    (hanging / "torch.py").write_text("import time\ntime.sleep(1000)\n")
    path = os.pathsep.join([str(hanging), ENVIRON["PYTHONPATH"]])
    start = time.monotonic()
    result = doctor("--device", "cpu", "--timeout", "1", "--json", cwd=tmp_path, run=subprocess.run, PYTHONPATH=path)
    assert time.monotonic() - start < 30
    assert result.returncode == 1, result.stdout
    assert "no answer within 1 s" in findings(result)["attention"]["found"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--tp", "0"], "--tp 0"), (["-c", "none.yaml"], "none.yaml"), (["--set", "nonsense=1"], "nonsense")],
)
def test_mistakes_end_with_code_2(tmp_path: Path, arguments: list[str], named: str, nvcli_here: NvcliHere) -> None:
    result = nvcli_here("doctor", *arguments, cwd=tmp_path)
    assert (result.returncode, named in result.stderr) == (2, True)


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "nvcli", "doctor", "--device", "cpu", "--tp", "2"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("Folders"):
            break
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in stderr


@pytest.mark.gpu
def test_on_gpus(tmp_path: Path) -> None:
    import torch

    count = min(2, torch.cuda.device_count())  # the demo's heads divide by 2
    result = doctor("--model", "demo", "--tp", str(count), "--json", cwd=tmp_path)
    found = findings(result)
    about_gpus = [f for f in found.values() if f["section"] not in ("Software", "Machine", "Folders")]
    assert [f for f in about_gpus if f["level"] == "problem"] == []
    assert result.returncode == any(f["level"] == "problem" for f in found.values())
    assert found["GPU 0"]["level"] in ("ok", "warning")
    assert found["choice"]["found"].startswith("auto is triton")
    assert found["memory"]["level"] == "ok"
    if count > 1:
        assert f"NCCL over {count} ranks: sums are right" in found["all-reduce"]["found"]
        assert "peer access" in found


@pytest.mark.gpu
def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    result = doctor("--tp", "64", "--json", cwd=tmp_path)
    assert result.returncode == 1
    assert findings(result)["number of GPUs"]["level"] == "problem"
