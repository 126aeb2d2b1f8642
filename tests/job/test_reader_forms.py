"""What inputs may look like: compressed, with other column names, with huge lines, and partly answered already."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nvcli.errors import ConfigError
from nvcli.job import compression, line_splitter
from nvcli.job.compression import PIECE_BYTES, CompressionError, Unpacker, make_packer
from nvcli.job.input.known_input import SAMPLE_BYTES, WHOLE_BYTES, digest_file
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult
from nvcli.job.line_splitter import DroppedLine, LineSplitter
from nvcli.job.row_set import AnsweredRows, RowSet
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.row_ids import SeenIds
from output_jobs import extra_of

ReadRows = Callable[..., list[Job | JobResult]]


def read(path: Path) -> list[Job | JobResult]:
    reader = RowReader([str(path)], RowParser({}))
    rows = [row for batch in reader.batches() for row in batch]
    assert reader.all_read
    assert reader.bytes_read == reader.bytes_total
    return rows


def test_zstd_with_and_without_sizes_and_in_many_frames(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.zst"
    stream = zstandard.ZstdCompressor().compressobj()
    data = zstandard.compress(b'{"prompt":"a"}\n{"pro') + stream.compress(b'mpt":"b"}\n') + stream.flush()
    path.write_bytes(data + zstandard.compress(b"") + zstandard.compress(b'{"prompt":"c"}'))
    assert [row.prompt for row in read(path) if isinstance(row, Job)] == ["a", "b", "c"]


def test_what_the_formats_allow_between_and_behind_members(tmp_path: Path) -> None:
    for suffix in ("gz", "xz"):
        padded = tmp_path / f"in.jsonl.{suffix}"
        padded.write_bytes(make_packer(suffix)(b'{"prompt":"a"}\n') + bytes(1000))
        assert len(read(padded)) == 1
    skippable = bytes.fromhex("502a4d1804000000") + b"pzst"  # which pzstd writes before each frame
    frames = tmp_path / "in.jsonl.zst"
    frames.write_bytes(skippable + zstandard.compress(b'{"prompt":"a"}\n') + skippable + zstandard.compress(b"{}"))
    assert len(read(frames)) == 2


def test_xz_with_a_large_dictionary_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_XZ_MEMORY_BYTES", 1 << 20)
    path = tmp_path / "in.jsonl.xz"
    path.write_bytes(make_packer("xz")(b'{"prompt":"a"}\n'))
    with pytest.raises(ConfigError, match=r"cannot be read: its dictionary takes more than .*; pack it again with"):
        read(path)


@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2"])
@pytest.mark.parametrize("damage", ["truncated", "garbled", "not compressed"])
def test_a_damaged_file_ends_the_reading_after_its_good_rows(tmp_path: Path, suffix: str, damage: str) -> None:
    lines = b"".join(b'{"prompt":"%s"}\n' % os.urandom(30).hex().encode() for _ in range(20_000))
    data = make_packer(suffix)(lines)
    half = len(data) // 2
    path = tmp_path / f"in.jsonl.{suffix}"
    path.write_bytes({"truncated": data[:half], "garbled": data[:half] + b"\xff" * 1000}.get(damage, lines))
    rows: list[list[Job | JobResult]] = []
    with pytest.raises(ConfigError, match=r"in\.jsonl\.\w+: cannot be read( past line \d+)?: "):
        rows.extend(RowReader([str(path)], RowParser({})).batches())
    assert (sum(map(len, rows)) > 1000) == (damage != "not compressed" and suffix != "bz2")  # whose blocks are large


@given(
    parts=st.lists(st.binary(max_size=300), max_size=6),
    suffix=st.sampled_from(["gz", "zst", "bz2", "xz"]),
    size=st.integers(1, 500),
    cut=st.integers(0, 100),
)
def test_members_are_told_apart_wherever_chunks_end(parts: list[bytes], suffix: str, size: int, cut: int) -> None:
    members = [make_packer(suffix)(part) for part in parts]
    ends = [sum(map(len, members[: number + 1])) for number in range(len(members))]
    data = b"".join(members)
    data = data[: max(0, len(data) - cut)]
    unpacker = Unpacker(suffix)
    plain = b""
    for start in range(0, len(data), size):
        plain += b"".join(unpacker.feed(data[start : start + size]))
    assert b"".join(parts).startswith(plain)
    assert unpacker.member_end == max((end for end in ends if end <= len(data)), default=0)
    if unpacker.member_end == len(data):
        unpacker.end()
    else:
        with pytest.raises(CompressionError):
            unpacker.end()


def rle_frame(byte: bytes, num_blocks: int) -> bytes:
    """A frame of zstd that unpacks to 32,768 times its size: blocks of one byte, which is repeated 131,072 times."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0, 7 << 3])  # blocks without a size before them, a window of 128 KiB
    blocks = [((1 << 17 << 3) + (1 << 1)).to_bytes(3, "little") + byte] * num_blocks
    return header + b"".join(blocks) + b"\x01\0\0"  # the last one is empty


@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2", "xz"])
@pytest.mark.parametrize("byte", [b"\n", b"a"])
def test_what_unpacks_to_much_comes_in_small_pieces(suffix: str, byte: bytes) -> None:
    plain = byte * ((4 if suffix in ("bz2", "xz") else 32) << 20)
    data = rle_frame(byte, 256) if suffix == "zst" else make_packer(suffix)(plain)
    unpacker = Unpacker(suffix)
    pieces = [*unpacker.feed(data[:500]), *unpacker.feed(data[500:])]
    unpacker.end()
    assert b"".join(pieces) == plain
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert unpacker.member_end == len(data)


@pytest.mark.parametrize("name", ["in.jsonl.zst", "in.json.zst", "in.txt.zst", "in.csv.zst"])
def test_blank_lines_are_counted(tmp_path: Path, name: str) -> None:
    num_blocks = 4
    path = tmp_path / name
    path.write_bytes(zstandard.compress(b"prompt") + rle_frame(b"\n", num_blocks) + zstandard.compress(b'"p"\n'))
    if name != "in.csv.zst":
        path.write_bytes(rle_frame(b"\n", num_blocks) + zstandard.compress(b'{"prompt": "p"}'))
    (row,) = read(path)
    assert row.context.line == f"line {(num_blocks << 17) + 1}"


def test_a_cell_keeps_its_many_blank_lines(tmp_path: Path) -> None:
    for line_end in ("\n", "\r\n"):
        path = tmp_path / "in.csv"
        cell = f"a{line_end * 1000}b"
        path.write_bytes(f'prompt{line_end}"{cell}"{line_end * 700}q{line_end}'.encode())
        first, second = read(path)
        assert isinstance(first, Job)
        assert (first.prompt, first.context.line) == (cell, "lines 2 to 1002")
        assert second.context.line == "line 1702"


def test_other_key_names(read_rows: ReadRows, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'{"question":"q","key":"a","prompt":"kept","id":5}\n'
        b'{"chat":[{"role":"user","content":"x"}]}\n'
        b'{"question":1,"key":"c"}\n'
        b'{"prompt":"p"}\n'
        b'{"question":"q","chat":[]}\n'
        b'{"question":"q","key":[]}\n'
        b'{"question":"q","key":"a"}\n'
    )
    parser = RowParser({}, RowKeys(prompt="question", messages="chat", id="key"))
    rows = [row for batch in RowReader([str(path)], parser).batches() for row in batch]
    assert isinstance(rows[0], Job)
    assert (rows[0].context.id, rows[0].prompt, extra_of(rows[0])) == ("a", "q", {"prompt": "kept", "id": 5})
    assert isinstance(rows[1], Job)
    messages = [row.error.message for row in rows if isinstance(row, JobResult) and row.error is not None]
    expected = [
        "`question` is 1",
        "none of `question`, `chat` and `prompt_token_ids`",
        "`question` and `chat` are given",
        "`key` is []",
        'the id "a" is the id of an earlier row',
    ]
    assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def test_a_line_of_twenty_megabytes(read_rows: ReadRows) -> None:
    prompt = b"x" * 20_000_000
    rows = read_rows(b'{"prompt":"' + prompt + b'"}\n{"prompt":"' + prompt + b'\n{"prompt":"b"}')
    assert isinstance(rows[0], Job)
    assert rows[0].prompt == prompt.decode()
    assert isinstance(rows[1], JobResult)
    assert rows[1].error is not None
    assert len(rows[1].error.message) < 200
    assert isinstance(rows[2], Job)


def test_a_line_without_end_is_an_error_row_and_not_kept(read_rows: ReadRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_splitter, "MAX_LINE_BYTES", 1_000_000)
    rows = read_rows(b'{"prompt":"a"}\n' + b"x" * 3_000_000 + b'\n{"prompt":"b"}\n')
    assert isinstance(rows[1], JobResult)
    assert rows[1].error is not None
    assert (rows[1].context.id, rows[1].error.type) == ("row-1", "line_too_long")
    assert isinstance(rows[2], Job)


@given(st.lists(st.binary(max_size=30)), st.integers(1, 40))
def test_lines_of_any_chunks(chunks: list[bytes], bound: int) -> None:
    splitter = LineSplitter(max_bytes=bound)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    last = splitter.end()
    expected = b"".join(chunks).split(b"\n")
    if not expected[-1]:
        expected.pop()
    found = lines if last is None else [*lines, last]
    assert len(found) == len(expected)
    for line, whole in zip(found, expected, strict=True):
        # A line within one chunk is kept whatever its length: it is in memory anyway.
        assert line == whole or (isinstance(line, DroppedLine) and line.num_bytes == len(whole) > bound)


ANY_ROWS = st.lists(
    st.sampled_from(
        [
            b'{"prompt":"x"}',
            b'{"id":"a","prompt":"x"}',
            b'{"id":"b","prompt":"x"}',
            b'{"id":3,"prompt":"x"}',
            b'{"id":5,"prompt":1}',
            b'{"id":"a","prompt":1}',
            b'{"id":1.5,"prompt":"x"}',
            b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}',
            b'{"custom_id":"c","url":"/v1/completions","body":{"prompt":1}}',
            b'{"prompt":"x","custom_id":"a","body":{}}',
            b"bad",
            b"",
        ]
    ),
    max_size=14,
)


@given(lines=ANY_ROWS, answered=st.sets(st.integers(0, 13)))
def test_rows_that_are_answered_are_passed_over_and_still_count(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], answered: set[int]
) -> None:
    """The rest comes out as it would have in one run: the same ids, lines, and duplicates."""
    path = tmp_path_factory.getbasetemp() / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    whole = read(path)
    done = AnsweredRows()
    for row in whole:
        if row.context.index in answered:
            done.all.add(row.context.index)
            if isinstance(row, JobResult):
                done.failed.add(row.context.index)
    reader = RowReader([str(path)], RowParser({}), answered=done)
    rest = [row for batch in reader.batches() for row in batch]
    assert rest == [row for row in whole if row.context.index not in answered]
    assert reader.rows_read == len(whole)


@given(st.sets(st.integers(0, 200)), st.sets(st.integers(0, 200)))
def test_sets_of_rows(rows: set[int], dropped: set[int]) -> None:
    found, others = RowSet(), RowSet()
    for row in sorted(rows, reverse=True):
        assert found.add(row)
        assert not found.add(row)
    for row in rows & dropped:
        others.add(row)
    assert found.count == len(rows)
    assert {row for row in range(300) if row in found} == rows
    for start in range(0, 210, 7):
        assert found.next_missing(start) == next(row for row in range(start, 300) if row not in rows)
        following = found.next_present(start)
        assert following == min((row for row in rows if row >= start), default=following)
        assert following in rows or not any(row >= start for row in rows)
    assert others.is_within(found)
    assert found.is_within(others) == (rows <= dropped)
    rest = found.minus(others)
    assert rest.count == len(rows - dropped)
    assert {row for row in range(300) if row in rest} == rows - dropped


NAMES = st.builds(lambda index, tail: f"row-{index}{tail}", st.integers(0, 60), st.sampled_from(["", "", "-2", "-3"]))


@given(st.lists(st.none() | st.integers(-5, 60) | st.text(max_size=2) | NAMES, max_size=60))
def test_seen_ids(ids: list[int | str | None]) -> None:
    """None: a row without an id. Its name is one that no earlier row has."""
    seen, known = SeenIds(), set[int | str]()
    for index, row_id in enumerate(ids):
        if row_id is None:
            name = seen.name(index)
            assert name not in known
            assert name.startswith(f"row-{index}")
            known.add(name)
        else:
            assert seen.add(row_id) == (row_id not in known)
            known.add(row_id)


def test_numbers_that_python_hashes_alike_are_different_ids() -> None:
    seen = SeenIds()
    assert all(seen.add(number) for number in (-1, -2, 0, 2**61 - 1, 1, 2**61))
    assert not any(seen.add(number) for number in (-1, -2, 0, 2**61 - 1, 1, 2**61))


def test_many_seen_ids() -> None:
    seen = SeenIds()
    assert all(seen.add(f"id-{number}") for number in range(50_000))
    assert all(seen.add(number) for number in range(50_000))
    assert not any(seen.add(f"id-{number}") for number in range(50_000))
    assert not any(seen.add(number) for number in range(50_000))
    assert all(seen.name(number) == f"row-{number}" for number in range(50_000, 60_000))
    assert not any(seen.add(f"row-{number}") for number in range(50_000, 60_000))


def test_a_digest_sees_size_and_sampled_places(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.truncate(10 * WHOLE_BYTES)  # a hole: nothing is written
    digest = digest_file(path)
    assert digest_file(path) == digest
    for place in (0, 10 * WHOLE_BYTES - 1, SAMPLE_BYTES - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        changed = digest_file(path)
        assert changed != digest
        digest = changed
    os.truncate(path, 10 * WHOLE_BYTES - 1)
    assert digest_file(path) != digest
