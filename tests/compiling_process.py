"""Runs scripts that compile Triton kernels, in processes without Triton's interpreter, which the tests have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version

from warm_process import run_warm


def run_compiling(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[Any]:
    """Run a script with these arguments and changes of the environment. Nothing but it imports Triton, which
    transformers before 5.23 does in copies of warm processes."""
    run = subprocess.run if Version(transformers.__version__) < Version("5.23") else run_warm
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *arguments]
    own["PYTHONPATH"] = os.pathsep.join(sys.path)
    return run(command, env={**own, **environment}, capture_output=True, text=True, timeout=240)
