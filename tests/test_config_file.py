"""A configuration file that is found, and not named, is read if nobody else could have written it."""

from __future__ import annotations

import grp
import os
import pwd
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvcli.cli.main import _run
from nvcli.core.config_file import find_config_file
from nvcli.errors import ConfigError

FOUND = Path("nvcli.yaml")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUDO_UID", raising=False)


def write(mode: int = 0o644) -> None:
    FOUND.write_text("model: no-such-model\n")
    FOUND.chmod(mode)


def test_the_file_in_the_current_folder_is_found() -> None:
    assert find_config_file(None) is None
    write()
    assert find_config_file(None) == FOUND
    assert find_config_file(Path("other.yaml")) == Path("other.yaml")
    assert find_config_file(Path("none")) is None


def test_a_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    owner = FOUND.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if owner != 0:
        with pytest.raises(
            ConfigError, match=r"belongs to another user \(.+\), so .* -c \./nvcli\.yaml, or .* -c none"
        ):
            find_config_file(None)
    monkeypatch.setattr(Path, "stat", lambda self, **options: os.stat_result((0o100644, 0, 0, 1, 4243, 0, 0, 0, 0, 0)))
    with pytest.raises(ConfigError, match=r"belongs to another user \(4243\)"):
        find_config_file(None)
    assert find_config_file(Path("./nvcli.yaml")) == FOUND
    assert find_config_file(Path("none")) is None
    monkeypatch.setenv("SUDO_UID", "4243")
    with pytest.raises(ConfigError, match="belongs to another user"):
        find_config_file(None)  # anybody can set this variable; root alone heeds it
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert find_config_file(None) == FOUND


def test_a_link_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    link = os.stat_result((0o120777, 0, 0, 1, 4243, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "lstat", lambda self: link)
    with pytest.raises(ConfigError, match=r"belongs to another user \(4243\)"):
        find_config_file(None)


def test_a_file_that_others_may_write_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write(0o646)
    with pytest.raises(ConfigError, match=r"can be written by all users \(mode 0646\)"):
        find_config_file(None)


@pytest.mark.parametrize(
    ("name", "members", "is_private"),
    [("alice", [], True), ("alice", ["alice"], True), ("alice", ["bob"], False), ("users", [], False)],
)
def test_a_file_that_a_group_may_write_to_is_read_where_the_group_is_the_users_own(
    monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], is_private: bool
) -> None:
    """Everybody has such a group on many systems, and a umask of 002 with it."""
    write(0o664)
    account = SimpleNamespace(pw_name="alice", pw_gid=FOUND.stat().st_gid)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: account)
    monkeypatch.setattr(grp, "getgrgid", lambda group: SimpleNamespace(gr_name=name, gr_mem=members))
    if is_private:
        assert find_config_file(None) == FOUND
        return
    with pytest.raises(ConfigError, match=r"can be written by its group \(mode 0664\)"):
        find_config_file(None)


@pytest.mark.parametrize(
    "arguments",
    [
        "generate in.jsonl -q",
        "generate in.jsonl --dry-run -q",
        "score in.jsonl -q",
        "embed in.jsonl -q",
        "check in.jsonl",
        "chat",
        "bench",
        "profile-memory",
        "doctor",
        "compare-quality in.jsonl",
    ],
)
def test_every_command_says_so_refuses_and_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    Path("in.jsonl").write_text('{"prompt": "a"}\n')

    def stderr_of(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["nvcli", *arguments.split(), *more])
        _run()
        return capsys.readouterr().err

    write(0o666)
    assert "nvcli.yaml in this folder can be written by all users" in stderr_of()
    FOUND.write_text("no_such_key: 1\n")  # ends each command early
    FOUND.chmod(0o644)
    note, error, *_ = stderr_of().splitlines()
    assert note == "nvcli: using the configuration in nvcli.yaml; -c names another, -c none leaves it out"
    assert "nvcli.yaml:1: unknown key" in error
    assert "nvcli.yaml" not in stderr_of("-c", "none", "--set", "no_such_key=1")
