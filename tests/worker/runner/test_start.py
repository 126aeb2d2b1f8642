"""A rank's start imports what it needs and no more."""

from __future__ import annotations

import os
import subprocess
import sys

_START = """
import sys
from nvcli.core.config import RunConfig
from nvcli.demo import demo_path
from nvcli.models.config import load_model_config
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner

path = demo_path()
config = resolve_engine_config(RunConfig(model="demo", device="cpu"), path, load_model_config(path))
nothing = lambda *args: 0
ModelRunner(config, RankContext(rank=0, report_phase=nothing))
print(*sorted({"sympy", "transformers", "triton"} & sys.modules.keys()))
"""


def test_a_cpu_rank_starts_without_sympy_transformers_and_triton() -> None:
    """Some operations on meta tensors import sympy, which takes up to two seconds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == []
