"""Any bytes in: each line that is not blank is one row of the output, in its form, and a later run finds them all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvcli.job.input.reader import RowReader
from nvcli.job.job import Choice, Job, JobResult
from nvcli.job.output.output_scan import scan_output
from nvcli.job.output.writer import ResultWriter
from nvcli.job.rows.parser import RowParser
from output_jobs import open_job, rows_of

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["id", "prompt", "messages", "prompt_token_ids", "sampling", "index", "choices", "error", "custom_id", "url",
        "body", "method", "response", "x"]  # fmt: skip
NATIVE = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)
BODY_KEYS = ["messages", "prompt", "n", "stop", "stream", "logprobs", "top_logprobs", "model", "max_tokens", "x"]
BATCH = st.fixed_dictionaries(
    {
        "custom_id": st.text(max_size=3) | SCALARS,
        "url": st.sampled_from(["/v1/chat/completions", "/v1/completions"]) | VALUES,
        "body": st.dictionaries(st.sampled_from(BODY_KEYS), VALUES, max_size=4) | VALUES,
    }
)
LINES = st.lists(
    st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")) | (NATIVE | BATCH).map(msgspec.json.encode),
    max_size=12,
)


@example(lines=[b'{"custom_id":"a","url":"","body":{},"index":[]}'], text="", name="out.jsonl")
@given(lines=LINES, text=st.text(max_size=20), name=st.sampled_from(["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"]))
def test_every_line_is_one_row(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], text: str, name: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    source, path = folder / "in.jsonl", folder / name
    source.write_bytes(b"\n".join(lines))
    reader = RowReader([str(source)], RowParser({}))
    output = open_job(path, overwrite=True)
    writer = ResultWriter(output.sink, output.form)
    for batch in reader.batches():
        writer.write(
            JobResult(context=row.context, choices=[Choice(index=0, text=text, finish_reason="stop")])
            if isinstance(row, Job)
            else row
            for row in batch
        )
    writer.close()
    output.close()
    num_rows = sum(1 for line in (b"\n".join(lines)).removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip())
    assert len(rows_of(path)) == num_rows == reader.rows_read
    scan = scan_output(path)
    assert scan.num_rows == num_rows
    assert scan.is_in_order
    assert scan.num_damaged == 0
    assert scan.sound_bytes == path.stat().st_size
    failed = [index for index, row in enumerate(rows_of(path)) if row["error"] is not None]
    assert [index for index in range(num_rows) if index in scan.answered.failed] == failed
