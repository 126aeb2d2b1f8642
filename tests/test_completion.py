"""What the shell completes, asked for as the shell asks; and that every option says what it is for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer.main

from fake_command import ENVIRON
from nvcli.cli.main import app
from nvcli.core.config import RunConfig
from warm_process import run_warm

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def nvcli(*arguments: str, cwd: Path, **environ: str) -> str:
    command = [sys.executable, "-P", "-m", "nvcli", *arguments]
    done = run_warm(command, cwd=cwd, env={**ENVIRON, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def complete(line: str, cwd: Path) -> list[str]:
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_NVCLI_COMPLETE": "complete_bash"}
    return nvcli(cwd=cwd, HF_HOME=str(cwd / "hf"), **asked).split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nvcli doc", ["doctor"]),
        ("nvcli generate x --order ", ["input", "completion"]),
        ("nvcli generate x --progress p", ["plain"]),
        ("nvcli bench --shape qwen3-1", ["qwen3-1.7b", "qwen3-14b"]),
        ("nvcli doctor --device c", ["cpu", "cuda"]),
        ("nvcli doctor --model d", ["demo", "deep/"]),
        ("nvcli doctor --model some", ["someone/a-model"]),
        ("nvcli doctor --model ./deep/", ["./deep/er/"]),
        ("nvcli doctor --model ~no-such-user/x", []),
        ("nvcli generate x --set max_m", ["max_model_len="]),
        ("nvcli generate x --set sampling.temp", ["sampling.temperature="]),
        ("nvcli generate x --set job.on", ["job.on_too_long="]),
    ],
)
def test_completion(tmp_path: Path, line: str, words: list[str]) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "hf" / "hub" / "models--someone--a-model").mkdir(parents=True)
    assert complete(line, tmp_path) == words


def test_every_key_can_be_completed(tmp_path: Path) -> None:
    offered = {word.partition("=")[0].partition(".")[0] for word in complete("nvcli bench --set ", tmp_path)}
    assert offered == set(RunConfig.__struct_fields__)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_their_script(tmp_path: Path, shell: str) -> None:
    script = nvcli("--show-completion", shell, cwd=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_NVCLI_COMPLETE=complete_" + shell in script


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_and_every_option_help(name: str) -> None:
    command = COMMANDS[name]
    assert "Examples:" in command.help
    assert f"nvcli {name}" in command.help
    assert [parameter.name for parameter in command.params if not getattr(parameter, "help", "")] == []


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_examples_mean_the_same_in_every_shell(name: str | None) -> None:
    help_text = (COMMANDS[name] if name else typer.main.get_command(app)).help
    assert help_text is not None
    examples = [line.strip() for line in help_text.partition("Examples:")[2].splitlines() if line.strip()]
    assert examples
    for example in examples:
        unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", example)
        # zsh ends a command whose pattern matches no file, and takes =word for the path of a command.
        assert not re.search(r"[][*?~^#{}!]|(^|\s)=", unquoted), example
