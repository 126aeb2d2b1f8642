"""`nvcli check` and `generate --dry-run` as a user runs them: exit codes, what is written, options, Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import typer.main

from fake_command import ENVIRON, nvcli_command, run_nvcli
from nvcli.cli.main import app
from nvcli.core.config import flag_keys

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_exit_codes_and_nothing_written(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    before = {*tmp_path.iterdir(), tmp_path / "with_fakes.py"}
    result = run_nvcli("check", "in.jsonl", "-m", str(model_folder), "--json", "--limit", "1", cwd=tmp_path, fakes="")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["rows"] == 1
    (tmp_path / "nvcli.yaml").write_text("seed: 1\n")
    result = run_nvcli(
        "generate", "in.jsonl", "-m", str(model_folder), "--dry-run", "--max-tokens", "7", cwd=tmp_path, fakes=""
    )
    assert result.returncode == 1, result.stderr
    assert "1 invalid_value; the first: line 2: `prompt` is 5; allowed: text" in result.stdout
    assert "max_tokens 7 (--max-tokens)" in result.stdout
    assert "using the configuration in nvcli.yaml" in result.stderr
    assert set(tmp_path.iterdir()) == before | {tmp_path / "nvcli.yaml"}
    result = run_nvcli("check", "in.jsonl", "-m", str(model_folder), "--gpu", "h300", cwd=tmp_path, fakes="")
    assert result.returncode == 2
    assert result.stderr.startswith("nvcli: error: --gpu h300 is unknown; known: b200,")


def test_ctrl_c_leaves_the_report_of_the_rows_before(tmp_path: Path, model_folder: Path) -> None:
    command = nvcli_command("check", "-", "-m", str(model_folder), "--prompts", "0", "--json", cwd=tmp_path, fakes="")
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"prompt": "ab"}\n' * 8)
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while num_unread(process.stdin.fileno()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)  # the rows are counted, and it waits for more
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    report = json.loads(stdout)
    assert report["rows"] in (0, 8)  # 0 on a machine that is very slow
    assert not report["is_complete"]
    assert stderr.decode() == "nvcli: interrupted; the report covers the rows that were read until then\n"


def num_unread(pipe: int) -> int:
    """How many bytes of a pipe were not read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_every_option_of_generate_that_sets_a_key_is_an_option_of_check() -> None:
    shown = {
        name: {option for parameter in COMMANDS[name].params for option in parameter.opts}
        for name in ("generate", "check")
    }
    assert shown["generate"] & set(flag_keys()) - shown["check"] == set()
