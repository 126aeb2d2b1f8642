"""Kills the processes of a job, each in its turn, at random moments, and continues it, until it is done.

Every job is then compared with one that was never touched: the same lines, and the same file for `--order input`. After
that, rows of its input are edited, removed and added at the end, the same is done to the same command with `--update`,
and the output is compared with that of a new job on the changed input.
Now and then the end of the file is torn off or garbled between two runs, as a power loss would.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fault_job import MARK, descendants, marked_processes
from nvcli.job.compression import Unpacker, compression_of

VICTIMS = ("parent", "engine", "rank 0", "Ctrl-C")


def make_rows(rng: random.Random, count: int, tokens: int = 40) -> Iterator[dict[str, Any] | str]:
    """Rows of all kinds, greedy and sampled, good and bad, in both forms. Prompts are shorter than a block, so that
    `cached_tokens` does not depend on what ran before."""
    for number in range(count):
        prompt = f"What is {rng.randrange(1000)} + {rng.randrange(1000)}?\n"
        sampling = {"max_tokens": rng.randint(1, 2 * tokens), "ignore_eos": True}
        kind = rng.randrange(8)
        if kind == 0:
            yield rng.choice(["not json", '{"prompt": 1}', '{"id": "same", "prompt": "x", "sampling": {"top_p": 7}}'])
        elif kind == 1:
            body = {"model": "any", "messages": [{"role": "user", "content": prompt}], **sampling, "temperature": 1.0}
            yield {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        elif kind == 2:
            yield {"id": f"i{number}", "prompt": prompt, "sampling": {**sampling, "n": 2, "temperature": 1.0}}
        elif kind == 3:
            yield {"prompt": prompt, "sampling": {**sampling, "temperature": 1.5, "seed": number}, "kept": [number]}
        else:
            yield {"prompt": prompt, "sampling": sampling}


def write_rows(path: Path, rng: random.Random, count: int, tokens: int = 40) -> Path:
    rows = make_rows(rng, count, tokens)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def change_rows(path: Path, rng: random.Random, *, share: float, tokens: int = 40) -> None:
    """Mend a share of the rows of an input, and remove some at its end or add others there."""
    lines = path.read_text().splitlines(keepends=True)
    others = [row if isinstance(row, str) else json.dumps(row) for row in make_rows(rng, len(lines), tokens)]
    # Rows keep their ids, or have none, and their places: a row's random numbers follow from its index.
    changed = [other + "\n" if rng.random() < share else line for line, other in zip(lines, others, strict=True)]
    num_more = rng.randint(-len(lines) // 8, len(lines) // 8)
    added = [line.replace('"i', '"more ').replace('"c', '"more ') for line in others[: max(0, num_more)]]
    path.write_text("".join(changed[: len(lines) + min(0, num_more)]) + "".join(line + "\n" for line in added))


class KilledJob:
    """One job, `command`, which writes to `output`, and what is done to it."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        *,
        rng: random.Random,
        start_seconds: float = 4.0,
        run_seconds: float = 1.0,
        start: type[subprocess.Popen[bytes]] = subprocess.Popen,
        **popen: Any,
    ) -> None:
        """Some kills come while a run starts, within `start_seconds`; most of them within `run_seconds` after its first
        rows reached the file. `start` starts the processes."""
        self._command = list(command)
        self._output = output
        self._rng = rng
        self._start_seconds = start_seconds
        self._run_seconds = run_seconds
        self._start = start
        self._popen = popen | {"env": {**popen.get("env", os.environ), MARK: str(output)}}
        self.kills: Counter[str] = Counter()
        self.num_torn = 0

    def run(self, *, kills: int, victims: Sequence[str] = VICTIMS) -> int:
        """Run the job until it is done, and return its exit code. It is not touched any more after so many kills."""
        while self.kills.total() < kills:
            code = self._run_once(victims[self.kills.total() % len(victims)])
            if code in (0, 1):
                return code
            if self._rng.random() < 0.3:
                self._tear()
        return self._run_once(None)

    def _run_once(self, victim: str | None) -> int:
        """Start it, and have the victim end it, if it does not come to its end before."""
        size = self._size()
        with (
            tempfile.TemporaryFile() as log,
            self._start(self._command, stdout=log, stderr=log, **self._popen) as process,
        ):
            if victim is not None:
                self._wait(process, size)
            while True:  # an early victim may not have started yet
                pids = [process.pid, *descendants(process.pid)]
                names = dict(zip(("parent", "engine", "rank 0"), pids, strict=False)) | {"Ctrl-C": process.pid}
                if victim is None or victim in names or process.poll() is not None:
                    break
                time.sleep(0.005)
            is_killed = victim in names and process.poll() is None
            if is_killed:
                os.kill(names[victim], signal.SIGINT if victim == "Ctrl-C" else signal.SIGKILL)
            code = process.wait(120)
            log.seek(0)
            text = log.read().decode()
        self._wait_gone(pids)
        if code == 1 and victim == "Ctrl-C" and is_killed and "rows answered" not in text:
            code = -signal.SIGINT  # an early end, and not that of a job with failed rows
        if code not in (0, 1):
            expected = {"parent": -signal.SIGKILL, "Ctrl-C": 130}.get(victim or "", 3)
            # Ctrl-C before the command is so far that it listens ends it as it ends any Python.
            is_early = victim == "Ctrl-C" and code in (-signal.SIGINT, 1, 130)
            assert is_killed, f"ended with {code} by itself:\n{text}"
            assert code == expected or is_early, f"{victim} was killed, exit code {code}:\n{text}"
            assert "Traceback" not in text or is_early, text
            if code in (3, 130) and self._size():
                # The last is said before the output is open.
                told = ("continue with:\n", "the same command continues", "run the same command again")
                assert any(each in text for each in told), text
            self.kills[victim or ""] += 1
        return code

    def _wait(self, process: subprocess.Popen[bytes], size: int) -> None:
        """Wait for the moment of a kill: while the run starts, or after its first rows or the begin of an update."""
        rng = self._rng
        inode = self._inode()
        deadline = time.monotonic() + (rng.uniform(0, self._start_seconds) if rng.random() < 0.2 else 60)
        while process.poll() is None and self._size() <= size and self._inode() == inode:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        time.sleep(rng.uniform(0, self._run_seconds))

    def _wait_gone(self, pids: list[int]) -> None:
        deadline = time.monotonic() + 10
        while alive := marked_processes(str(self._output)) or [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"still running: {alive}"
            time.sleep(0.02)

    def _tear(self) -> None:
        """Tear or garble the end of the file, as a power loss may do to rows that were not synced."""
        size = self._size()
        if not size:
            return
        self.num_torn += 1
        os.truncate(self._output, self._rng.randrange(max(0, size - 2000), size))
        if self._rng.random() < 0.5:
            with self._output.open("ab") as file:
                file.write(self._rng.choice([bytes(500), self._rng.randbytes(300), b'{"id":1,"index":0', b"\n\n"]))

    def _inode(self) -> int | None:
        return self._output.stat().st_ino if self._output.exists() else None

    def _size(self) -> int:
        return self._output.stat().st_size if self._output.exists() else 0


def comparable(lines: bytes, *, ordered: bool) -> list[bytes]:
    """Return a job's lines without the time when it began, sorted unless their order counts."""
    kept = [re.sub(rb'"created":\d+', b"", line) for line in lines.splitlines(keepends=True)]
    return kept if ordered else sorted(kept)


def unpacked(path: Path) -> bytes:
    """Return the unpacked bytes of a file."""
    compression = compression_of(path.name)
    data = path.read_bytes()
    return b"".join(Unpacker(compression).feed(data)) if compression else data


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=100, help="so many must be survived")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=600)


def run(options: argparse.Namespace) -> int:
    """Kill and continue jobs. Raises AssertionError where one does not come out as it should."""
    rng = random.Random(options.seed)
    survived: Counter[str] = Counter()
    torn = num_updates = 0
    command = [sys.executable, "-m", "nvcli", "generate"]
    common = ["-m", "demo", "--set", "device=cpu", "--set", "job.sync_seconds=0.1", "--progress", "none"]
    common += ["--set", "max_num_seqs=32"]  # few rows at a time, so that they finish one after the other
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while survived.total() < options.kills:
            source = write_rows(folder / "in.jsonl", rng, options.rows)
            order = rng.choice(["input", "completion"])
            suffix = rng.choice(["", ".gz", ".zst"])
            whole, output = folder / "whole.jsonl", folder / f"out.jsonl{suffix}"
            settings = [*common, "--order", order, "--tp", rng.choice("112"), "--set", f"seed={rng.randrange(99)}"]
            arguments = [*command, str(source), "-o", str(output), *settings]
            ordered = order == "input"
            for flags in ([], ["--update"]):
                if flags:
                    change_rows(source, rng, share=0.3)
                untouched = [*command, str(source), "-o", str(whole), *settings, "--overwrite"]
                subprocess.run(untouched, stderr=subprocess.PIPE, check=False)
                job = KilledJob([*arguments, *flags], output, rng=rng)
                job.run(kills=options.kills - survived.total())
                assert comparable(unpacked(output), ordered=ordered) == comparable(whole.read_bytes(), ordered=ordered)
                survived += job.kills
                torn += job.num_torn
                num_updates += sum(job.kills.values()) if flags else 0
            kinds = ", ".join(f"{victim} {count}" for victim, count in survived.most_common())
            job_text = " ".join(settings)
            print(
                f"{survived.total()} kills survived ({kinds}), {num_updates} of them in updates, "
                f"{torn} torn ends; last job: {job_text}",
                flush=True,
            )
            for path in folder.iterdir():
                path.unlink()
    return 0
