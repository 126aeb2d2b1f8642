"""`-o folder/`: each input is a job of its own with its output there, and the model is loaded once for all of them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from fake_command import run_nvcli
from nvcli.cli.main import _run


def answers(path: Path) -> list[tuple[int, str | None]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["index"], row["choices"][0]["text"] if row["choices"] else None) for row in rows]


def write(folder: Path, *, second: str = '{"prompt": "b0"}\n{"prompt": 5}\n') -> None:
    (folder / "a.jsonl").write_text('{"prompt": "a0"}\n{"prompt": "a1"}\n')
    (folder / "b.jsonl").write_text(second)


def test_each_input_is_a_job_of_its_own(tmp_path: Path, model_folder: Path) -> None:
    write(tmp_path)
    model = ["-m", str(model_folder), "--set", "device=cpu", "--order", "input"]
    command = ["generate", "a.jsonl", "b.jsonl", "-o", "out/", *model]
    dry = run_nvcli(*command, "--dry-run", cwd=tmp_path, fakes="")
    assert dry.returncode == 1, dry.stderr
    assert [line for line in dry.stdout.splitlines() if "→" in line] == [
        "a.jsonl → out/a.out.jsonl",
        "b.jsonl → out/b.out.jsonl",
    ]
    assert not (tmp_path / "out").exists()

    first = run_nvcli(*command, "--report", "report.json", cwd=tmp_path, fakes="")
    assert first.returncode == 1, first.stderr
    assert answers(tmp_path / "out" / "a.out.jsonl") == [(0, "0a"), (1, "1a")]
    assert answers(tmp_path / "out" / "b.out.jsonl") == [(0, "0b"), (1, None)]
    assert first.stderr.count("is ready") == 1
    assert "input 2 of 2: b.jsonl → out/b.out.jsonl" in first.stderr
    assert first.stderr.endswith("nvcli: 2 inputs → out/: 3 of 4 rows answered\n")
    for name, rows in (("a", 2), ("b", 1)):
        report = json.loads((tmp_path / f"report.{name}.out.jsonl.json").read_text())
        assert (report["whole_output"]["answered"], report["inputs"]) == (rows, [f"{name}.jsonl"])

    (tmp_path / "out" / "b.out.jsonl").write_bytes(b"")  # a run that was cut short
    # A folder that is there needs no slash.
    again = run_nvcli("generate", "*.jsonl", "-o", "out", *model, cwd=tmp_path, fakes="")
    assert again.returncode == 1, again.stderr
    assert "out/a.out.jsonl is complete: 2 of 2 rows answered" in again.stderr
    assert answers(tmp_path / "out" / "b.out.jsonl") == [(0, "0b"), (1, None)]


def test_what_is_wrong_with_a_later_input_is_found_before_the_first_is_begun(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, second='{"question": "b0"}\n')
    (tmp_path / "c.jsonl").write_text('{"text": "c0"}\n')
    command = ["generate", "?.jsonl", "-o", "out/", "-m", str(model_folder), "--set", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["nvcli", *command])
    assert _run() == 2
    told = capsys.readouterr().err
    assert "b.jsonl: its only row has no prompt" in told
    assert "c.jsonl: its only row has no prompt" in told
    assert not (tmp_path / "out").exists()


def test_a_job_that_fails_is_named_and_those_before_it_stay(tmp_path: Path, model_folder: Path) -> None:
    write(tmp_path)
    command = ["generate", "a.jsonl", "b.jsonl", "-o", "out/", "-m", str(model_folder), "--set", "device=cpu", "-q"]
    result = run_nvcli(*command, "--max-errors", "0", cwd=tmp_path, fakes="")
    assert result.returncode == 1
    assert "1 row failed, and `job.max_errors` allows 0" in result.stderr
    assert result.stderr.endswith("this was input 2 of 2, b.jsonl; the inputs before it are answered\n")
    assert len(answers(tmp_path / "out" / "a.out.jsonl")) == 2


def test_what_is_wrong_with_the_files_of_one_job_ends_no_others(tmp_path: Path, model_folder: Path) -> None:
    rows = "".join(f'{{"prompt": "{number} {number * 37}"}}\n' for number in range(2000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows)[:9_000])
    for name in "bcd":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}0"}}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "c.out.jsonl").write_text("mine\n")
    command = ["generate", "*.jsonl*", "-o", "out/", "-m", str(model_folder), "--set", "device=cpu", "-q"]
    result = run_nvcli(*command, cwd=tmp_path, fakes="")
    assert result.returncode == 2
    *_, first, second, end = result.stderr.splitlines()
    assert first.startswith("nvcli: error: a.jsonl.gz: cannot be read past line ")
    assert second.startswith("the output out/c.out.jsonl exists and cannot be continued")
    assert end == "all other inputs are done"
    assert [answers(tmp_path / "out" / f"{name}.out.jsonl") for name in "bd"] == [[(0, "0b")], [(0, "0d")]]
