"""Rows of outputs of every format: all, some at random, and the one that is named; what is no row is passed over."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import output_jobs
from nvcli.errors import ConfigError
from nvcli.job.job import RowForm
from nvcli.tools.show import output_file
from nvcli.tools.show.answers import ShownRow, read_shown_row
from nvcli.tools.show.show import Selection, choose_file, shown_rows

FORMATS = ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet", "out.csv", "out.tsv.gz"]


def rows_of(path: Path, **wanted: Any) -> list[ShownRow]:
    return [row for row, _ in shown_rows(choose_file(str(path)), Selection(**wanted), random.Random(1))]


def indices(path: Path, **wanted: Any) -> list[int]:
    return [row.index for row in rows_of(path, **wanted)]


def native(index: int, text: str = "x", **keys: Any) -> dict[str, Any]:
    reason = keys.pop("finish_reason", "stop")
    choices = [{"index": 0, "text": text, "finish_reason": reason}]
    return {"id": f"r{index}", "index": index, "choices": choices, "usage": {}, "error": None, **keys}


def write_lines(path: Path, rows: list[dict[str, Any] | str], **style: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row, **style)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("form", [RowForm.NATIVE, RowForm.CHAT, RowForm.COMPLETION])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_form(tmp_path: Path, name: str, form: RowForm) -> None:
    path = tmp_path / name
    output_jobs.write(path, range(8), finish=True, form=form).close()
    rows = rows_of(path)
    assert [row.index for row in rows] == list(range(8))
    assert [row.id for row in rows] == [f"r{index}" for index in range(8)]
    assert [row.error for row in rows if row.error] == [f"prompt_too_long: line {line}: too long" for line in (4, 5)]
    assert [choice.text for choice in rows[2].choices] == ["ünswer 2\n"]
    assert rows[2].prompt_tokens == 2
    assert indices(path, errors=True) == [3, 4]
    assert indices(path, id="r6") == [6]
    assert indices(path, index=5) == [5]
    assert indices(path, limit=2) == [0, 1]
    assert len(set(indices(path, random=3))) == 3
    assert sorted(indices(path, random=50)) == list(range(8))
    assert indices(path, random=9, errors=True) == [3, 4]
    with pytest.raises(ConfigError, match=r"out\..* has no row with the id r9"):
        rows_of(path, id="r9")
    with pytest.raises(ConfigError, match="has no row with the index 8"):
        rows_of(path, index=8)


def test_rows_that_were_cut_and_rows_that_failed(tmp_path: Path) -> None:
    rows: list[dict[str, Any] | str] = [
        native(0, "a length"),
        native(1, finish_reason="length"),
        native(2, choices=[], error={"type": "t", "message": "m"}, note={"error": None}),
        native(3, '"error":null "length"'),
        native(4, note={"error": 1}),
    ]
    for style in ({}, {"separators": (",", ":")}):
        path = write_lines(tmp_path / "o.jsonl", rows, **style)
        assert indices(path, cut=True) == [1]
        assert indices(path, errors=True) == [2]
        assert indices(path, errors=True, cut=True) == [1, 2]


def test_ids_are_found_as_they_are_typed(tmp_path: Path) -> None:
    rows: list[dict[str, Any] | str] = [
        native(0, '"7" "é" "a\\"b"', id=17),
        native(1, "7", id=7, note="r2"),
        native(2, id="é"),
        native(3, id='a"b'),
        native(4, id="-5"),
    ]
    for style in ({}, {"separators": (",", ":"), "ensure_ascii": False}):
        path = write_lines(tmp_path / "o.jsonl", rows, **style)
        found = {typed: indices(path, id=typed) for typed in ("17", "7", "é", 'a"b', "-5")}
        assert found == {"17": [0], "7": [1], "é": [2], 'a"b': [3], "-5": [4]}
        assert [indices(path, index=number) for number in range(5)] == [[number] for number in range(5)]


def test_what_is_no_row_is_passed_over(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "o.jsonl", ["garbage", native(0), "\0\0\0", native(1), '{"index": 5}', native(2)])
    with path.open("a") as file:
        file.write('{"id":"r3","index":3,"choices":[{"ind')
    assert indices(path) == [0, 1, 2]
    assert indices(path, random=9) == [0, 1, 2]
    packed = tmp_path / "o.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()) + gzip.compress(b"torn" * 99)[:30])
    assert indices(packed) == [0, 1, 2]


@pytest.mark.parametrize("is_large", [False, True])
def test_rows_at_random_are_all_as_likely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    """Long rows are found more often, and must not be shown more often."""
    path = write_lines(tmp_path / "o.jsonl", [native(index, "x" * (900 * (index % 2))) for index in range(40)])
    if is_large:
        monkeypatch.setattr(output_file, "_DRAWN_BYTES", 0)
    rng, file = random.Random(3), output_file.open_output_file(path)
    drawn: Counter[int] = Counter()
    for _ in range(300):
        rows = [row.index for line in file.sample(2, rng) if (row := read_shown_row(line)) is not None]
        assert rows == sorted(set(rows))
        assert len(rows) == 2
        drawn.update(rows)
    long = sum(count for index, count in drawn.items() if index % 2)
    assert 0.3 * drawn.total() < long < 0.7 * drawn.total()
    assert len(drawn) == 40


def test_a_table_that_is_not_complete_yet(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    output_jobs.write(path, range(3)).close()
    assert not path.exists()
    assert indices(path) == [0, 1, 2]


def test_files_that_are_no_outputs_say_so(tmp_path: Path) -> None:
    cases: dict[str, tuple[str | None, str]] = {
        "in.jsonl": ('{"prompt": "a"}\n', r"is not an output of nvcli: it begins with '\{\"prompt\": \"a\"\}'"),
        "indexed.jsonl": ('{"prompt": "a", "index": 3, "response": 5}\n', "is not an output of nvcli"),
        "empty.jsonl": ("", "empty.jsonl has no rows"),
        "x.csv": ("a,b\n1,2\n", "x.csv is not an output of nvcli"),
        "y.csv": ("a,a\n", "names `a` twice"),
        "x.parquet": ("PAR1", "x.parquet: cannot be read as Parquet"),
        "none.jsonl": (None, "none.jsonl cannot be read: no such file"),
    }
    for name, (text, message) in cases.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            rows_of(tmp_path / name)
    with pytest.raises(ConfigError, match="it is a folder"):
        rows_of(tmp_path)
    write_lines(tmp_path / "in.out.jsonl", [native(0)])
    with pytest.raises(ConfigError, match=r"its answers may be in .*in\.out\.jsonl"):
        rows_of(tmp_path / "in.jsonl")
