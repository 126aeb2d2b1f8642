"""The command as a user runs it, for tests that look at it from outside; with fake engines where none is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nvcli
from warm_process import run_warm

SOURCES = Path(nvcli.__file__).parent.parent
PATHS = [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
"""Without an empty one, which stands for the current folder."""
NvcliHere = Callable[..., subprocess.CompletedProcess[str]]
"""The fixture `nvcli_here`: arguments and `cwd` to the end of the command."""
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}

WITH_FAKES = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the command's own entry does
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from tokenizers import Tokenizer as Backend
from nvcli.cli import main as cli
from nvcli.engine.client import EngineClient
from nvcli.job.run.engine_ahead import EngineAhead
from nvcli.job.text.tokenizer import Tokenizer

class Loaded:  # spares each test the import of transformers
    chat_template = eos_token_id = None
    def __init__(self, path):
        self.backend_tokenizer = Backend.from_file(str(path / "tokenizer.json"))

Tokenizer.load = classmethod(lambda cls, path, **options: cls(Loaded(path)))
EngineClient.start = classmethod(lambda cls, config, **options: FakeEngine(config, {options}))
EngineAhead.__init__ = lambda self: setattr(self, "_process", None)
cli.main()
"""


WITH_RUNNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path.insert(0, {tests!r})
from nvcli.cli import main as cli
from nvcli.engine.client import EngineClient

start = EngineClient.start
runner = "fake_runners:{runner}"
EngineClient.start = classmethod(lambda cls, config, **options: start(config, runner=runner, **options))
cli.main()
"""


def nvcli_with_runner(runner: str, *arguments: str, cwd: Path) -> list[str]:
    """The real command and its processes, with one of `fake_runners` in place of the model."""
    script = cwd / "with_runner.py"
    script.write_text(WITH_RUNNER.format(tests=str(Path(__file__).parent), runner=runner))
    return [sys.executable, str(script), *arguments]


def nvcli_command(*arguments: str, cwd: Path, fakes: str | None = None) -> list[str]:
    """The real command, or the same with fake engines (`fakes`: their options)."""
    if fakes is None:
        return [sys.executable, "-m", "nvcli", *arguments]
    script = cwd / "with_fakes.py"
    script.write_text(WITH_FAKES.format(tests=str(Path(__file__).parent), options=fakes))
    return [sys.executable, str(script), *arguments]


def run_nvcli(
    *arguments: object, cwd: Path, fakes: str | None = None, stdin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, warm; see `nvcli_command`."""
    return run_warm(
        nvcli_command(*map(str, arguments), cwd=cwd, fakes=fakes),
        cwd=cwd,
        env={**ENVIRON, **environ},
        input=stdin,
        capture_output=True,
        text=True,
    )
