"""A file's name says its format, and a name that says something else is refused before anything starts."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from pathlib import Path

import pytest

from nvcli.errors import ConfigError
from nvcli.job.file_formats import check_stream_format
from nvcli.job.files import check_inputs, check_output, is_terminal

ROW = b'{"prompt": "a"}\n'


@pytest.mark.parametrize("name", ["out.txt", "out.arrow", "out.jsonl.7z", "out.txt.gz", "out.parquet.gz"])
def test_formats_that_are_not_written_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.jsonl, \.csv or \.tsv .*or \.parquet, and not as \.") as error:
        check_output([], str(tmp_path / name))
    assert f"-o {tmp_path / 'out'}" in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "out",
        "out.gz",
        "out.GZ",
        "out.json",
        "out.ndjson",
        "out.jsonl",
        "out.jsonl.gz",
        "a.csv.jsonl.zst",
        "out.parquet",
        "out.csv",
        "out.tsv",
        "out.csv.gz",
        "out.tsv.zst",
        "out.csv.bz2",
        "out.json.xz",
        "OUT.JSONL",
        "OUT.PARQUET",
    ],
)
def test_formats_that_are_written(tmp_path: Path, name: str) -> None:
    check_output([], str(tmp_path / name))


def test_devices_and_pipes_have_no_format() -> None:
    check_output([], "/dev/null")
    check_output([], "/dev/stdout")


def test_plain_rows_that_are_named_gz_are_told_so(tmp_path: Path) -> None:
    for suffix, kind in (("gz", "gzip data"), ("GZ", "gzip data"), ("zst", "zstd data")):
        path = tmp_path / f"in.jsonl.{suffix}"
        path.write_bytes(ROW)
        with pytest.raises(ConfigError, match=f"is not {kind}, as its name says: it begins with b'{{\"pr'") as error:
            check_inputs([str(path)])
        assert str(error.value).endswith(f"rename it: mv {path} {tmp_path / 'in.jsonl'}")
        (tmp_path / "in.jsonl").write_bytes(ROW)  # which must not be lost
        with pytest.raises(ConfigError, match=r"rename it$"):
            check_inputs([str(path)])
        (tmp_path / "in.jsonl").unlink()
        path.write_bytes(b"")  # nothing: no rows
        check_inputs([str(path)])


def test_packed_rows_are_named_so(tmp_path: Path) -> None:
    path = tmp_path / "in put.jsonl"
    for data, kind, suffix in (
        (gzip.compress(ROW), "gzip data", "gz"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd data", "zst"),
        (b"\x50\x2a\x4d\x18\x04", "zstd data", "zst"),
        (bz2.compress(ROW, 3), "bzip2 data", "bz2"),
        (bz2.compress(b""), "bzip2 data", "bz2"),
        (lzma.compress(ROW), "xz data", "xz"),
        (b"PAR1\x15", "a Parquet table", "parquet"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"holds {kind}, and its name does not say so") as error:
            check_inputs([str(path)])
        assert str(error.value).endswith(f"mv '{path}' '{path}.{suffix}'")
        for name in (f"in.{suffix}", f"IN.{suffix.upper()}"):
            (tmp_path / name).write_bytes(data)
            check_inputs([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"PK\x03\x04\x14\0", "a spreadsheet or another ZIP archive, which is not read; save it as CSV"),
        (b"FEA1\0\0", "a Feather file of version 1, which is not read; write it again"),
    ],
)
def test_files_that_are_not_read_are_told_so(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "in.xlsx"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"the input {path} holds {told}"):
        check_inputs([str(path)])
    with pytest.raises(ConfigError, match=f"standard input holds {told}"):
        check_stream_format(data)


def test_what_is_a_terminal() -> None:
    parent, child = os.openpty()
    try:
        assert is_terminal(os.ttyname(child), ["in.jsonl"])
    finally:
        os.close(parent)
        os.close(child)
    for name in (None, "out.jsonl", "/dev/null", "/nowhere/out.jsonl"):
        assert not is_terminal(name, ["in.jsonl"])
