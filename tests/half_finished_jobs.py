"""Makes tests/half_finished: jobs as they lie on the disk when the command was killed in the middle of them.

    python tests/half_finished_jobs.py

The jobs there were made by an earlier version of nvcli, which is what makes them worth continuing
(`test_half_finished_jobs.py`). They are made anew only where a version cannot continue those of earlier ones, which its
users have to be told; or beside the old ones, under another name, where the files of a job have changed.

    mixed.jsonl, table.csv        the inputs
    half/                         what lay in the folder of the outputs when `command` was killed (SIGKILL)
    whole/                        the outputs of the same command when nothing ends it
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fake_command import ENVIRON
from snapshot_rows import openai_row, question

FOLDER = Path(__file__).parent / "half_finished"
INPUTS = ("mixed.jsonl", "table.csv")
OUTPUTS = ("mixed.out.jsonl", "table.out.csv")
SETTINGS = [
    *("-m", "demo", "--temperature", "0", "--seed", "7", "--progress", "none"),
    # Nothing that depends on the machine or on time: whether an earlier row had the prefix of another one.
    *("--set", "device=cpu", "--set", "dtype=float32", "--set", "enable_prefix_caching=false"),
    *("--set", "sampling.max_tokens=40"),
]
SLOWLY = ["--set", "max_num_seqs=6", "--set", "job.sync_seconds=0.05"]
"""How fast a job runs may change when it is continued."""

PLACES = {"host": "HOST", "machine": "MACHINE", "boot": "BOOT", "pid_namespace": "PIDS"}
"""What stands in a lock file for the machine that made it; `half_finished_copy` writes this machine there."""


def command(*inputs: str) -> list[str]:
    """The command that answers these inputs into the folder `answers`."""
    return [sys.executable, "-P", "-m", "nvcli", "generate", *inputs, "-o", "answers/", *SETTINGS]


def mixed_rows() -> Iterator[dict[str, Any]]:
    """Rows of both forms, greedy and drawn at random, of which none fails and none is like another."""
    for number in range(60):
        kind, text = number % 6, f"What is {100 + 7 * number} + {number}?"
        messages = [{"role": "user", "content": text}]
        if kind == 1:
            sampling = {"temperature": 5.0, "n": 2, "max_tokens": 3}
            yield {"id": f"drawn-{number}", "prompt": text + "\n", "sampling": sampling, "kept": [number, "é"]}
        elif kind == 2:
            yield {"messages": messages, "sampling": {"stop": ["1"], "return_token_ids": True}}
        elif kind == 3:
            yield openai_row(number, "chat/completions", model="mine", messages=messages)
        elif kind == 5:
            yield openai_row(number, "completions", prompt=[text + "\n", f"Count from {number} to {number + 2}.\n"])
        else:
            yield {"prompt": text + "\n"}


def table_rows() -> Iterator[str]:
    """Records of a CSV file, of which none fails."""
    yield "id,prompt,note"
    for number in range(30):
        yield f'{500 + number},"{question(number)}\n","a ""note"", {number}"'


def write_inputs(folder: Path) -> None:
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in mixed_rows()))
    (folder / "table.csv").write_text("".join(record + "\n" for record in table_rows()))


def half_finished_copy(folder: Path) -> Path:
    """Copy the inputs and the half-finished outputs, as if the command had been killed on this machine. Return the
    folder of the outputs."""
    for name in INPUTS:
        shutil.copy(FOLDER / name, folder)
    outputs = Path(shutil.copytree(FOLDER / "half", folder / "answers"))
    values = {
        "HOST": socket.gethostname(),
        "MACHINE": Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").exists() else "",
        "BOOT": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "PIDS": str(os.stat("/proc/self/ns/pid").st_ino),
    }
    for lock in outputs.glob(".*.lock"):
        holder = json.loads(lock.read_text())
        lock.write_text(json.dumps({key: values.get(value, value) for key, value in holder.items()}))
    return outputs


def kill_in_the_middle(folder: Path, name: str, rows_file: str, num_rows: int) -> None:
    """Answer an input until `rows_file` has so many rows, and kill the command, which its processes end with."""
    path = folder / "answers" / rows_file
    with subprocess.Popen([*command(name), *SLOWLY], cwd=folder, env=ENVIRON) as process:
        while not (path.exists() and path.read_bytes().count(b"\n") >= num_rows):
            if process.poll() is not None:
                sys.exit(f"{name} was not killed in time: {process.returncode}")
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    write_inputs(FOLDER)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        kill_in_the_middle(folder, "mixed.jsonl", "mixed.out.jsonl", 25)
        kill_in_the_middle(folder, "table.csv", "table.out.csv.rows.jsonl", 12)
        shutil.move(folder / "answers", FOLDER / "half")
        for lock in (FOLDER / "half").glob(".*.lock"):
            lock.write_text(json.dumps({**json.loads(lock.read_text()), **PLACES}))
        subprocess.run(command(*INPUTS), cwd=folder, env=ENVIRON, check=True)
        (FOLDER / "whole").mkdir()
        for output in OUTPUTS:
            shutil.move(folder / "answers" / output, FOLDER / "whole" / output)


if __name__ == "__main__":
    main()
