"""The command, cut short and typed again: what it says, what it keeps, and its exit codes. Engines are fakes."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fake_command import ENVIRON, nvcli_command
from warm_process import WarmPopen, run_warm
from weightless_model import write_weightless_model

SLOW = "on_poll=lambda: __import__('time').sleep(0.05)"


class Shell:
    """Types commands in a folder with a model and an input of 200 rows, the first of them bad."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        write_weightless_model(folder / "model")
        rows = [{"prompt": f"p{number}", "id": f"r{number}"} for number in range(200)]
        self.write("in.jsonl", [{**rows[0], "prompt": 1}, *rows[1:]])

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(self, *arguments: str, fakes: str = "") -> list[str]:
        always = ["-m", "model", "--set", "max_num_seqs=2", "--set", "job.sync_seconds=0.1"]
        return nvcli_command("generate", *arguments, *always, cwd=self.folder, fakes=fakes)

    def run(self, *arguments: str, fakes: str = "", stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments, fakes=fakes)
        done = run_warm(command, cwd=self.folder, env=ENVIRON, input=stdin, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def interrupt(
        self, *arguments: str, signals: int = 1, number: signal.Signals = signal.SIGINT, fakes: str = SLOW
    ) -> subprocess.CompletedProcess[str]:
        """The run after Ctrl-C, pressed once the first rows are written, or after another signal."""
        command = self.command(*arguments, fakes=fakes)
        output = self.folder / "in.out.jsonl"
        size = output.stat().st_size if output.exists() else 0
        with WarmPopen(command, cwd=self.folder, env=ENVIRON, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 30
            while not (output.exists() and output.stat().st_size > size) and time.monotonic() < deadline:
                time.sleep(0.01)
            for _ in range(signals):
                process.send_signal(number)
                time.sleep(0.05)
            _, stderr = process.communicate(timeout=30)
        return subprocess.CompletedProcess(command, process.returncode, "", stderr)

    def rows(self, name: str = "in.out.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_ctrl_c_says_how_to_go_on_and_that_works(shell: Shell) -> None:
    done = shell.interrupt("in.jsonl", "--overwrite", "--order", "input")
    assert done.returncode == 130
    match = re.search(r"interrupted; .*in\.out\.jsonl; continue with:\n  (.+)\n", done.stderr)
    assert match, done.stderr
    words = shlex.split(match[1])
    assert words[:4] == [sys.executable, "-m", "nvcli", "generate"]
    assert "--overwrite" not in words
    num_rows = len(shell.rows())
    assert 0 < num_rows < 200
    again = shell.run(*words[4:])
    assert again.returncode == 1  # the bad row of the first run counts
    assert f"{num_rows} rows are answered already" in again.stderr
    assert "199 of 200 rows answered in" in again.stderr
    assert f"({num_rows} by an earlier run)" in again.stderr
    assert [row["index"] for row in shell.rows()] == list(range(200))


def test_the_hint_after_overwriting_does_not_go_by_the_clock(shell: Shell) -> None:
    """What was written before the run, by a clock that is behind, is still what the run has written."""
    late = "on_poll=lambda: (__import__('time').sleep(0.05), os.utime('in.out.jsonl.manifest.json', (0, 0)))"
    assert shell.run("in.jsonl").returncode == 1
    os.truncate(shell.folder / "in.out.jsonl", 0)
    done = shell.interrupt("in.jsonl", "--overwrite", fakes=late)
    assert "the rows answered so far are in in.out.jsonl; continue with:\n" in done.stderr
    assert "--overwrite" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_other_signals_end_it_as_ctrl_c_does(shell: Shell, number: signal.Signals) -> None:
    done = shell.interrupt("in.jsonl", number=number)
    assert done.returncode == 130, done.stderr
    assert "continue with:\n" in done.stderr
    assert 0 < len(shell.rows()) < 200
    assert not list(shell.folder.glob(".in.out.jsonl.*"))  # the lock file


def test_ctrl_c_twice_ends_at_once(shell: Shell) -> None:
    done = shell.interrupt("in.jsonl", signals=3)
    assert done.returncode == 130, done.stderr
    assert len(shell.rows()) < 200
    assert shell.run("in.jsonl").returncode == 1
    assert len(shell.rows()) == 200


def test_a_complete_job_starts_no_engine_and_repeats_its_exit_code(shell: Shell) -> None:
    assert shell.run("in.jsonl").returncode == 1
    before = shell.rows()
    never = "load_error=Exception('started')"
    again = shell.run("in.jsonl", fakes=never)
    assert again.returncode == 1
    assert "in.out.jsonl is complete: 199 of 200 rows answered; nothing to do" in again.stderr
    assert "show in.out.jsonl --errors  # shows the failed rows\n" in again.stderr
    assert "--retry-errors" not in again.stderr  # a bad row stays bad
    assert re.search(r"in\.jsonl.* --update  # answers the rows of .*invalid_value", again.stderr)
    assert shell.rows() == before
    shell.write("good.jsonl", [{"prompt": "p"}])
    assert [shell.run("good.jsonl", fakes=fakes).returncode for fakes in ("", never)] == [0, 0]


def test_failed_rows_are_tried_again(shell: Shell) -> None:
    some_fail = "fails=lambda request: request.row % 3 == 2"
    done = shell.run("in.jsonl", fakes=some_fail)
    assert done.returncode == 1
    failed = {row["index"] for row in shell.rows() if row["error"]}
    assert len(failed) == 67
    assert re.search(r"  next .* show .*\n .*in\.jsonl.* --retry-errors  # .* kv_cache_too_small", done.stderr), (
        done.stderr
    )
    done = shell.run("in.jsonl", "--retry-errors")
    assert done.returncode == 1, done.stderr
    assert "133 rows are answered already, 67 failed rows are tried again" in done.stderr
    assert [row["index"] for row in shell.rows() if row["error"]] == [0]
    assert sorted(row["index"] for row in shell.rows()) == list(range(200))
    assert shell.run("in.jsonl", "--retry-errors", "--overwrite").returncode == 2


def test_an_edited_row_and_new_ones_are_answered_alone(shell: Shell) -> None:
    some_fail = "fails=lambda request: request.row == 7"
    done = shell.run("in.jsonl", fakes=some_fail)
    assert " --retry-errors  # " in done.stderr
    assert " --update  # " in done.stderr
    before = {row["id"]: row for row in shell.rows()}
    rows = [{"prompt": f"p{number}", "id": f"r{number}"} for number in range(200)]
    shell.write("in.jsonl", rows)
    done = shell.run("in.jsonl")
    assert (done.returncode, "from another input: 1 row edited\n" in done.stderr) == (2, True)
    assert "--update" in done.stderr
    done = shell.run("in.jsonl", "--retry-errors")
    assert (done.returncode, "200 of 200 rows answered" in done.stderr) == (0, True), done.stderr
    shell.write("in.jsonl", [*rows[1:], *({"prompt": "new", "id": f"n{number}"} for number in range(3))])
    only_new = "fails=lambda request: request.row < 199"
    done = shell.run("in.jsonl", "--update", fakes=only_new)
    assert (done.returncode, "the input has changed: 3 rows new, 1 gone\n" in done.stderr) == (0, True), done.stderr
    after = {row["id"]: row for row in shell.rows()}
    assert list(after) != list(before)
    assert sorted(row["index"] for row in after.values()) == list(range(202))
    assert all(after[f"r{n}"] == {**before[f"r{n}"], "index": n - 1} for n in range(1, 200) if n != 7)
    assert shell.run("in.jsonl", "--update", "--overwrite").returncode == 2


def test_a_job_that_goes_wrong_is_ended(shell: Shell) -> None:
    some_fail = "fails=lambda request: request.row % 3 == 2"
    done = shell.run("in.jsonl", "--max-errors", "5", fakes=some_fail)
    assert done.returncode == 1
    assert re.search(r"ended: \d+ rows failed, and `job.max_errors` allows 5: kv_cache_too_small \d+", done.stderr)
    assert "continue with:\n" in done.stderr
    num_failed = sum(bool(row["error"]) for row in shell.rows())
    assert 5 < num_failed < 20
    done = shell.run("in.jsonl", "--max-errors", "5")
    assert done.returncode == 1
    assert sum(bool(row["error"]) for row in shell.rows()) == num_failed
    assert len(shell.rows()) == 200


def test_two_runs_at_once(shell: Shell) -> None:
    command = shell.command("in.jsonl", fakes="polls_until_ready=10**9")
    with WarmPopen(command, cwd=shell.folder, env=ENVIRON, stderr=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 30
        while not (shell.folder / "in.out.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        second = shell.run("in.jsonl")
        first.kill()
    assert second.returncode == 2
    assert "another run is writing to the output in.out.jsonl" in second.stderr
    assert shell.run("in.jsonl").returncode == 1


def test_a_changed_input_or_model_is_refused(shell: Shell) -> None:
    weights = shell.folder / "model" / "model.safetensors"
    weights.write_bytes(b"one checkpoint")
    assert shell.interrupt("in.jsonl").returncode == 130
    before = shell.rows()
    source = shell.folder / "in.jsonl"
    text = source.read_text()
    source.write_text(text.replace("p7", "P7"))
    config = shell.folder / "model" / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")
    weights.write_bytes(b"the next one's")
    done = shell.run("in.jsonl", "--set", "sampling.top_k=3")
    assert done.returncode == 2
    for part in (
        "  model tokenizer_config.json: sha256 ", "  model model.safetensors: 14 bytes, sha256 ",
        "  sampling.top_k: not set → 3 (to continue as it began: ", "  input in.jsonl: ", "--overwrite"
    ):  # fmt: skip
        assert part in done.stderr, done.stderr
    assert shell.rows() == before
    # How fast it runs may change.
    source.write_text(text)
    config.write_text(config.read_text().strip())
    weights.write_bytes(b"one checkpoint")
    (shell.folder / "model").rename(shell.folder / "moved")
    (shell.folder / "model").symlink_to("moved")
    assert shell.run("in.jsonl", "--set", "max_num_batched_tokens=100", "--dp", "2").returncode == 1
    assert len(shell.rows()) == 200


def test_standard_input_cannot_be_continued(shell: Shell) -> None:
    rows = '{"prompt": "a"}\n'
    assert shell.run("-", "-o", "out.jsonl", stdin=rows).returncode == 0
    assert not (shell.folder / "out.jsonl.manifest.json").exists()
    done = shell.run("-", "-o", "out.jsonl", stdin=rows)
    assert done.returncode == 2
    assert "cannot be continued" in done.stderr
    assert shell.run("-", "-o", "out.jsonl", "--overwrite", stdin=rows).returncode == 0


def test_patterns_compressed_files_and_both_forms(shell: Shell) -> None:
    folder = shell.folder
    (folder / "part1.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt": "ab"}\r\n\r\n'))
    body = {"model": "x", "prompt": "hi"}
    row = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    (folder / "part2.jsonl.zst").write_bytes(zstandard.compress(json.dumps(row).encode()))
    for _ in range(2):
        done = shell.run("part*", "-o", "part.out.jsonl.zst", "--order", "input")
        assert done.returncode == 0, done.stderr
    with (folder / "part.out.jsonl.zst").open("rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    native, batch = map(json.loads, data.splitlines())
    assert native["choices"][0]["text"] == "ba"
    assert (batch["id"], batch["custom_id"]) == ("batch_req_1", "c")
    answer = batch["response"]["body"]
    assert answer["choices"][0]["text"] == "ih"
    assert (answer["object"], answer["model"]) == ("text_completion", "x")


def test_a_full_disk(shell: Shell) -> None:
    done = shell.run("in.jsonl", "-o", "/dev/full")
    assert done.returncode == 3
    assert "the output /dev/full cannot be written any further: No space left on device" in done.stderr


def test_a_file_that_may_not_grow_is_continued_when_it_may(shell: Shell) -> None:
    """A limit on file sizes (as a quota is) in place of a full disk. Python would keep compiled modules cut there."""
    command = shlex.join(shell.command("in.jsonl", fakes=SLOW))
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 20; exec {command}"],
        cwd=shell.folder, env={**ENVIRON, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "cannot be written any further: File too large" in done.stderr
    assert "continue with:\n" in done.stderr
    assert 0 < len(shell.rows()) < 200
    assert shell.run("in.jsonl").returncode == 1
    assert sorted(row["index"] for row in shell.rows()) == list(range(200))


def test_an_input_that_is_changed_during_the_run_ends_it_and_the_same_command_goes_on(shell: Shell) -> None:
    whole = (shell.folder / "in.jsonl").read_text()
    cut = "on_poll=lambda: os.path.exists('in.out.jsonl') and os.truncate('in.jsonl', 100)"
    done = shell.run("in.jsonl", fakes=cut)
    assert (done.returncode, done.stderr.count("error: the input in.jsonl was changed during the run")) == (3, 1)
    other = shell.run("in.jsonl")
    assert other.returncode == 2
    assert "was made from another input: 1 row edited, 1" in other.stderr
    (shell.folder / "in.jsonl").write_text(whole)
    again = shell.run("in.jsonl")
    assert again.returncode == 1
    assert "continuing" in again.stderr
    assert sorted(row["index"] for row in shell.rows()) == list(range(200))


def test_an_output_that_is_replaced_during_the_run_ends_it_and_the_same_command_goes_on(shell: Shell) -> None:
    sed = "on_poll=lambda: os.path.exists('in.out.jsonl') and os.system('sed -i s/p/q/ in.out.jsonl')"
    done = shell.run("in.jsonl", fakes=sed)
    assert done.returncode == 3
    assert "error: the output in.out.jsonl was changed by another program during the run" in done.stderr
    assert shell.run("in.jsonl").returncode == 1
    assert sorted(row["index"] for row in shell.rows()) == list(range(200))
