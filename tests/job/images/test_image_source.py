"""Rows name images below the folders of their inputs, and no others."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from nvcli.errors import RowError
from nvcli.job.images import image_source
from nvcli.job.images.image_source import ImageFolders


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageFolders:
    """Two folders with images, one of them at home, beside a secret."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("in", "media/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "in/a b.png").write_bytes(b"a")
    (tmp_path / "media/deep/m.png").write_bytes(b"m")
    (tmp_path / "secret.png").write_bytes(b"s")
    (tmp_path / "in/link.png").symlink_to("../secret.png")
    (tmp_path / "in/inner.png").symlink_to("a b.png")
    os.mkfifo(tmp_path / "in/fifo")
    return ImageFolders.of([str(tmp_path / "in/rows.jsonl")], ["~/media"])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("a b.png", "in/a b.png"),
        ("./x/../a b.png", "in/a b.png"),
        ("inner.png", "in/a b.png"),
        ("deep/m.png", "media/deep/m.png"),
        ("{}/in/a b.png", "in/a b.png"),
        ("file://{}/in/a%20b.png", "in/a b.png"),
    ],
)
def test_files_below_the_folders_are_found(source: str, name: str, folders: ImageFolders, tmp_path: Path) -> None:
    assert folders.find(source.format(tmp_path)) == (tmp_path / name).resolve()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("../secret.png", "it is not below the folder of the input"),
        ("{}/secret.png", "it is not below the folder of the input"),
        ("file://{}/secret.png", "it is not below the folder of the input"),
        ("link.png", "it is not below the folder of the input"),
        ("/etc/passwd", "it is not below the folder of the input"),
        ("none.png", "no such file in"),
        ("fifo", "cannot be read: it is a FIFO"),
        (".", "cannot be read: it is a folder"),
        ("a\0b", "cannot be read"),
        ("https://example.com/a.png", "`job.media_domains` has no example.com"),
        ("ftp://example.com/a.png", "images are fetched by https alone"),
        ("data:image/png,abc", "allowed in a `data:` URL: base64"),
        ("data:image/png;base64,%%", "it is no base64"),
        ("iVBO" * 1024, "it is too long for a path; before base64 stands data:image/png;base64,"),
    ],
)
def test_anything_else_is_an_error(source: str, problem: str, folders: ImageFolders, tmp_path: Path) -> None:
    with pytest.raises(RowError) as caught:
        folders.find(source.format(tmp_path))
    assert caught.value.type == "invalid_image"
    assert problem in caught.value.message


def test_data_urls_are_decoded(folders: ImageFolders) -> None:
    for head in ("data:image/png;base64,", "DATA:image/png;base64, \r\n"):
        assert folders.find(head + base64.encodebytes(b"pixels" * 50).decode()) == b"pixels" * 50


def test_large_files_are_errors(folders: ImageFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_source, "MAX_FILE_BYTES", 0)
    for source in ("a b.png", "data:image/png;base64,AAAA"):
        with pytest.raises(RowError, match="bytes"):
            folders.find(source)
