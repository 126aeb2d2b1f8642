"""An output follows its input: rows that have not changed keep their answers, and nothing else is left of old rows."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from nvcli.core.config_types import Order
from nvcli.errors import ConfigError, OutputError, RowError
from nvcli.job.input import known_input
from nvcli.job.input.known_input import know_inputs
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Choice, Job, JobResult, Logprobs, Usage, failed
from nvcli.job.output.job_output import JobOutput, OutputOptions, open_output
from nvcli.job.output.locked_file import LockedFile
from nvcli.job.output.manifest import Manifest, load_manifest, save_manifest
from nvcli.job.output.merge import merge_outputs
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.writer import ResultWriter
from nvcli.job.own_files import digests_path, is_parquet, manifest_path, temporary_files
from nvcli.job.rows.parser import RowParser
from nvcli.job.shard import SHARD_FACT, WHOLE, Shard
from output_jobs import plain_bytes

NAMES = ["out.jsonl", "out.jsonl.gz", "out.parquet"]
TOP_LOGPROBS = [[{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.25}]]
"""The alternatives of the tokens of each answer, as a table has them."""


class UpdatedJob:
    """A job of which the input changes; each run answers with its own number."""

    def __init__(self, folder: Path, name: str = "out.jsonl", order: Order = "completion") -> None:
        self.source = folder / "in.jsonl"
        self.sources = [self.source]
        self.path = folder / name
        self.order: Order = order
        self.fails: set[str] = set()
        """Prompts for which the KV cache is too small."""
        self.num_runs = 0
        self.computed: list[str] = []
        """The prompts that the last run computed."""

    def write(self, *rows: dict[str, Any] | str) -> None:
        self.source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

    def run(
        self,
        *,
        most: int | None = None,
        facts: dict[str, Any] | None = None,
        shard: Shard | None = None,
        **options: Any,
    ) -> JobOutput:
        """Run the job; `most`: until so many rows were read, and then cut it short."""
        names = list(map(str, self.sources))
        self.num_runs += 1
        self.computed = []
        manifest = Manifest(
            created=1000,
            model="m",
            facts={**(facts or {}), **({} if shard is None else {SHARD_FACT: str(shard)})},
            inputs=[(each.name, each.description) for each in know_inputs(names)],
        )
        identify = RowReader(names, RowParser({})).identify_all
        settings = OutputOptions(order=self.order, identify_rows=identify, shard=shard, **options)
        output = open_output(str(self.path), manifest, settings)
        try:
            if output.finished is None:
                reader = RowReader(
                    names,
                    RowParser({}),
                    answered=output.answered,
                    digests=output.digests,
                    limit=most,
                    shard=shard or WHOLE,
                )
                self._answer(output, reader, is_cut=most is not None)
        finally:
            output.close()
        return output

    def _answer(self, output: JobOutput, reader: RowReader, *, is_cut: bool) -> None:
        answered = output.answered.all
        reorder = ReorderBuffer(answered.next_missing, max_bytes=1000) if self.order == "input" else None
        writer = ResultWriter(output.sink, output.form, reorder=reorder)
        results = [self._result(row) for batch in reader.batches() for row in batch]
        writer.write(reversed(results))
        if is_cut:
            writer.close_early()
            return
        writer.close()
        errors = output.answered.errors + Counter(each.error.type for each in results if each.error is not None)
        output.finish(
            rows=answered.count + len(results), errors=errors, rows_read=reader.rows_read, all_read=reader.all_read
        )

    def _result(self, row: Job | JobResult) -> JobResult:
        if isinstance(row, JobResult):
            return row
        prompt = row.prompt or str(row.messages)
        self.computed.append(prompt)
        if prompt in self.fails:
            return failed(row.context, RowError("kv_cache_too_small", "too large"))
        logprobs = Logprobs(tokens=["a"], token_logprobs=[-0.5], top_logprobs=[{"a": -0.5, "b": -1.25}])
        choice = Choice(index=0, text=f"{self.num_runs}: {prompt}", finish_reason="stop", logprobs=logprobs)
        return JobResult(context=row.context, choices=[choice], usage=Usage(prompt_tokens=7))

    def lines(self) -> dict[Any, bytes]:
        """The lines of a JSONL output by their ids."""
        return {json.loads(line)["id"]: line for line in plain_bytes(self.path).splitlines()}

    def answers(self) -> list[tuple[Any, str | None]]:
        """Id and text, or the type of the error, of each row in the order of the input."""
        rows: list[dict[str, Any]]
        if is_parquet(self.path):
            rows = pyarrow.parquet.read_table(self.path).to_pylist()
        else:
            rows = [json.loads(line) for line in plain_bytes(self.path).splitlines()]
        rows.sort(key=lambda row: row["index"])
        assert [row["index"] for row in rows] == list(range(len(rows)))
        return [(row["id"], row["error"]["type"] if row["error"] else row["choices"][0]["text"]) for row in rows]

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.path.parent.iterdir() if path != self.source}


def rows_of(ids: Sequence[Any], **more: Any) -> list[dict[str, Any]]:
    return [{"id": each, "prompt": f"p{each}", **more} for each in ids]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["input", "completion"])
def test_only_what_has_changed_is_answered_again(tmp_path: Path, name: str, order: Order) -> None:
    job = UpdatedJob(tmp_path, name, order)
    old = rows_of(range(10), kept="ü", nested={"a": [1]})
    job.write(*old)
    job.run()
    before = job.lines() if not is_parquet(job.path) else {}
    files = job.files()
    new = [old[0], {**old[9], "prompt": "other"}, *old[1:4], *old[5:9], {**old[0], "id": 10}, {**old[0], "id": 11}]
    job.write(*new)
    with pytest.raises(ConfigError, match=r"made from another input: 1 row edited, 2 new, 1 gone\n  input") as error:
        job.run()
    assert "--update" in str(error.value)
    assert job.files() == files
    output = job.run(update=True)
    assert "the input has changed: 1 row edited, 2 new, 1 gone" in output.notes
    assert sorted(job.computed) == ["other", "p0", "p0"]
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    texts = {each: f"1: p{each}" for each in kept} | {9: "3: other", 10: "3: p0", 11: "3: p0"}
    assert job.answers() == [(row["id"], texts[row["id"]]) for row in new]
    assert job.run().finished is not None
    assert set(job.files()) == set(files)
    if is_parquet(job.path):
        (row,) = [row for row in pyarrow.parquet.read_table(job.path).to_pylist() if row["id"] == 7]
        assert (row["kept"], row["nested"], row["usage"]["prompt_tokens"]) == ("ü", '{"a": [1]}', 7)
        assert row["choices"][0]["logprobs"]["top_logprobs"] == TOP_LOGPROBS
        return
    after = job.lines()
    assert after[0] == before[0]
    for each in kept[1:]:
        index = next(index for index, row in enumerate(new) if row["id"] == each)
        assert after[each] == before[each].replace(b'"index":%d,' % each, b'"index":%d,' % index, 1)
    if order == "input":
        assert list(after) == [row["id"] for row in new]


def test_a_table_of_an_earlier_version_is_brought_up_to_its_input(tmp_path: Path) -> None:
    """There the alternatives of tokens were maps."""
    job = UpdatedJob(tmp_path, "out.parquet")
    job.write(*rows_of(range(3)))
    job.run()
    table = pyarrow.parquet.read_table(job.path)
    rows = table.to_pylist()
    for row in rows:
        for top in (logprobs := row["choices"][0]["logprobs"])["top_logprobs"]:
            logprobs["top_logprobs"] = [[(each["token"], each["logprob"]) for each in top]]
    maps = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.float64()))
    choice = table.schema.field("choices").type.value_type
    old_logprobs = pyarrow.struct([*list(choice.field("logprobs").type)[:2], ("top_logprobs", maps)])
    old_choice = pyarrow.struct(
        [(field.name, old_logprobs if field.name == "logprobs" else field.type) for field in choice]
    )
    at = table.schema.get_field_index("choices")
    schema = table.schema.set(at, pyarrow.field("choices", pyarrow.list_(old_choice)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), job.path)
    manifest = load_manifest(job.path)
    assert manifest is not None
    assert manifest.finished is not None
    finished = msgspec.structs.replace(manifest.finished, output_bytes=job.path.stat().st_size)
    save_manifest(job.path, msgspec.structs.replace(manifest, finished=finished))
    job.write(*rows_of(range(4)))
    job.run(update=True)
    assert job.computed == ["p3"]
    rows = pyarrow.parquet.read_table(job.path).to_pylist()
    assert [row["choices"][0]["logprobs"]["top_logprobs"] for row in rows] == [TOP_LOGPROBS] * 4


def test_rows_that_are_added_at_the_end_leave_the_lines_alone(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.write(*rows_of(range(300)), "no json")
    job.run()
    before, inode = job.path.read_bytes(), job.path.stat().st_ino
    job.write(*rows_of(range(300)), "no json", *rows_of(range(300, 500)))
    with pytest.raises(ConfigError, match=r": 200 rows new\n"):
        job.run()
    job.run(update=True)
    assert (len(job.computed), job.path.stat().st_ino) == (200, inode)
    assert job.path.read_bytes().startswith(before)


def test_retrying_is_enough_where_only_failed_rows_were_edited(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.fails = {"p2"}
    old = rows_of(range(5))
    job.write(old[0], '{"id": 1, "prompt": broken', *old[2:])
    job.run()
    job.fails = set()
    job.write(*old)
    job.run(retry_errors=True)
    assert sorted(job.computed) == ["p1", "p2"]
    job.write({**old[0], "prompt": "other"}, *old[1:])
    with pytest.raises(ConfigError, match=r"1 row edited\n(?s:.*)--retry-errors alone is enough if only failed"):
        job.run(retry_errors=True)
    job.write(*old, *rows_of([5]))
    with pytest.raises(ConfigError, match="1 row new"):
        job.run(retry_errors=True)


def test_a_failed_row_that_has_not_changed_is_not_tried_again(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.fails = {"p2", "p0"}
    job.write(*rows_of(range(4)))
    job.run()
    line = job.lines()[0]
    job.write(*rows_of([0, 2, 3, 4]))
    job.fails = set()
    job.run(update=True)
    assert sorted(job.computed) == ["p2", "p4"]  # the message of row 2 named another line
    assert job.lines()[0] == line
    job.write(*rows_of([0, 2, 3, 4, 5]))
    job.run(update=True, retry_errors=True)
    assert sorted(job.computed) == ["p0", "p5"]


def test_rows_without_an_id_are_known_by_their_bytes_and_named_by_their_place(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    rows = [{"prompt": text} for text in "abcdefa"]
    job.write(*rows)
    job.run()
    job.write(*rows[:2], {"prompt": "C"}, *rows[4:], {"prompt": "g"})
    job.run(update=True)
    assert sorted(job.computed) == ["C", "g"]
    texts = ["1: a", "1: b", "2: C", "1: e", "1: f", "1: a", "2: g"]
    assert job.answers() == [(f"row-{index}", text) for index, text in enumerate(texts)]
    job.write({"id": "row-3", "prompt": "x"}, *rows[:2], {"prompt": "C"})
    job.run(update=True)
    assert job.computed == ["x"]
    assert job.answers() == [("row-3", "3: x"), ("row-1", "1: a"), ("row-2", "1: b"), ("row-3-2", "2: C")]


def test_a_row_whose_id_another_row_takes_or_gives_up_is_looked_at_again(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.write(*rows_of(["a", "b"]), {"id": "a", "prompt": "second"})
    job.run()
    assert job.answers()[2] == ("a", "duplicate_id")
    job.write(*rows_of(["c", "b"]), {"id": "a", "prompt": "second"}, *rows_of(["d"]))
    job.run(update=True)
    assert job.answers() == [("c", "2: pc"), ("b", "1: pb"), ("a", "2: second"), ("d", "2: pd")]
    job.write({"id": "b", "prompt": "first"}, *rows_of(["b", "d"]))
    job.run(update=True)
    assert job.answers() == [("b", "3: first"), ("b", "duplicate_id"), ("d", "2: pd")]


def test_openai_rows(tmp_path: Path) -> None:
    def row(name: str, text: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}]}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    for name in ("out.jsonl", "out.parquet"):
        job = UpdatedJob(tmp_path, name)
        job.write(row("a", "A"), row("b", "B"), row("c", "C"))
        job.run()
        job.write(row("c", "C"), row("b", "other"), row("a", "A"))
        job.run(update=True)
        assert len(job.computed) == 1
        if is_parquet(job.path):
            rows = pyarrow.parquet.read_table(job.path).to_pylist()
            rows = [{**each, "response": json.loads(each["response"])} for each in rows]
        else:
            rows = [json.loads(line) for line in plain_bytes(job.path).splitlines()]
        for index, name in enumerate("cba"):
            (found,) = [each for each in rows if each["custom_id"] == name]
            assert (found["id"], found["response"]["request_id"]) == (f"batch_req_{index}", f"req_{index}")
            body = found["response"]["body"]
            assert body["id"] == f"chatcmpl-{index}"
            assert body["choices"][0]["message"]["content"].startswith("2: " if name == "b" else "1: ")


@pytest.mark.parametrize("is_read", [True, False])
def test_a_job_that_was_cut_short(tmp_path: Path, is_read: bool) -> None:
    """Rows that were not read yet cannot be told from new ones."""
    job = UpdatedJob(tmp_path)
    old = rows_of(range(10))
    job.write(*old)
    job.run(most=6)
    if is_read:
        job.run()
    job.write({**old[0], "prompt": "other"}, *old[1:], *rows_of([10]))
    with pytest.raises(ConfigError, match="1 row edited, 1 new" if is_read else "1 row edited, 5 not read before"):
        job.run()
    job.run(update=True)
    assert len(job.computed) == (2 if is_read else 6)
    assert [text for _, text in job.answers()][:6] == [f"{job.num_runs}: other", *(f"1: p{i}" for i in range(1, 6))]


def test_several_inputs(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    first, second, third = (tmp_path / f"{name}.jsonl" for name in "abc")
    for path, ids in ((first, "ab"), (second, "cd"), (third, "ef")):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(list(ids))))
    job.sources = [first, third]
    job.run()
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(second.read_bytes()))
    job.sources = [first, packed, third]
    with pytest.raises(ConfigError, match=r"2 rows new\n  inputs: \S+a.jsonl, \S+c.jsonl → \S+, \S+b.jsonl.gz, \S+\n"):
        job.run()
    job.run(update=True)
    assert job.computed == ["pc", "pd"]
    assert [text for _, text in job.answers()] == ["1: pa", "1: pb", "3: pc", "3: pd", "1: pe", "1: pf"]
    job.sources = [third, packed, first]
    with pytest.raises(ConfigError, match=": 4 rows in another place"):
        job.run()
    job.run(update=True)
    assert job.computed == []
    assert [each for each, _ in job.answers()] == list("efcdab")


def test_the_same_rows_in_other_bytes_are_the_same_job(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.write(*rows_of(range(3)))
    job.run()
    job.source.write_bytes(b"\n" + job.source.read_bytes().replace(b"\n", b"\r\n"))
    output = job.run()
    assert output.finished is not None
    assert output.notes == ["the input has other bytes, and the same rows"]
    assert job.run().notes == []


def test_tables_as_inputs(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.sources = [job.source.with_suffix(".parquet")]
    rows = [{"id": index, "prompt": f"p{index}", "at": index / 4} for index in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), job.sources[0])
    job.run()
    rows = [{"at": row["at"], "more": None, "prompt": row["prompt"], "id": row["id"]} for row in rows]
    rows[2]["at"] = 9.5
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), job.sources[0])
    job.run(update=True)
    assert job.computed == ["p2"]


def test_shards_are_updated_each_and_what_they_are_joined_to(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.write(*rows_of(range(9)))
    paths = [tmp_path / f"out.shard-{number}-of-2.jsonl" for number in range(2)]

    def run_shards(**options: Any) -> list[list[str]]:
        computed = []
        for number, job.path in enumerate(paths):
            job.run(shard=Shard(number, 2), **options)
            computed.append(sorted(job.computed))
        return computed

    run_shards()
    merge_outputs(list(map(str, paths)), str(tmp_path / "all.jsonl"))
    job.write(*rows_of([0, 1, 2, 4, 5, 6, 7, 8, 9]))  # row 3 is gone, and those behind it change their shards
    assert run_shards(update=True) == [["p5", "p7", "p9"], ["p4", "p6", "p8"]]
    job.path = tmp_path / "all.jsonl"
    job.run(update=True)
    assert job.computed == ["p9"]
    merge_outputs(list(map(str, paths)), str(tmp_path / "again.jsonl"))
    joined = [json.loads(line)["id"] for line in (tmp_path / "again.jsonl").read_bytes().splitlines()]
    assert joined == [each for each, _ in job.answers()] == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_inputs_of_texts_and_cells(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.sources = [tmp_path / "a.csv", tmp_path / "b.txt"]
    job.sources[0].write_text("id,prompt\nx,one\ny,two\n")
    job.sources[1].write_text("three\nfour\n")
    job.run()
    job.sources[0].write_text("prompt,id\nONE,x\ntwo,y\n")
    job.sources[1].write_text("three\nfour\nfive\n")
    with pytest.raises(ConfigError, match="1 row edited, 1 new"):
        job.run()
    job.run(update=True)
    assert job.computed == ["ONE", "five"]


@pytest.mark.parametrize("fails", [True, False])
def test_a_csv_table_is_updated_while_its_rows_are_there(tmp_path: Path, fails: bool) -> None:
    job = UpdatedJob(tmp_path, "out.csv")
    job.fails = {"p1"} if fails else set()
    job.write(*rows_of(range(3)))
    job.run()
    job.write(*rows_of([0, 1, 2, 3]))
    if fails:
        job.run(update=True)
        assert job.computed == ["p3"]
    else:
        with pytest.raises(ConfigError, match=r"a complete CSV table cannot be updated(?s:.*)--overwrite"):
            job.run(update=True)


def test_what_an_update_cannot_do_is_refused(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.write(*rows_of(range(3)))
    job.run()
    job.write(*rows_of(range(4)))
    with pytest.raises(ConfigError, match=r"made by another job:\n  seed: not set → 1\n  input.*\nchange these back, "):
        job.run(update=True, facts={"seed": 1})
    digests_path(job.path).unlink()
    with pytest.raises(ConfigError, match=r"there is no out\.jsonl\.digests, (?s:.*)--overwrite"):
        job.run(update=True)


def test_an_edit_that_samples_of_a_large_input_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output was said to be complete, also with --update."""
    monkeypatch.setattr(known_input, "describe_input", lambda name: "9 bytes")
    job = UpdatedJob(tmp_path)
    job.write(*rows_of(range(3)))
    job.run(most=1)
    job.run(sampled_at=1001.0)  # it may just have been copied
    assert job.computed == ["p1", "p2"]
    job.write(*rows_of(range(2)), {"id": 2, "prompt": "pX"})
    assert job.run(sampled_at=999.0).finished is not None
    with pytest.raises(ConfigError, match=r"from another input: 1 row edited\n--update answers"):
        job.run(sampled_at=1001.0)  # it was written after the output was begun
    job.run(sampled_at=999.0, update=True)
    assert job.computed == ["pX"]
    assert not job.run(sampled_at=1001.0, update=True).notes


def test_lost_digests_cost_their_own_rows_alone(tmp_path: Path) -> None:
    job = UpdatedJob(tmp_path)
    job.write(*rows_of(range(8)))
    job.run(most=8)
    path = digests_path(job.path)
    digests = path.read_bytes()
    path.write_bytes(digests[:48] + bytes(32) + digests[80:-3])
    job.write(*rows_of(range(9)))
    job.run(update=True)
    assert job.computed == ["p3", "p4", "p7", "p8"]
    assert path.read_bytes()[:112] == digests[:112]
    path.write_bytes(digests[:48] + bytes(32) + digests[80:-3])  # they are back once the input was read again
    manifest = msgspec.json.decode(manifest_path(job.path).read_bytes())
    manifest_path(job.path).write_bytes(msgspec.json.encode({**manifest, "finished": None}))
    job.run()
    assert path.read_bytes()[: len(digests)] == digests


def test_an_update_that_was_begun_is_finished_by_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: LockedFile) -> None:
        raise OSError(5, "lost power")

    job = UpdatedJob(tmp_path)
    job.write(*rows_of(range(3)))
    job.run()
    job.write(*rows_of([2, 1, 0, 3]))
    with monkeypatch.context() as patch:
        patch.setattr(LockedFile, "adopt_draft", fail)
        with pytest.raises(OutputError, match="lost power"):
            job.run(update=True)
    names = [str(job.source)]
    manifest = Manifest(
        created=1, model="m", facts={}, inputs=[(each.name, each.description) for each in know_inputs(names)]
    )
    open_output(str(job.path), manifest, OutputOptions(overwrite=True)).close()  # ended before it began
    assert not any(path.exists() for path in temporary_files(job.path))
    job.run()
    assert job.computed == ["p3"]
    assert [text for _, text in job.answers()] == ["1: p2", "1: p1", "1: p0", "3: p3"]
