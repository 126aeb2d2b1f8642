"""Mutates checkpoints, runs the commands on them, and checks that each run ends well or says which file is at fault.

    python scripts/fuzz_checkpoints.py --cases 500 --seed 7
    python scripts/fuzz_checkpoints.py --cases 1 --seed 7 --first 132   # one case again, with all that it printed
    python scripts/fuzz_checkpoints.py --cases 500 --seed 7 --adapters

A case is a copy of the built-in model, in one file or in two with an index, mutated once to three times
(`hostile_checkpoints.py`); with `--adapters` it is sound, and a LoRA adapter in its folder is mutated. `generate`
answers a prompt and a conversation with it: the whole command, in a process that was forked from one with all imports
done, and with the engine and its rank in that process. Every `--commands`-th case is run as a user types it too, with
`generate`, `bench`, `profile-memory` and `doctor` in turn.

A run may answer, or end with exit code 2 and one error that names a file of the checkpoint or says that its weights
are too large for this machine. It must not print a traceback or call anything a bug, take longer than `--seconds`, take
`MOST_BYTES` more memory than a sound checkpoint, run code of the checkpoint, or leave any file but the job's own. CPU
and Linux only.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fuzzing import make_parser, print_counts
from hostile_checkpoints import ADAPTER, CANARY, INDEX, MUTATIONS, OF_ADAPTERS, mutate
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.core.weight_changes import WeightsChange
from nvcli.demo import demo_path
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.client import EngineClient
from nvcli.engine.core import EngineCore
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.engine.scheduler import Scheduler
from nvcli.job.run.engine_ahead import EngineAhead
from nvcli.worker.runner.interface import RankContext
from rank_executor import RankExecutor

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
"""Set before libraries are imported; runs inherit it."""
MOST_BYTES = 1 << 30
"""The memory that a run with a mutated checkpoint may take beyond that of a sound one."""
_ADDRESS_SPACE = 8 << 30
"""Address space that a run may reserve beyond its start: one that takes all memory fails before the machine does."""
_ROWS = (
    {"prompt": "What is 17 + 25?\n", "sampling": {"max_tokens": 6, "temperature": 1.0, "min_tokens": 2}},
    {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "sampling": {"max_tokens": 4}},
)
_LIMITS = ("max_num_seqs=4", "max_num_batched_tokens=256", "kv_cache_memory=16MiB", "device=cpu")
_MODULES = (
    *("nvcli.cli.main", "nvcli.job.run.generate", "nvcli.job.progress.summary"),
    *("nvcli.worker.runner.model_runner", "nvcli.attention.torch_backend"),
)
"""Modules that a run imports, most of them late."""
_MODEL, _INPUT, _OUTPUT = "checkpoint", "in.jsonl", "out.jsonl"
_ADAPTER = f"{_MODEL}/lora"
_TOO_LARGE = "the weights take "
_FORBIDDEN = ("Traceback", "bug in nvcli", "panicked at")


class EngineHere:
    """An engine with its rank in this process, in the place of an `EngineClient`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._event = os.eventfd(1)  # never cleared: there is always something to look at
        self.stats = EngineStats()

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        from nvcli.worker.runner.model_runner import ModelRunner

        config = self._config
        runner = ModelRunner(config, RankContext(rank=0, report_phase=lambda phase: None))
        limits = scheduler_limits(config, runner.ready)
        scheduler = Scheduler(limits, BlockManager(runner.ready.num_blocks))
        self._core = EngineCore(scheduler, RankExecutor(runner), max_in_flight=config.max_steps_in_flight)
        return runner.ready

    def add(self, requests: list[Request]) -> None:
        self._core.scheduler.add(requests)

    def abort(self, request_ids: Sequence[int]) -> None:
        self._core.scheduler.abort(request_ids)

    def poll(self, timeout: float) -> list[RequestOutput]:
        return self._core.step() if self._core.has_work else []

    def change_weights(self, change: WeightsChange) -> None:
        raise AssertionError("it has no weights")

    def take_changed(self) -> None:
        return None

    def take_notes(self) -> list[str]:
        return self._core.take_notes()

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        os.close(self._event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run."""

    code: int | None
    """The exit code; None: it was killed when its time was over."""
    text: str
    """Its output."""
    peak_bytes: int
    seconds: float

    def wrong(self, folder: Path, *, most_bytes: int, problems_are_code_1: bool) -> list[str]:
        """Say what is not as it should be; empty: nothing. `folder` holds the checkpoint and the job's files."""
        wrong = [f"it printed {word!r}" for word in _FORBIDDEN if word in self.text]
        errors = [line for line in self.text.splitlines() if line.startswith("nvcli: error: ")]
        if self.code is None:
            wrong.append(f"no end after {self.seconds:.0f} s")
        elif self.code not in (0, 1, 2):
            wrong.append(f"exit code {self.code}")
        elif self.code == 2 and (len(errors) != 1 or not (_MODEL in errors[0] or _TOO_LARGE in errors[0])):
            wrong.append("not one error that names a file or calls the model too large")
        elif self.code == 1 and problems_are_code_1 and _MODEL not in self.text:
            wrong.append("no finding names a file")
        if self.peak_bytes > most_bytes:
            wrong.append(f"{self.peak_bytes / 2**20:,.0f} MiB of memory")
        if (folder / _MODEL / CANARY).exists() or (folder / CANARY).exists():
            wrong.append("code of the checkpoint was run")
        own = {_MODEL, _INPUT, _OUTPUT, f"{_OUTPUT}.manifest.json", f"{_OUTPUT}.digests"}
        if strange := {path.name for path in folder.iterdir()} - own:
            wrong.append(f"files were left: {', '.join(sorted(strange))}")
        if self.code == 0 and (folder / _OUTPUT).exists() and len((folder / _OUTPUT).read_bytes().splitlines()) != 2:
            wrong.append("not an answer for each row")
        return wrong


def run_here(arguments: Sequence[str], folder: Path, seconds: float) -> Outcome:
    """Run the command in a fork of this process, which has imported everything."""
    return _await(lambda: os.fork() or _become_command(arguments, folder), folder, seconds)


def run_command(arguments: Sequence[str], folder: Path, seconds: float) -> Outcome:
    """Run the command as a user does."""

    def start() -> int:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        process = subprocess.Popen(
            [sys.executable, "-m", "nvcli", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        os.close(log)
        process.returncode = 0  # `_await` waits for it
        return process.pid

    return _await(start, folder, seconds)


def _await(start: Callable[[], int], folder: Path, seconds: float) -> Outcome:
    """Start a process that is the leader of its group, and wait for it so long; then its group is killed."""
    started = time.monotonic()
    pid = start()
    code: int | None = None
    done, status, usage = 0, 0, None
    while not done and time.monotonic() - started < seconds:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        time.sleep(0 if done else 0.005)
    if done:
        code = os.waitstatus_to_exitcode(status)
    else:
        os.killpg(pid, signal.SIGKILL)
        _, _, usage = os.wait4(pid, 0)
    assert usage is not None
    text = folder.with_suffix(".log").read_text(errors="replace")
    return Outcome(code=code, text=text, peak_bytes=usage.ru_maxrss * 1024, seconds=time.monotonic() - started)


def _become_command(arguments: Sequence[str], folder: Path) -> NoReturn:
    """Be the command `nvcli` with these arguments, in a process that was just forked."""
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(fd, number)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE,) * 2)
        sys.argv[:] = ["nvcli", *arguments]
        from nvcli.cli.main import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def prepare() -> None:
    """Import what a run needs, and put an `EngineHere` in the place of engines' processes."""
    for name in _MODULES:
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    assert all(getattr(transformers, name) for name in ("AutoTokenizer", "PreTrainedTokenizerFast"))  # imported late
    EngineClient.start = classmethod(lambda cls, config, **names: EngineHere(config))  # type: ignore[assignment]
    EngineAhead.__init__ = lambda self: setattr(self, "_process", None)  # type: ignore[method-assign]


def write_bases(folder: Path) -> list[Path]:
    """Write the checkpoints that are mutated: the built-in model in one file, and in two with an index."""
    from safetensors.torch import load_file, save_file

    whole, parts = folder / "whole", folder / "parts"
    for base in (whole, parts):
        base.mkdir()
        for file in demo_path().iterdir():
            if file.suffix in (".json", ".jinja", ".safetensors"):
                shutil.copy(file, base)
    tensors = load_file(parts / "model.safetensors")
    (parts / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, parts / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (parts / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return [whole, parts]


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of the built-in model: of some projections, a norm and two tokens."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors, prefix = {}, "base_model.model."
    for name, weight in load_file(demo_path() / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "down_proj")):
            tensors[f"{prefix}{module}.lora_A.weight"] = torch.randn(4, weight.shape[1]) * 0.01
            tensors[f"{prefix}{module}.lora_B.weight"] = torch.randn(weight.shape[0], 4) * 0.01
        elif module.endswith(".0.input_layernorm"):
            tensors[f"{prefix}{name}"] = weight.float()
        elif module == "model.embed_tokens":
            rows = f"{prefix}{module}.token_adapter.trainable_tokens_delta"
            tensors[rows] = weight[:2].float().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    values |= {"trainable_token_indices": [3, 5], "modules_to_save": ["layers.0.input_layernorm"]}
    (folder / ADAPTER).write_text(json.dumps(values))


def make_folder(place: Path, base: Path) -> Path:
    """Make the working folder of a case: a checkpoint, and rows for it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    shutil.copytree(base, place / _MODEL)
    (place / _INPUT).write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
    return place


def commands(*, with_adapter: bool = False) -> dict[str, list[str]]:
    """The arguments of each command, by its name."""
    lora = ["--lora", _ADAPTER] if with_adapter else []
    common = ["-m", _MODEL, *lora, *(word for limit in _LIMITS for word in ("--set", limit))]
    return {
        "generate": ["generate", _INPUT, "-o", _OUTPUT, "--progress", "none", "--overwrite", *common],
        "bench": ["bench", "--num-requests", "2", "--input-len", "8:16", "--output-len", "4", *common],
        "profile-memory": ["profile-memory", "--input", _INPUT, *common],
        "doctor": ["doctor", "-o", _OUTPUT, *common],
    }


def main() -> None:
    """Run the cases, print a line for each that went wrong and a summary, and exit with 1 where one did."""
    parser = make_parser(__doc__, "--cases", 100)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--commands", type=int, default=10, help="each such case is run as commands too; 0: none")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a run may take")
    parser.add_argument("--adapters", action="store_true", help="mutate an adapter of a sound checkpoint")
    options = parser.parse_args()
    os.environ |= _ENVIRONMENT
    prepare()
    started = time.monotonic()
    ends: Counter[str] = Counter()
    slowest, largest, num_wrong = 0.0, 0, 0
    arguments = commands(with_adapter=options.adapters)
    mutated, mutations_of = (_ADAPTER, OF_ADAPTERS) if options.adapters else (_MODEL, MUTATIONS)
    with tempfile.TemporaryDirectory() as name:
        bases = write_bases(Path(name))
        for base in bases if options.adapters else ():
            write_adapter(base / Path(_ADAPTER).name)
        place = Path(name) / "case"
        sound = run_here(arguments["generate"], make_folder(place, bases[0]), options.seconds)
        assert sound.code == 0, sound.text
        for number in range(options.first, options.first + options.cases):
            rng = random.Random(f"{options.seed} {number}")
            make_folder(place, rng.choice(bases))
            mutations = "; ".join(mutate(place / mutated, rng, mutations_of))
            runs = [("generate here", run_here(arguments["generate"], place, options.seconds))]
            if options.commands and number % options.commands == 0:
                command = [*arguments][number // options.commands % len(arguments)]
                runs.append((command, run_command(arguments[command], place, options.seconds)))
            for what, outcome in runs:
                ends[f"{what}: {'killed' if outcome.code is None else f'exit code {outcome.code}'}"] += 1
                slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.peak_bytes)
                wrong = outcome.wrong(
                    place, most_bytes=sound.peak_bytes + MOST_BYTES, problems_are_code_1=what == "doctor"
                )
                num_wrong += bool(wrong)
                if wrong or options.cases == 1:
                    verdict = "; ".join(wrong) or "as it should be"
                    print(f"case {number} ({mutations}), {what}: {verdict}\n{outcome.text}", flush=True)
    print_counts(ends, started)
    print(
        f"{options.cases} checkpoints in {time.monotonic() - started:.0f} s, {num_wrong} runs wrong; the slowest took "
        f"{slowest:.1f} s, the largest {largest / 2**20:,.0f} MiB (a sound one {sound.peak_bytes / 2**20:,.0f} MiB)"
    )
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
