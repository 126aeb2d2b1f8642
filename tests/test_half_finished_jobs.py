"""Jobs that an earlier version of nvcli has left half finished are continued.

They lie in tests/half_finished, and `half_finished_jobs` says how they were made and when they are made anew.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from fake_command import ENVIRON, nvcli_command
from fault_kills import comparable
from half_finished_jobs import FOLDER, INPUTS, OUTPUTS, command, half_finished_copy
from warm_process import run_warm

MUST = "this version does not continue jobs of earlier ones; users count on that (tests/half_finished_jobs.py)"
BESIDE = (".digests", ".manifest.json")


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_the_same_command_continues_them(tmp_path: Path) -> None:
    answers = half_finished_copy(tmp_path)
    done = run_warm(command(*INPUTS), cwd=tmp_path, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0, f"{MUST}:\n{done.stderr}"
    answered = lines_of(FOLDER / "half" / "mixed.out.jsonl")
    in_table = lines_of(FOLDER / "half" / "table.out.csv.rows.jsonl")
    for num_answered, num_rows in ((len(answered), 60), (len(in_table), 30)):
        assert f"{num_answered} rows are answered already" in done.stderr
        assert f"{num_rows} of {num_rows} rows answered" in done.stderr
    # What is there stays, byte for byte, and the others come behind it, with the time when the job began.
    lines = lines_of(answers / "mixed.out.jsonl")
    assert lines[: len(answered)] == answered
    assert created_in(lines) == created_in(answered) == {manifest_of(FOLDER / "half", "mixed.out.jsonl")["created"]}
    # All answers are those of a job that nothing has ended.
    assert comparable(b"".join(lines), ordered=False) == comparable(whole("mixed.out.jsonl"), ordered=False)
    header, *records = lines_of(answers / "table.out.csv")
    whole_header, *whole_records = whole("table.out.csv").splitlines(keepends=True)
    assert header == whole_header
    assert sorted(records) == sorted(whole_records)
    # Nothing is left behind, and the job is finished.
    assert sorted(os.listdir(answers)) == sorted(output + end for output in OUTPUTS for end in ("", *BESIDE))
    for output, num_rows in zip(OUTPUTS, (60, 30), strict=True):
        before, after = manifest_of(FOLDER / "half", output), manifest_of(answers, output)
        assert after["finished"]["rows"] == num_rows
        assert after["facts"] == before["facts"]
        assert (answers / f"{output}.digests").read_bytes() == (FOLDER / "half" / f"{output}.digests").read_bytes()


def test_they_are_brought_up_to_a_changed_input(tmp_path: Path) -> None:
    """The digests of rows tell those that have not changed. Engines are fakes."""
    answers = half_finished_copy(tmp_path)
    first, *others = lines_of(answers / "mixed.out.jsonl")
    source = tmp_path / "mixed.jsonl"
    rows = lines_of(source)
    edited = json.loads(first)["index"]
    rows[edited] = rows[edited].replace(b"What is", b"Say what is")
    source.write_bytes(b"".join(rows))
    arguments = command("mixed.jsonl")
    arguments = [*arguments[arguments.index("generate") :], "--update"]
    fake = nvcli_command(*arguments, cwd=tmp_path, fakes="")
    # In new interpreters: copies of the command would render chat templates with its fakes.
    done = subprocess.run(fake, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{MUST}:\n{done.stderr}"
    assert "the input has changed: 1 row edited\n" in done.stderr
    lines = lines_of(answers / "mixed.out.jsonl")
    assert lines[: len(others)] == others
    assert first not in lines
    assert manifest_of(answers, "mixed.out.jsonl")["finished"]["rows"] == 60


def manifest_of(folder: Path, output: str) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / f"{output}.manifest.json").read_text())
    return manifest


def created_in(lines: list[bytes]) -> set[int]:
    """Return the times that rows of the OpenAI form say the job began at."""
    bodies = [row["response"]["body"] for row in map(json.loads, lines) if "response" in row]
    return {body["created"] for body in bodies}


def whole(output: str) -> bytes:
    return (FOLDER / "whole" / output).read_bytes()
