"""`nvcli generate -p` and `nvcli chat` as a person uses them, with the built-in model."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fake_command import ENVIRON, nvcli_command, run_nvcli
from nvcli.cli.answer_files import JobOptions
from nvcli.cli.answers import config_for_person
from nvcli.cli.prompt import check_prompt_options
from nvcli.core.config import load_run_config
from nvcli.errors import ConfigError
from warm_process import WarmPopen, run_warm

MODEL = ["-m", "demo", "--set", "device=cpu", "--set", "kv_cache_memory=64MiB", "--temperature", "0"]
COMMAND = [sys.executable, "-P", "-m", "nvcli"]


def test_a_prompt_through_a_pipe(tmp_path: Path) -> None:
    """Standard output holds the answers and nothing else."""
    questions = ["-p", "What is 37 + 58?", "-p", "x" * 9999, "-p", "What is 8 * 63?", "-n", "2"]
    command = [*COMMAND, "generate", *questions, *MODEL, "--system", "Be brief."]
    ran = run_warm(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (1, "95\n\n95\n\n\n504\n\n504\n")
    assert ran.stderr.startswith("nvcli: error: the prompt has ")
    assert len(ran.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_chat_template_continues_the_prompt(tmp_path: Path) -> None:
    ran = run_nvcli("generate", "-p", "abc", "-m", "demo", "--max-tokens", "2", cwd=tmp_path, fakes="")
    assert (ran.returncode, ran.stdout) == (0, "cb\n")
    assert "demo has no chat template, so it continues the prompt as it is" in ran.stderr
    assert "cut after 2 tokens" in ran.stderr


def test_a_chat_through_a_pipe(tmp_path: Path) -> None:
    """A line that gets no answer ends nothing; one that is no text ends the chat."""
    lines = b"What is 37 + 58?\r\n/nonsense\nWhat is 8 * 63?\n\xff\n"
    command = [*COMMAND, "chat", *MODEL, "--set", "sampling.n=2"]
    ran = run_warm(command, cwd=tmp_path, env=ENVIRON, input=lines, capture_output=True)
    assert (ran.returncode, ran.stdout.split()) == (2, [b"95", b"504"])
    assert ran.stderr.startswith(b"nvcli: warning: `sampling.n` has no effect in a chat")
    assert b"/nonsense is not a command" in ran.stderr
    assert b"nvcli: error: a line of standard input is not UTF-8 text" in ran.stderr


def test_a_task_without_answers_is_refused_before_the_model_is_loaded() -> None:
    run = load_run_config(None, ["model=demo", "task=score"])
    with pytest.raises(ConfigError, match="`task` is score, whose rows get no answers; leave it out"):
        config_for_person(run)


def test_nobody_reads_the_answer(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    command = nvcli_command("generate", "-p", "abc", "--raw", "-m", "demo", cwd=tmp_path, fakes="")
    ran = run_warm(command, cwd=tmp_path, env=ENVIRON, stdout=writable, stderr=subprocess.PIPE)
    assert (ran.returncode, ran.stderr) == (141, b"")  # as a command that SIGPIPE ends


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        self._parent, child = os.openpty()
        self.process = WarmPopen(
            [*COMMAND, *arguments],
            cwd=cwd,
            env={**ENVIRON, "TERM": "xterm"},
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
        )
        os.close(child)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._parent)

    def type(self, text: str) -> None:
        os.write(self._parent, text.encode())

    def wait_for(self, text: str) -> str:
        """Return what is shown up to `text`, and forget it."""
        while text not in self.text:
            assert select.select([self._parent], [], [], 40)[0], self.text
            try:
                self.text += os.read(self._parent, 65536).decode()
            except OSError:  # Linux's way of saying that the other end is closed
                raise AssertionError(self.text) from None
        before, _, self.text = self.text.partition(text)
        return before

    def wait_until_it_waits(self) -> None:
        """Wait until the command does nothing but wait for input.

        readline, which echoes what is typed before it waits again, passes over a signal that comes in between.
        """
        asleep = 0
        while asleep < 10:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.02)

    def end(self) -> int:
        """Return the exit code."""
        return self.process.wait(timeout=30)


def test_a_chat_at_a_terminal(tmp_path: Path) -> None:
    with Terminal("chat", *MODEL, cwd=tmp_path) as terminal:
        terminal.wait_for("Ctrl-D ends the chat")
        terminal.wait_for("> ")
        terminal.type("What is 37 + 58?\n")
        assert terminal.wait_for("> ").split() == ["What", "is", "37", "+", "58?", "95"]
        terminal.type("Count from 1 to 90.\n")
        terminal.wait_for("1 2 3 4 5 6")
        terminal.process.send_signal(signal.SIGINT)
        rest = terminal.wait_for("stopped")
        assert "90" not in rest
        terminal.wait_for("> ")
        terminal.type("/clear\n")
        terminal.wait_for("forgotten")
        terminal.wait_for("> ")
        terminal.type("What is 8")
        terminal.wait_for("What is 8")
        terminal.wait_until_it_waits()
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("Ctrl-D or /exit ends the chat")
        terminal.wait_for("> ")
        terminal.type("What is 8 * 63?\n")
        assert terminal.wait_for("> ").split()[-1] == "504"
        terminal.type("\x04")
        assert terminal.end() == 0


def test_a_prompt_at_a_terminal_can_be_interrupted(tmp_path: Path) -> None:
    prompts = ["-p", "Count from 1 to 90.", "-p", "Count from 2 to 90."]
    with Terminal("generate", *prompts, *MODEL, cwd=tmp_path) as terminal:
        terminal.wait_for("loading demo")
        terminal.wait_for("1 2 3 4 5 6")  # it shows as it comes
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("nvcli: interrupted; the answer is not complete")
        assert terminal.end() == 130


def check(
    inputs: list[str], prompts: list[str], *, raw: bool = False, flags: dict[str, Any] | None = None, **job: Any
) -> None:
    check_prompt_options(inputs, prompts, raw=raw, job=JobOptions(**job), flags=flags or {})


def test_what_goes_with_a_prompt() -> None:
    check(["a"], [], limit=3, overwrite=True, flags={"--system": "s", "--id-field": "key"})
    check([], ["p"], flags={"--system": "s", "--temperature": 0}, verbose=True)
    check([], ["p"], raw=True, flags={"--no-chat": "never"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": [], "prompts": []}, "no INPUT: name a file of rows, or - for standard input, or ask with -p TEXT"),
        ({"inputs": ["a.jsonl"], "prompts": ["p"]}, r"INPUT a\.jsonl and -p exclude each other"),
        ({"inputs": ["a"], "prompts": [], "raw": True}, "--raw is for -p"),
        ({"inputs": [], "prompts": ["p"], "limit": 3}, "--limit has no effect with -p"),
        ({"inputs": [], "prompts": ["p"], "overwrite": True}, "--overwrite has no effect with -p"),
        ({"inputs": [], "prompts": ["p"], "update": True}, "--update has no effect with -p"),
        ({"inputs": [], "prompts": ["p"], "report": Path("r")}, "--report has no effect with -p"),
        ({"inputs": [], "prompts": ["p"], "flags": {"--id-field": "k"}}, "--id-field has no effect with -p"),
        (
            {"inputs": [], "prompts": ["p"], "raw": True, "flags": {"--system": "s"}},
            "--system has no effect with --raw",
        ),
    ],
)
def test_what_does_not_go_with_a_prompt(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(**given)


def test_control_characters_are_shown_to_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from nvcli.cli import answers

    answers.write("a\x1b[2Jb\tc\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answers.write("a\x1b[2Jb\tc\r\x9b\n")
    assert capsys.readouterr().out == "a\x1b[2Jb\tc\na\u241b[2Jb\tc\u240d\\x9b\n"
