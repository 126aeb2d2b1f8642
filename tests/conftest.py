"""What holds for every test: few threads, no network, nothing left behind; and a model without weights, made once."""

from __future__ import annotations

import contextlib
import difflib
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from combinations import left_out_of
from nvcli.job.text.tokenizer import Tokenizer
from shared_memory import left_in_shared_memory, shared_memory
from warm_process import engines_are_copies, warm_children
from weightless_model import write_weightless_model

if TYPE_CHECKING:
    from fake_command import NvcliHere  # which keeps the environment as it finds it

# A slow machine is no failure; on CI the examples are the same every time, so that a red run can be repeated.
settings.register_profile("nvcli", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.register_profile("all", settings.get_profile("nvcli"), max_examples=200)
settings.load_profile("nvcli")

# Where it is set, as in many images, each process and each run would compile all that it imports anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before torch is imported anywhere. Ranks inherit it; two of them on two cores must not fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before Triton is imported anywhere. Where there is no GPU, nothing but the tests of kernels uses it: interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# As ranks have it; Triton 3.9 warns where nobody says so.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# A shell that starts the tests in its background ignores some for them, nohup another; children would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
gc.disable()  # until all tests are collected: what is imported stays


def children() -> list[str]:
    """The commands of nvcli's processes that this one has started and that have not ended."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    # Python's own tracker and its server that forks end with this process.
    pythons = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
    nvclis = [command for command in found if "nvcli" in command and not any(own in command for own in pythons)]
    return nvclis + warm_children()


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """No process and no entry in /dev/shm outlives the tests for more than some seconds."""
    before = shared_memory()
    yield
    gc.collect()  # a runner of this process ends the processes that make its masks when it is forgotten
    deadline = time.monotonic() + 10.0
    time.sleep(0.1)
    while children() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children() == []
    assert not left_in_shared_memory(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weightless_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of transformers is not what these tests are about
        return Tokenizer.load(model_folder)


@pytest.fixture(scope="module")
def warm_engines() -> Iterator[None]:
    """Engines that a module's tests start, and their ranks, are copies of a process that has imported torch."""
    with engines_are_copies():
        yield


@pytest.fixture
def nvcli_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> NvcliHere:
    """Runs the command in this process, which takes less time than a process of its own."""
    from nvcli.cli import main

    def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        if cwd is not None:
            monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["nvcli", *map(str, arguments)])
        capfd.readouterr()
        code = main._run()
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="write tests/snapshots anew, for changes meant")
    parser.addoption("--all", action="store_true", help="run the cases too that are left out without a GPU")


@pytest.fixture(scope="session")
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, Iterable[str]], None]:
    """Compares lines with those of a file in tests/snapshots, or writes them there with `--update-snapshots`."""

    def compare(name: str, lines: Iterable[str]) -> None:
        path = Path(__file__).parent / "snapshots" / name
        found = [f"{line}\n" for line in lines]
        if request.config.getoption("--update-snapshots"):
            path.write_text("".join(found), encoding="utf-8")
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True)
        difference = "".join(difflib.unified_diff(kept, found, str(path), "the program", n=1))
        if difference:
            advice = "if that is meant, run the test again with --update-snapshots and commit the file"
            pytest.fail(f"{difference}\n{advice}", pytrace=False)

    return compare


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        settings.load_profile("all")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # tests make many small objects and few circles of them
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none, and leave out there what `full`, `each` and `pairwise` say."""
    if not any({"gpu", "full", "each", "pairwise"} & item.keywords.keys() for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
    if not config.getoption("--all"):
        left_out = {item for item in items if "full" in item.keywords}
        for size, mark in ((1, "each"), (2, "pairwise")):
            left_out |= left_out_of((item for item in items if mark in item.keywords), size)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
