"""Runs scripts that compile Triton kernels, in processes without Triton's interpreter, which the tests have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from warm_process import run_warm


def run_compiling(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[Any]:
    """Run a script with these arguments and changes of the environment. Nothing but it imports Triton."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *arguments]
    return run_warm(command, env={**own, **environment}, capture_output=True, text=True, timeout=240)
