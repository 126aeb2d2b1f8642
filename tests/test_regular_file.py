"""Only regular files are opened; whatever could make a reader wait for ever is refused at once, by its kind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nvcli.core.system.regular_file import check_regular, open_regular, read_regular


def test_a_file_and_a_link_to_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for path in (file, tmp_path / "link"):
        check_regular(path)
        assert read_regular(path) == b"text"
        with open_regular(path) as opened:
            assert opened.read() == b"text"
    assert read_regular(file, most_bytes=4) == b"text"
    with pytest.raises(OSError, match="4 bytes, more than the 3"):
        read_regular(file, most_bytes=3)


def test_other_kinds_are_refused_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for name, kind, found in (
        ("fifo", OSError, "it is a FIFO"),
        ("socket", OSError, "it is a socket"),
        ("device", OSError, "it is a device"),
        (".", OSError, "it is a folder"),
        ("loop", OSError, "levels of symbolic links"),
        ("dangling", FileNotFoundError, "a link to nowhere, where there is no file"),
        ("absent", FileNotFoundError, "no such file"),
        ("a\0b", FileNotFoundError, "null"),
    ):
        for reader in (check_regular, open_regular, read_regular):
            with pytest.raises(kind) as caught:
                reader(Path(name))
            assert found in str(caught.value.strerror)


def test_a_fifo_that_comes_between_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr("nvcli.core.system.regular_file.check_regular", lambda path: None)
    with pytest.raises(OSError, match="it is a FIFO"):
        open_regular(tmp_path / "fifo")
