"""Any bytes in: every line that is not blank becomes one row, good or with a typed error, and nothing raises."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvcli.core.sampling_params import SamplingParams
from nvcli.errors import UnreadableInput
from nvcli.job.input import line_source as lines_module
from nvcli.job.input import reader as reader_module
from nvcli.job.input.line_source import LineSource
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import RowParser
from output_jobs import extra_of

ReadRows = Callable[..., list[Job | JobResult]]
"""The fixture of conftest.py."""


def only(rows: list[Job | JobResult]) -> Job | JobResult:
    assert len(rows) == 1
    return rows[0]


def test_a_row_keeps_its_id_index_line_and_foreign_keys(read_rows: ReadRows) -> None:
    rows = read_rows(b'\n{"id":"a","prompt":"x","meta":{"k":[1,2.5,null]},"big":123456789012345678901234567890}\n')
    job = only(rows)
    assert isinstance(job, Job)
    assert (job.context.id, job.context.index, job.context.line, job.prompt) == ("a", 0, "line 2", "x")
    assert extra_of(job) == {"meta": {"k": [1, 2.5, None]}, "big": 123456789012345678901234567890}


def test_ids_are_integers_of_64_bits(read_rows: ReadRows) -> None:
    ids = [-(2**63), 2**63 - 1, -(2**63) - 1, 2**63]
    rows = read_rows("\n".join(f'{{"id":{row_id},"prompt":"p"}}' for row_id in ids).encode())
    assert [row.context.id for row in rows if isinstance(row, Job)] == ids[:2]
    assert [row.context.id for row in rows if isinstance(row, JobResult)] == ["row-2", "row-3"]


def test_bom_crlf_blank_lines_and_a_missing_last_newline(read_rows: ReadRows) -> None:
    rows = read_rows(b'\xef\xbb\xbf{"prompt":"a"}\r\n\r\n  \t\n{"prompt":"b"}\r\n\n{"prompt":"c"}')
    assert [(row.context.id, row.context.line) for row in rows] == [
        ("row-0", "line 1"),
        ("row-1", "line 4"),
        ("row-2", "line 6"),
    ]
    assert [row.prompt for row in rows if isinstance(row, Job)] == ["a", "b", "c"]


def test_rows_are_counted_on_over_several_inputs(read_rows: ReadRows) -> None:
    rows = read_rows(b'{"prompt":"a"}\n\n', b'\xef\xbb\xbf{"prompt":"b"}\nx\n')
    assert [(row.context.id, row.context.index) for row in rows] == [("row-0", 0), ("row-1", 1), ("row-2", 2)]
    assert rows[1].context.line.startswith("line 1 of ")
    assert rows[1].context.line.endswith("in1.jsonl")


BAD_ROWS = [
    (b"{", "invalid_json", "line 1: not valid JSON"),
    (b'{"prompt": "a",}', "invalid_json", "not valid JSON"),
    (b'{"prompt": "\xff"}', "invalid_json", "not UTF-8"),
    (b'{"a": [{"b": "x\\ud83d"}]}', "invalid_json", r"`a[0].b` is not text: it holds the lone surrogate \ud83d"),
    (b'{"prompt": "\\udc00 x"}', "invalid_json", r"`prompt` is not text: it holds the lone surrogate \udc00"),
    (
        b'{"a": {"\\ud800": 1}}',
        "invalid_json",
        r"a key of `a` is not text: it holds the lone surrogate \ud800",
    ),
    (b'{"\\ud800": 1}', "invalid_json", "a key of the row is not text"),
    (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}', "invalid_json", "it begins with a byte order mark (U+FEFF)"),
    (b'{"prompt": "a"}\r{"prompt": "b"}', "invalid_json", "a carriage return stands between two rows"),
    (b'{"prompt": "\xed\xa0\x80"}', "invalid_json", r"not UTF-8 text (it holds the lone surrogate \ud800"),
    (b'{"prompt": "\\ud800"}', "invalid_json", "not valid JSON"),
    (b"[" * 100_000 + b"]" * 100_000, "invalid_json", "nested too deep"),
    (b'{"prompt": "a", "x": ' + b'{"a":' * 600 + b"1" + b"}" * 601, "invalid_json", "nested too deep; allowed: 400"),
    (b'{"prompt": ' + b"[" * 985 + b"]" * 985 + b"}", "invalid_json", "nested too deep"),
    (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "trailing"),
    (b'{"prompt": "a", "sampling": {"temperature": NaN}}', "invalid_json", "`sampling.temperature` is not a finite"),
    (b'{"prompt": "a", "sampling": {"stop": "x", "top_p": 1e400}}', "invalid_json", "`sampling.top_p` is not a finite"),
    (b'{"messages": [1, -1e999]}', "invalid_json", "`messages[1]` is not a finite"),
    (b'{"prompt": "a", "id": ' + b"9" * 5000 + b"}", "invalid_json", "`id` holds a number that is too large"),
    (b'{"prompt": "a", "x": [1, NaN], }', "invalid_json", "not valid JSON: "),
    (b'{"prompt": "a", "x": 1NaN}', "invalid_json", "not valid JSON: "),
    (b'{"prompt": NaN, "x": NaN}', "missing_prompt", "none of"),
    (b'{"prompt": "a", "x": "\xff"}', "invalid_json", "not UTF-8"),
    (b"[1,", "invalid_json", "not valid JSON"),
    (b"3", "not_an_object", "got 3"),
    (b'["prompt"]', "not_an_object", '["prompt"]'),
    (b"null", "not_an_object", "null"),
    (b'{"id": 1.5, "prompt": "a"}', "invalid_id", "`id` is 1.5"),
    (b'{"id": true, "prompt": "a"}', "invalid_id", "`id` is true"),
    (b'{"id": 9007199254740992.0, "prompt": "a"}', "invalid_id", "`id` is 9007199254740992.0"),
    (b'{"id": 9223372036854775808, "prompt": "a"}', "invalid_id", "64 bits"),
    (b"{}", "missing_prompt", "`prompt_token_ids`"),
    (b'{"text": "a"}', "missing_prompt", "none of"),
    (b'{"prompt": "a", "messages": []}', "conflicting_prompts", "`prompt` and `messages`"),
    (b'{"prompt": 3}', "invalid_value", "`prompt` is 3; allowed: text"),
    (b'{"prompt": null}', "missing_prompt", "none of"),
    (b'{"messages": [], "prompt": null}', "invalid_value", "`messages` is empty"),
    (b'{"prompt": "a", "chat_template_kwargs": {}}', "invalid_value", "`chat_template_kwargs` is given, and this"),
    (b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 1}', "invalid_value", "kwargs` is 1;"),
    (
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": true}}',
        "invalid_value",
        "`chat_template_kwargs`: `tokenize` cannot be a variable of a chat template",
    ),
    (b'{"prompt": ["a"]}', "invalid_value", '`prompt` is ["a"]; allowed: text; give each text a row'),
    (b'{"prompt": [7, 8]}', "invalid_value", "`prompt` is [7, 8]; allowed: text; token ids are `prompt_token_ids`"),
    (b'{"messages": []}', "invalid_value", "`messages` is empty"),
    (b'{"messages": "hi"}', "invalid_value", '`messages` is "hi"'),
    (b'{"messages": [{"content": "x"}]}', "invalid_value", "`messages[0].role` is null"),
    (b'{"messages": [{"role": "user"}]}', "invalid_value", "`messages[0]` has no `content`"),
    (b'{"messages": [{"role": "a", "content": null, "tool_calls": null}]}', "invalid_value", "has no `content`"),
    (b'{"messages": [{"role": "user", "content": 3}]}', "invalid_value", "`messages[0].content` is 3"),
    (b'{"messages": [{"role": "user", "content": "a", "images": ["x"]}]}', "invalid_value", "`messages[0].images`: im"),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}',
        "unsupported_content",
        "content[0]` is",
    ),
    (b'{"prompt_token_ids": [1, "x"]}', "invalid_value", '`prompt_token_ids[1]` is "x"'),
    (b'{"prompt_token_ids": [1.5]}', "invalid_value", "`prompt_token_ids[0]` is 1.5"),
    (b'{"prompt": "a", "sampling": 3}', "invalid_sampling", "`sampling` is 3"),
    (b'{"prompt": "a", "sampling": {"temprature": 1}}', "invalid_sampling", "did you mean `temperature`?"),
    (b'{"prompt": "a", "sampling": {"temperature": -1}}', "invalid_sampling", "`sampling.temperature` is -1; allowed"),
    (b'{"prompt": "a", "sampling": {"temperature": "1"}}', "invalid_sampling", '`sampling.temperature` is "1"'),
    (b'{"prompt": "a", "sampling": {"top_p": 0}}', "invalid_sampling", "a number above 0 and at most 1"),
    (b'{"prompt": "a", "sampling": {"n": 1.0}}', "invalid_sampling", "`sampling.n` is 1.0"),
    (b'{"prompt": "a", "sampling": {"stop": ["a", 1]}}', "invalid_sampling", "`sampling.stop[1]` is 1"),
    (b'{"prompt": "a", "sampling": {"stop": ""}}', "invalid_sampling", "empty"),
    (b'{"prompt": "a", "sampling": {"logit_bias": {"7": 101}}}', "invalid_sampling", "`sampling.logit_bias.7` is 101"),
    (b'{"prompt": "a", "sampling": {"best_of": 2, "n": 3}}', "invalid_sampling", "`best_of` (2) is smaller"),
    (b'{"prompt": "a", "sampling": {"bad_words": [""]}}', "invalid_sampling", "`sampling.bad_words[0]` is"),
    (
        b'{"prompt": "a", "sampling": {"bad_words": [[]]}}',
        "invalid_sampling",
        "a list of 1 to 32 items, each item an integer",
    ),
    (b'{"prompt": "a", "sampling": {"allowed_token_ids": []}}', "invalid_sampling", "`sampling.allowed_token_ids` is"),
    (b'{"prompt": "a", "sampling": {"stop_repetition": {"min_count": 1}}}', "invalid_sampling", "min_count` is 1"),
    (b'{"prompt": "a", "sampling": {"truncate_prompt_tokens": 0}}', "invalid_sampling", "is 0; allowed"),
    (b'{"prompt": "a", "sampling": {"max_tokens": 9223372036854775808}}', "invalid_sampling", "`max_tokens` is 92233"),
    (b'{"prompt": "a", "sampling": {"top_k": 9223372036854775808}}', "invalid_sampling", "`top_k` is 92233"),
    (b'{"prompt": "a", "sampling": {"max_tokens": 2, "min_tokens": 3}}', "invalid_sampling", "`min_tokens` (3)"),
]


@pytest.mark.parametrize(("line", "kind", "message"), BAD_ROWS)
def test_a_bad_row_is_an_error_that_names_line_and_key_and_the_next_row_is_fine(
    read_rows: ReadRows, line: bytes, kind: str, message: str
) -> None:
    bad, good = read_rows(line + b'\n{"prompt": "good"}\n')
    assert isinstance(bad, JobResult)
    assert bad.error is not None
    assert bad.error.type == kind
    assert bad.error.message.startswith("line 1: ")
    assert message in bad.error.message
    assert len(bad.error.message) < 400
    assert isinstance(good, Job)


def test_an_error_row_keeps_its_id_and_foreign_keys(read_rows: ReadRows) -> None:
    bad = only(read_rows(b'{"id": "q7", "prompt": 1, "topic": "x"}'))
    assert isinstance(bad, JobResult)
    assert (bad.context.id, extra_of(bad)) == ("q7", {"topic": "x"})


@pytest.mark.parametrize(
    ("lines", "duplicates"),
    [
        ([b'{"id":"a","prompt":""}', b'{"id":"b","prompt":""}', b'{"id":"a","prompt":""}'], [2]),
        ([b'{"id":1,"prompt":""}', b'{"id":"1","prompt":""}'], []),
        ([b'{"id":5,"prompt":""}', b'{"id":5,"prompt":""}'], [1]),
        ([b'{"id":-5.0,"prompt":""}', b'{"id":-5,"prompt":""}', b'{"id":5e0,"prompt":""}'], [1]),
        ([b'{"id":2,"prompt":""}', b'{"prompt":""}', b'{"id":1,"prompt":""}', b"bad", b'{"id":3,"prompt":""}'], []),
        ([b'{"id":"row-1","prompt":""}', b'{"prompt":""}', b'{"id":"row-1-2","prompt":""}'], [2]),
        ([b"bad", b'{"id":"row-0","prompt":""}'], [1]),  # the error row answers to it
        ([b'{"id":"a","prompt":1}', b'{"id":"a","prompt":""}'], [1]),
    ],
)
def test_duplicate_ids(read_rows: ReadRows, lines: list[bytes], duplicates: list[int]) -> None:
    rows = read_rows(b"\n".join(lines))
    found = [
        row.context.index
        for row in rows
        if isinstance(row, JobResult) and row.error is not None and row.error.type == "duplicate_id"
    ]
    assert found == duplicates


def test_a_file_whose_ids_repeat(read_rows: ReadRows) -> None:
    data = b'{"id":"a","prompt":"p"}\n{"id":"a","prompt":"q"}\n'
    _, second = read_rows(data)
    assert isinstance(second, JobResult)
    assert second.error is not None
    assert "`job.id_field: none` (--id-field none" in second.error.message
    parser = RowParser({}, RowKeys(id="none"))
    rows = [parser.parse(line, index=index, where="") for index, line in enumerate(data.splitlines())]
    assert [(row.context.id, list(row.context.extra)) for row in rows] == [("row-0", ["id"]), ("row-1", ["id"])]


def test_sampling_of_a_row_lies_over_the_defaults(read_rows: ReadRows) -> None:
    rows = read_rows(
        b'{"prompt":"a","sampling":{"top_k":5,"max_tokens":null}}\n{"prompt":"b"}\n{"prompt":"c","sampling":{}}',
        defaults={"temperature": 0.5, "max_tokens": 7},
    )
    sampling = [row.sampling for row in rows if isinstance(row, Job)]
    assert sampling[0] == SamplingParams(temperature=0.5, top_k=5)
    assert sampling[1] == sampling[2] == SamplingParams(temperature=0.5, max_tokens=7)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"repetition_penalty": 5e-324}, "`sampling.repetition_penalty` is 5e-324; allowed: a number from 0.01 to 100"),
        ({"stop": ["x"] * 1025}, "`stop` holds 1,025 texts; allowed: at most 1,024"),
        ({"stop": ["x" * 40_000, "y" * 30_000]}, "`stop` holds 70,000 characters; allowed: at most 65,536 together"),
        (
            {"stop_token_ids": list(range(1025))},
            "`logit_bias`, `stop_token_ids`, `allowed_token_ids` and `bad_words` hold more than 1024 tokens",
        ),
    ],
)
def test_sampling_has_bounds(read_rows: ReadRows, sampling: dict[str, Any], message: str) -> None:
    result = only(read_rows(msgspec.json.encode({"prompt": "a", "sampling": sampling})))
    assert isinstance(result, JobResult)
    assert result.error is not None
    assert result.error.type == "invalid_sampling"
    assert message in result.error.message
    at_most = {"stop": ["x" * 64] * 1024, "stop_token_ids": list(range(1024))}
    assert isinstance(only(read_rows(msgspec.json.encode({"prompt": "a", "sampling": at_most}))), Job)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "sampling": {"x" * 3_000_000: 1}},
        {"custom_id": "a", "url": "/v1/completions", "body": {"x" * 3_000_000: 1}},
        {"prompt": ["x" * 3_000_000]},
        {"messages": [{"role": [["x", [1]]] * 400_000}]},
        {"id": {str(number): number for number in range(300_000)}},
    ],
)
def test_messages_about_large_values_are_short_and_soon_made(
    read_rows: ReadRows, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error row had a message of 20 MB, and seconds went into writing out what was not shown."""
    written: list[int] = []

    def count(encoder: json.JSONEncoder, value: Any, **options: Any) -> Iterator[str]:
        for piece in iterencode(encoder, value, **options):
            written.append(len(piece))
            yield piece

    iterencode = json.JSONEncoder.iterencode
    monkeypatch.setattr(json.JSONEncoder, "iterencode", count)
    result = only(read_rows(msgspec.json.encode(row)))
    assert isinstance(result, JobResult)
    assert result.error is not None
    assert len(result.error.message) < 700
    assert sum(written) < 3_100_000  # a text is written out, and no list or object


def test_text_parts_of_a_message_are_joined(read_rows: ReadRows) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]  # the second as in OpenAI's responses
    job = only(read_rows(msgspec.json.encode({"messages": [{"role": "user", "content": parts}]})))
    assert isinstance(job, Job)
    assert job.messages == [{"role": "user", "content": "a\nb"}]


def test_limit_stops_reading(read_rows: ReadRows) -> None:
    assert len(read_rows(b'{"prompt":"a"}\n' * 10, b'{"prompt":"b"}\n', limit=3)) == 3


def test_gzip_and_plain_together(tmp_path: Path) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt":"a"}\n') + gzip.compress(b'{"prompt":"b"}\n'))
    plain = tmp_path / "b.jsonl"
    plain.write_bytes(b'{"prompt":"c"}\n')
    reader = RowReader([str(packed), str(plain)], RowParser({}))
    rows = [row for batch in reader.batches() for row in batch]
    assert [row.prompt for row in rows if isinstance(row, Job)] == ["a", "b", "c"]
    assert reader.bytes_read == reader.bytes_total == packed.stat().st_size + plain.stat().st_size


@pytest.mark.parametrize("damage", ["truncated", "garbled"])
def test_a_damaged_gzip_file_ends_after_its_good_rows_and_no_others(tmp_path: Path, damage: str) -> None:
    path, other, last = (tmp_path / name for name in ("a.jsonl.gz", "b.jsonl", "c.jsonl.gz"))
    lines = b"".join(b'{"prompt":"%s"}\n' % os.urandom(30).hex().encode() for _ in range(20_000))
    data = gzip.compress(lines)
    half = len(data) // 2
    path.write_bytes(data[:half] if damage == "truncated" else data[:half] + b"\xff" * 1000)
    other.write_bytes(lines[:740])
    last.write_bytes(path.read_bytes())
    batches: list[list[Job | JobResult]] = []
    reader = RowReader([str(path), str(other), str(last)], RowParser({}))
    with pytest.raises(UnreadableInput, match=r"a\.jsonl\.gz: cannot be read past line \d+.*\n.*c\.jsonl\.gz: cannot"):
        batches.extend(reader.batches())
    rows = [row for batch in batches for row in batch]
    assert [row.context.index for row in rows] == list(range(len(rows)))
    assert sum(row.context.line.endswith("b.jsonl") for row in rows) == 10
    assert len(rows) > 2000
    assert reader.warnings.take_new()[0].startswith(f"warning: {path}: cannot be read past line")
    assert not reader.all_read
    assert reader.bytes_read <= (reader.bytes_total or 0)


def test_a_pipe_that_does_not_wait_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    monkeypatch.setattr("nvcli.job.input.line_source._open", lambda name: os.fdopen(read_end, "rb", buffering=0))
    lines = LineSource("-").lines()
    assert next(lines) is None
    later = threading.Timer(0.2, lambda: (os.write(write_end, b"a\nb"), os.close(write_end)))
    later.start()
    assert [line for line in lines if line is not None] == [b"a", b"b"]
    later.join()


def test_rows_of_a_slow_pipe_are_given_out_before_the_next_is_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    got_first = threading.Event()

    def write() -> None:
        with fifo.open("wb", buffering=0) as pipe:
            pipe.write(b'{"prompt":"a"}\n{"pro')
            assert got_first.wait(20)
            pipe.write(b'mpt":"b"}\n')

    writer = threading.Thread(target=write)
    writer.start()
    batches = RowReader([str(fifo)], RowParser({})).batches()
    assert len(next(batches)) == 1
    got_first.set()
    assert len(next(batches)) == 1
    assert list(batches) == []
    writer.join()


def test_batches_grow_from_few_rows_and_are_bounded(read_rows: ReadRows, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt":"a"}\n' * 3000)
    sizes = [len(batch) for batch in RowReader([str(path)], RowParser({})).batches()]
    assert sizes[0] == reader_module.FIRST_BATCH_ROWS
    assert max(sizes) == reader_module.MAX_BATCH_ROWS
    assert sum(sizes) == 3000


def test_a_line_much_longer_than_a_chunk(read_rows: ReadRows) -> None:
    prompt = "x" * (3 * lines_module.READ_BYTES[""] + 5)
    job = only(read_rows(msgspec.json.encode({"prompt": prompt})))
    assert isinstance(job, Job)
    assert job.prompt == prompt


JSON_ROWS = st.dictionaries(
    st.sampled_from(["id", "prompt", "messages", "prompt_token_ids", "sampling", "x"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
).map(msgspec.json.encode)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")) | JSON_ROWS, max_size=20),
    chunk_bytes=st.integers(1, 50),
)
def test_every_line_is_accounted_for_whatever_it_holds(
    read_rows: ReadRows, lines: list[bytes], chunk_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lines_module.READ_BYTES, "", chunk_bytes)
        rows = read_rows(b"\n".join(lines))
    numbers = [
        number
        for number, line in enumerate(lines, 1)
        if (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
    ]
    assert [row.context.index for row in rows] == list(range(len(numbers)))
    assert [row.context.line for row in rows] == [f"line {number}" for number in numbers]
    for row in rows:
        assert isinstance(row, Job) or row.error is not None
