"""The processes that make masks cannot start: the rank says why, and nothing else is printed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nvcli.demo import demo_path
from nvcli.errors import WorkerError
from nvcli.runner import mask_workers
from nvcli.runner.mask_workers import MaskWorkers

FAILING = """
import {module} as module
from nvcli.runner import mask_worker
def fail(*args, **kwargs): raise {error}
module.{name} = fail
mask_worker.main()
"""


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("os", "fork", "BlockingIOError(11, 'Resource temporarily unavailable')"),
        ("os", "ftruncate", "MemoryError('no room')"),
        ("threading", "Thread", "RuntimeError('no more threads')"),
    ],
)
def test_what_fails_at_the_start_is_said(
    module: str, name: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = tmp_path / "stderr"
    start = subprocess.Popen

    def start_failing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        code = FAILING.format(module=module, name=name, error=error)
        with printed.open("w") as stderr:
            return start([command[0], "-P", "-c", code, command[-1]], stderr=stderr, **options)

    monkeypatch.setattr(mask_workers.subprocess, "Popen", start_failing)
    workers = MaskWorkers(demo_path(), vocab_size=640, end_ids=[0], num_rows=4, num_workers=2)

    def follow() -> None:
        """Begin as a rank does. What fails once the tokens are loaded is found when masks are waited for."""
        workers.wait_ready()
        workers._check(10.0)

    with pytest.raises(WorkerError, match=error.split("(")[0]):
        follow()
    assert printed.read_text() == ""
