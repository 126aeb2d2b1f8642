"""Options that are made from fields: how their values are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from nvcli.cli.options import Settings, keys_of, with_options
from nvcli.core.flags import ROWS, Flag
from nvcli.errors import ConfigError


class Files(msgspec.Struct):
    path: Annotated[Path | None, Flag("--path", ROWS, "A path.", "FILE.svg|.png")] = None
    share: Annotated[float, Meta(ge=0, le=1), Flag("--share", ROWS, "A share.", "X")] = 0.5


def run(*arguments: str) -> dict[str, Any]:
    """Run a command that has options of all kinds, and return what it gets."""
    got: dict[str, Any] = {}

    @with_options(*keys_of("", "job", "sampling"))
    def command(
        *,
        count: Annotated[Annotated[int, Meta(ge=1)] | None, Flag("--count", ROWS, "A number.", "N")] = None,
        files: Files,
        settings: Settings,
    ) -> None:
        got.update(count=count, files=files, settings=settings)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return got


def test_options_that_are_not_given() -> None:
    assert run() == {"count": None, "files": Files(), "settings": Settings()}


def test_options_become_values_of_keys() -> None:
    arguments = "-m 5 --max-tokens 7 --system 5 --tp auto --revision 2 --min-p 0.1 --presence-penalty -1 --logprobs 2"
    objects = ["--chat-template-kwargs", '{"a": 1}', "--hf-overrides", '{"vocab_size": 8}']
    got = run(*arguments.split(), *objects, "--prompt-template", "", "--ignore-eos", "--no-chat", "--stop", "1")
    assert got["settings"].flags == {
        "--model": "5",
        "--max-tokens": 7,
        "--system": "5",
        "--tp": "auto",
        "--revision": "2",
        "--min-p": 0.1,
        "--presence-penalty": -1,
        "--logprobs": 2,
        "--chat-template-kwargs": {"a": 1},
        "--hf-overrides": {"vocab_size": 8},
        "--prompt-template": "",
        "--ignore-eos": True,
        "--no-chat": "never",
        "--stop": ["1"],
    }
    assert run("--chat")["settings"].flags == {"--chat": "always"}
    nulls = run("--max-errors", "null", "--revision", "null")["settings"].flags
    assert nulls == {"--max-errors": None, "--revision": "null"}


def test_options_become_fields_and_arguments() -> None:
    got = run("--count", "3", "--path", "5", "--share", "1", "-c", "none", "--set", "a=1", "--set", "b=2")
    assert run("--path=~/a", "--config=~/b") == {
        "count": None,
        "files": Files(path=Path.home() / "a"),
        "settings": Settings(config=Path.home() / "b"),
    }
    assert (got["count"], got["files"]) == (3, Files(path=Path("5"), share=1.0))
    assert got["settings"] == Settings(config=Path("none"), overrides=["a=1", "b=2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "0"], "--count 0: allowed: an integer of at least 1"),
        (["--count", "x"], "--count x: allowed: an integer of at least 1"),
        (["--count", "\udcff"], "--count \udcff: allowed: an integer of at least 1"),
        (["--share", "2"], "--share 2: allowed: a number from 0 to 1"),
        (["--hf-overrides", "x"], "--hf-overrides x: expected a JSON object in quotes"),
    ],
)
def test_wrong_values(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(*arguments)
    assert str(caught.value).startswith(message)
    assert "null" not in str(caught.value)
