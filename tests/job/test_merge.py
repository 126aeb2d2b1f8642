"""The outputs of shards are joined into what one run of the whole job would have written, or it is said why not."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crash_states import CallRecorder, crash_states
from nvcli.errors import ConfigError, RowsMissing
from nvcli.job.output import locked_file
from nvcli.job.output.job_output import JobOutput
from nvcli.job.output.manifest import Manifest, load_manifest
from nvcli.job.output.merge import Merged, merge_outputs
from nvcli.job.output.shard_outputs import job_command
from nvcli.job.own_files import manifest_path, rows_path
from nvcli.job.shard import Shard
from output_jobs import JOB, open_job, plain_bytes, rows_of, write

TOTAL = 23
FAILING = (3, 4, 17)


def of_shard(shard: Shard, job: Manifest = JOB) -> Manifest:
    return msgspec.structs.replace(job, facts={**job.facts, "shard": str(shard)}, created=2000 - shard.number)


def write_shard(
    folder: Path, number: int, count: int, *, name: str = "out.jsonl", total: int = TOTAL, **options: Any
) -> Path:
    """The output of a shard, its rows in random order."""
    shard = Shard(number, count)
    path = folder / f"in.shard-{number}-of-{count}.{name}"
    rows = random.Random(number).sample(range(number, total, count), shard.num_rows(total))
    defaults = {"job": of_shard(shard), "finish": True, "rows_read": total, "failing": FAILING}
    write(path, rows, shard=shard, **{**defaults, **options})
    return path


def reopened(path: Path, job: Manifest = JOB, **options: Any) -> JobOutput:
    """An output as a run of its job finds it."""
    output = open_job(path, job, **options)
    output.close()
    return output


def merge(shards: Iterable[Path], output: Path, **options: Any) -> Merged:
    return merge_outputs(list(map(str, shards)), str(output), **options)


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a thousand jobs would wait for the disk


@pytest.mark.parametrize(("count", "max_waiting_bytes"), [(1, 0), (3, 0), (3, 1 << 20), (40, 500)])
def test_joined_shards_are_the_output_of_one_run(tmp_path: Path, count: int, max_waiting_bytes: int) -> None:
    whole, joined = tmp_path / "whole.jsonl", tmp_path / "joined.jsonl"
    write(whole, range(TOTAL), order="input", failing=FAILING, finish=True)
    shards = [write_shard(tmp_path, number, count) for number in range(count)]
    result = merge(reversed(shards), joined, max_waiting_bytes=max_waiting_bytes)
    assert (result.rows, result.errors, result.missing) == (TOTAL, {"prompt_too_long": 3}, "")
    assert joined.read_bytes() == whole.read_bytes()
    assert reopened(joined).finished == reopened(whole).finished
    assert load_manifest(joined).created == 2001 - count  # type: ignore[union-attr]
    assert reopened(joined, retry_errors=True).answered.all.count == TOTAL - 3


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
def test_outputs_of_all_formats_are_joined(tmp_path: Path, name: str) -> None:
    shards = [write_shard(tmp_path, number, 2, name=name, failing=()) for number in range(2)]
    joined = tmp_path / f"joined.{name}"
    assert merge(shards, joined).rows == TOTAL
    plain = tmp_path / "joined.jsonl"
    merge([f"{tmp_path}/*shard-*", manifest_path(shards[0])], plain)  # type: ignore[list-item]
    assert [row["index"] for row in rows_of(plain)] == list(range(TOTAL))
    if name == "out.parquet":
        import pyarrow.parquet

        assert pyarrow.parquet.read_table(joined)["index"].to_pylist() == list(range(TOTAL))
        assert not rows_path(joined).exists()
        assert reopened(shards[0], of_shard(Shard(0, 2)), shard=Shard(0, 2)).finished
        rows_path(shards[0]).unlink()
        with pytest.raises(ConfigError, match=r"out.parquet.rows.jsonl, which holds its rows, is not beside it"):
            merge(shards, joined)
    else:
        assert plain_bytes(joined) == plain.read_bytes()


def ends_of_lines(data: bytes) -> list[int]:
    return [at for at, byte in enumerate(data) if byte == ord("\n")]


@pytest.mark.usefixtures("no_sync")
def test_a_merge_that_was_cut_anywhere_goes_on(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path, number, 3, total=5) for number in range(3)]
    joined = tmp_path / "joined.jsonl"
    merge(shards, joined)
    data = joined.read_bytes()
    assert merge(shards, joined).rows == 5
    for size in {*range(0, len(data), 11), *(at + near for at in ends_of_lines(data) for near in (-1, 0, 1)), 0}:
        joined.write_bytes(data[:size])
        manifest_path(joined).write_bytes(msgspec.json.encode(JOB))
        result = merge(shards, joined)
        assert (result.rows, result.errors) == (5, {"prompt_too_long": 2})
        assert joined.read_bytes() == data


@pytest.mark.parametrize(
    ("action", "name"), [("begin", "joined.parquet"), ("continue", "joined.jsonl"), ("overwrite", "joined.jsonl")]
)
def test_a_merge_goes_on_after_a_power_loss_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, action: str
) -> None:
    shards = [write_shard(tmp_path, number, 2, total=5) for number in range(2)]
    folder, resumed = tmp_path / "merge", tmp_path / "resumed"
    folder.mkdir()
    resumed.mkdir()
    monkeypatch.setattr(locked_file, "_CHUNK_BYTES", 300)  # so that there are several writes
    if action == "continue":
        merge(shards[:1], folder / name, allow_missing=True)
    elif action == "overwrite":
        other = msgspec.structs.replace(JOB, facts={**JOB.facts, "seed": 7})
        write(folder / name, range(3), job=other, finish=True)
    overwrite = action == "overwrite"
    with CallRecorder(folder) as recorder:
        merge(shards, folder / name, overwrite=overwrite)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    rng = random.Random(0)
    states = [state for point in recorder.points for state in crash_states(point, rng, num_random=1)]
    different = {tuple(sorted(state.items())): state for state in states}
    assert len(different) > 10
    output = resumed / name
    for state in different.values():
        for path in resumed.iterdir():
            path.unlink()
        for file, data in state.items():
            if not file.endswith(".lock"):
                (resumed / file).write_bytes(data)
        assert merge(shards, output, overwrite=overwrite).rows == 5
        same = rows_path(output).name
        assert (resumed / same).read_bytes() == (folder / same).read_bytes()
        assert {path.name for path in resumed.iterdir()} == {path.name for path in folder.iterdir()}


def test_a_complete_output_is_left_alone(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path, number, 2, failing=()) for number in range(2)]
    joined = tmp_path / "joined.jsonl"
    merge(shards, joined)
    before = joined.stat()
    assert merge(shards, joined).was_complete
    assert joined.stat() == before


def test_failed_rows_are_taken_again_from_shards_that_were_fixed(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path, number, 2) for number in range(2)]
    joined = tmp_path / "joined.jsonl"
    merge(shards, joined)
    write_shard(tmp_path, 1, 2, retry_errors=True, failing=())
    assert merge(shards, joined).errors == {"prompt_too_long": 1}
    assert [row["index"] for row in rows_of(joined)] == list(range(TOTAL))
    assert [row["index"] for row in rows_of(joined) if row["error"]] == [4]


def test_missing_rows_are_named_with_the_commands_that_compute_them(tmp_path: Path) -> None:
    done = write_shard(tmp_path, 0, 3)
    cut = write_shard(tmp_path, 2, 3)
    cut.write_bytes(b"".join(cut.read_bytes().splitlines(keepends=True)[:5]) + b'{"id": "r')
    joined = tmp_path / "joined.jsonl"
    with pytest.raises(RowsMissing) as caught:
        merge([done, cut], joined)
    assert str(caught.value).splitlines()[1:] == [
        "  shard 1/3: all of its 8 rows, no output of it was named",
        f"    nvcli generate in.jsonl --model m --shard 1/3 -o {tmp_path}/in.shard-1-of-3.out.jsonl",
        f"  shard 2/3: 2 of its 7 rows, in {cut}",
        f"    nvcli generate in.jsonl --model m --shard 2/3 -o {cut}",
    ]
    assert not joined.exists()
    scored = msgspec.structs.replace(JOB, facts={**JOB.facts, "task": "score"})
    assert job_command(scored, ["-o", "x"]) == "nvcli score in.jsonl --model m -o x"


def test_what_is_there_is_joined_if_asked_and_the_rest_comes_later(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path, 0, 3), write_shard(tmp_path, 2, 3, finish=False)]
    joined = tmp_path / "joined.jsonl"
    result = merge(shards, joined, allow_missing=True)
    assert result.rows == 15
    assert "shard 1/3" in result.missing
    assert reopened(joined).finished is None
    assert reopened(joined).answered.all.count == 15
    shards.append(write_shard(tmp_path, 1, 3))
    assert merge(shards, joined).missing == ""
    assert [row["index"] for row in rows_of(joined)] == list(range(TOTAL))
    assert reopened(joined).finished is not None


def test_nobody_knows_the_rows_of_a_job_of_which_no_shard_is_finished(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path, number, 2, finish=False) for number in range(2)]
    with pytest.raises(RowsMissing, match="12 rows and is not finished"):
        merge(shards, tmp_path / "joined.jsonl")


def test_shards_of_a_limited_job(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path, number, 2, all_read=False) for number in range(2)]
    joined = tmp_path / "joined.jsonl"
    merge(shards, joined)
    assert reopened(joined, limit=TOTAL).finished
    assert reopened(joined, limit=TOTAL + 1).finished is None


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    joined = tmp_path / "joined.jsonl"
    first, second = (write_shard(tmp_path, number, 2) for number in range(2))
    other_job = msgspec.structs.replace(JOB, facts={**JOB.facts, "seed": 7})
    other = tmp_path / "other.jsonl"
    write(other, [1], job=of_shard(Shard(1, 2), other_job))
    whole = tmp_path / "whole.jsonl"
    write(whole, range(3))
    bare = tmp_path / "bare.jsonl"
    bare.write_bytes(first.read_bytes())
    moved = tmp_path / "moved.jsonl"
    write(moved, [1], job=of_shard(Shard(0, 2)))
    third = write_shard(tmp_path, 1, 3)
    for names, says in [
        ([first, other], r"different jobs:\n  seed: 0 → 7\n.* with --update"),
        ([first, third], "shard 0/2 and .* is shard 1/3"),
        ([first, first], "are both shard 0/2"),
        ([first, whole], "whole.jsonl is the output of a whole job, not of a shard"),
        ([first, bare], "no bare.jsonl.manifest.json beside it"),
        ([moved, second], "holds row 1, which is not of shard 0/2"),
        ([first, tmp_path / "none.jsonl"], "there is no file .*none.jsonl"),
        ([manifest_path(first)], "none of the files is the output of a shard"),
    ]:
        with pytest.raises(ConfigError, match=says):
            merge(names, joined)
    with pytest.raises(ConfigError, match="is also an input"):
        merge([first, second], second)
    with pytest.raises(ConfigError, match="was made by another job"):
        merge([first, second], other)
    assert merge([first, second], other, overwrite=True).rows == TOTAL
    running = open_job(second, of_shard(Shard(1, 2)), overwrite=True)
    with pytest.raises(ConfigError, match="another run is writing to"):
        merge([first, second], joined)
    running.close()
    assert not joined.exists()
