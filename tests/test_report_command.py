"""`--report`, `-q` and `-v` of the command: runs that are cut short, continued, and have nothing to do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fake_command import ENVIRON, nvcli_command
from warm_process import run_warm
from weightless_model import write_weightless_model

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model that answers backwards, and 60 rows: two are bad, one is answered with a script."""
    (tmp_path / "model").mkdir()
    write_weightless_model(tmp_path / "model")
    rows = [SCRIPT, json.dumps({"prompt": 5, "id": SCRIPT}), json.dumps({"prompt": SCRIPT[::-1]})]
    rows += [json.dumps({"prompt": f"p{number}", "id": f"r{number}"}) for number in range(57)]
    (tmp_path / "in.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (tmp_path / "nvcli.yaml").write_text("model: model\ndevice: cpu\nmax_num_seqs: 2\nsampling: {top_k: 7}\n")
    return tmp_path


def run(folder: Path, *arguments: str, fakes: str = "") -> subprocess.CompletedProcess[str]:
    command = nvcli_command("generate", "in.jsonl", *arguments, cwd=folder, fakes=fakes)
    done = run_warm(command, cwd=folder, env=ENVIRON, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return report


def num_lines(folder: Path) -> int:
    return (folder / "in.out.jsonl").read_bytes().count(b"\n")


def test_a_report_tells_this_run_from_the_whole_output(folder: Path) -> None:
    arguments = ("--report", "r.json", "--temperature", "0")
    assert run(folder, *arguments, fakes="on_poll=lambda: os.kill(os.getpid(), 2)").returncode == 130
    first, num_first = report_of(folder), num_lines(folder)
    assert (first["state"], first["message"], first["was_complete"]) == ("interrupted", None, False)
    assert 0 < num_first < 60
    assert first["rows"] == {"done": num_first, "failed": 2, "deduplicated": 0, "resumed": 0}
    assert first["whole_output"]["num_bytes"] == (folder / "in.out.jsonl").stat().st_size
    assert first["whole_output"]["rows"] == num_first

    assert run(folder, *arguments, fakes="dies_after_polls=2").returncode == 3
    second, num_second = report_of(folder), num_lines(folder)
    assert (second["state"], second["message"]) == ("failed", "rank 0 (pid 1) was killed by signal 9")
    assert second["rows"]["resumed"] == num_first
    assert second["rows"]["done"] == num_second - num_first > 0
    assert second["whole_output"]["errors"] == {"invalid_json": 1, "invalid_value": 1}
    assert second["errors"] == []  # they are of the first run

    done = run(folder, *arguments)
    third = report_of(folder)
    assert done.returncode == 1
    assert third["state"] == "done"
    assert third["rows"]["done"] == 60 - num_second == third["prompt_lengths"]["count"]
    assert {key: third["whole_output"][key] for key in ("rows", "answered", "failed")} == {
        "rows": 60,
        "answered": 58,
        "failed": 2,
    }
    assert third["finish_reasons"][0]["count"] == sum(bar["count"] for bar in third["answer_lengths"]["bars"])
    assert third["timeline"][-1]["rows"] == third["rows"]["done"]
    assert (third["gpu_hours"], third["engine"]["device"], third["engine"]["gpus"]) == (None, "cpu", [])
    origins = {each["key"]: each["origin"] for each in (*third["config"], *third["sampling"])}
    assert [origins[key] for key in ("model", "sampling.top_k", "sampling.temperature", "dtype")] == [
        "nvcli.yaml:1",
        "nvcli.yaml:4",
        "--temperature",
        "default",
    ]
    assert third["versions"]["nvcli"]

    (folder / "nvcli.yaml").rename(folder / "\udcff.yaml")  # names of files need not be UTF-8
    names = ("-c", "\udcff.yaml", "--report", "\udcff.json", "--temperature", "0")
    again = run(folder, *names, "-q", fakes="load_error=Exception('started')")
    assert again.returncode == 1
    assert again.stderr == "nvcli: 2 of 60 rows failed: invalid_json 1, invalid_value 1\n"
    fourth = json.loads((folder / "\udcff.json").read_text())
    assert fourth["command"].endswith("-q")
    assert {each["origin"] for each in fourth["config"]} == {
        "\\udcff.yaml:1",
        "\\udcff.yaml:2",
        "\\udcff.yaml:3",
        "default",
    }
    assert (fourth["state"], fourth["was_complete"], fourth["engine"]) == ("done", True, None)
    assert fourth["rows"] == {"done": 0, "failed": 0, "deduplicated": 0, "resumed": 60}
    assert not list(folder.glob(".*json.new"))


def test_a_page_shows_what_rows_say_as_text(folder: Path) -> None:
    done = run(folder, "--report", "r.html", "-v")
    assert done.returncode == 1, done.stderr
    page = (folder / "r.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page  # the id of a bad row, and the text of a line
    assert "KV cache for 40 tokens (1 MiB a rank)" in done.stderr
    assert "  time      generating " in done.stderr
