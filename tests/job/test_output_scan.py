"""What an output holds is found out whatever the length of its lines, and lines that are damaged cost their own row."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest

from nvcli.errors import OutputError
from nvcli.job import compression, line_splitter
from nvcli.job.output import output_scan, table
from nvcli.job.output.manifest import manifest_path
from nvcli.job.output.output_scan import scan_output
from nvcli.job.own_files import rows_path
from nvcli.job.row_set import RowSet
from output_jobs import open_job, plain_bytes, rows_of, write

NAMES = ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"]


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of an output is longer than a line of the input may be."""
    monkeypatch.setattr(line_splitter, "MAX_LINE_BYTES", 50)
    for name in compression.READ_BYTES:
        monkeypatch.setitem(compression.READ_BYTES, name, 16)


@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize("name", NAMES)
def test_our_own_lines_may_be_longer_than_those_of_the_input(tmp_path: Path, name: str) -> None:
    path, whole = tmp_path / name, tmp_path / f"whole.{name}"
    write(whole, range(5), finish=True)
    write(path, [3])
    assert write(path, [3, 0, 1]).notes == [f"continuing {path}: 1 row is answered already"]
    output = write(path, range(5), finish=True)
    assert output.answered.all.count == 3
    assert output.notes == [f"continuing {path}: 3 rows are answered already"]
    assert sorted(plain_bytes(path).splitlines()) == sorted(plain_bytes(whole).splitlines())


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_member_that_is_too_large_to_hold_is_scanned_all_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    write(path, range(5))
    write(path, range(300))
    sound = path.stat().st_size
    path.write_bytes(path.read_bytes() + path.read_bytes()[:-3])
    found = []
    for most in (output_scan._MAX_HELD_BYTES, 1000):
        monkeypatch.setattr(output_scan, "_MAX_HELD_BYTES", most)
        scan = scan_output(path)
        found.append((scan.num_rows, scan.sound_bytes, scan.num_damaged))
    assert found[0] == found[1]
    assert found[0][:2] == (300, sound)


@pytest.mark.usefixtures("short_lines")
def test_a_table_has_its_long_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(path, range(2))
    write(path, range(5), finish=True)
    assert pyarrow.parquet.read_table(path, columns=["index"]).to_pydict() == {"index": list(range(5))}


def test_the_rows_of_a_table_are_kept_until_it_has_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.parquet"
    valid_rows = table.valid_rows
    with monkeypatch.context() as patch:
        patch.setattr(table, "valid_rows", lambda path: list(valid_rows(path))[:3])
        with pytest.raises(
            OutputError, match=r"not made: 5 rows were answered, and out\.parquet\.rows\.jsonl holds 3 "
        ):
            write(path, range(5), finish=True)
    assert not path.exists()
    assert msgspec.json.decode(manifest_path(path).read_bytes())["finished"] is None
    assert write(path, range(5), finish=True).answered.all.count == 5
    assert pyarrow.parquet.read_table(path).num_rows == 5


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_line_that_is_no_utf8_costs_its_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, range(5))
    rows = rows_path(path)
    data = rows.read_bytes()
    rows.write_bytes(data.replace("ünswer 2".encode(), b"\xff\xfenswer 2"))
    output = write(path, range(5), finish=True)
    assert [row for row in range(5) if row not in output.answered.all] == [2]
    if name == "out.parquet":
        table = pyarrow.parquet.read_table(path).to_pylist()
        assert sorted((row["index"], row["choices"][:1] != []) for row in table) == [
            (row, row not in (3, 4)) for row in range(5)
        ]
    else:
        assert sorted(path.read_bytes().splitlines()) == sorted(data.splitlines())


def test_zeros_without_end_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [0, 1])
    sound = path.stat().st_size
    with path.open("ab") as file:
        file.truncate(1 << 29)  # a hole: takes no disk
    scan = scan_output(path)
    assert (scan.num_rows, scan.sound_bytes) == (2, sound)


@pytest.mark.parametrize("name", [*NAMES, "out.parquet"])
def test_rows_that_the_input_does_not_have_are_dropped_and_not_counted(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, [0, 7, 3, 1 << 47])
    output = write(path, range(4), finish=True)
    assert (output.answered.all.count, output.answered.errors) == (2, {"prompt_too_long": 1})
    found = (
        pyarrow.parquet.read_table(path).column("index").to_pylist()
        if name == "out.parquet"
        else [row["index"] for row in rows_of(path)]
    )
    assert sorted(found) == [0, 1, 2, 3]
    again = open_job(path)
    again.close()
    assert again.finished is not None
    assert (again.finished.rows, again.finished.errors) == (4, {"prompt_too_long": 1})


def test_rows_beyond_a_limit_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [0, 7])
    write(path, range(4), finish=True, all_read=False)
    assert sorted(row["index"] for row in rows_of(path)) == [0, 1, 2, 3, 7]


def test_a_row_number_far_beyond_all_others_takes_little_memory() -> None:
    rows = RowSet()
    for row in (*range(40_000), 1 << 47):
        rows.add(row)
    assert (rows.next_missing(5), rows.next_missing(1 << 47)) == (40_000, (1 << 47) + 1)
    assert (rows.next_present(40_000), rows.next_present(1 << 48)) == (1 << 47, 1 << 48)
    assert rows.minus(rows).next_present(0) == 0
