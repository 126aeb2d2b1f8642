"""The shards of a job have its rows between them, each with its id, index and error in the whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nvcli.errors import ConfigError
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.shard import WHOLE, Shard, choose_shard
from row_maker import RowMaker
from row_oracle import JobFacts


def read(
    path: Path, shard: Shard = WHOLE, keys: RowKeys | None = None, limit: int | None = None
) -> list[Job | JobResult]:
    reader = RowReader([str(path)], RowParser({}, keys), shard=shard, limit=limit)
    rows = [row for batch in reader.batches() for row in batch]
    assert reader.rows_of_shard == len(rows) == shard.num_rows(reader.rows_read)
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_shards_read_the_rows_of_the_whole_job_be_they_good_or_bad(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "in.jsonl"
    id_key = rng.choice(["id", "id", "custom_id", "x"])
    lines = [*RowMaker(rng, JobFacts(max_model_len=1024, vocab_size=640, id_key=id_key)).lines(150)]
    path.write_bytes(b"\n".join([*lines, *lines]))  # the second time, every id is one that was taken
    keys = RowKeys(id=id_key)
    whole = read(path, keys=keys)
    for count in (1, 2, 5):
        shards = [read(path, Shard(number, count), keys) for number in range(count)]
        assert sorted((row for rows in shards for row in rows), key=lambda row: row.context.index) == whole


def test_an_id_that_a_row_of_another_shard_took_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'{"id": "a", "prompt": 1}\n{"id": "a", "prompt": "x"}\n{"id": "row-3", "prompt": "x"}\n{"prompt": "x"}\n'
    )
    _, second = Shard(0, 2), Shard(1, 2)
    again, unnamed = read(path, second)
    assert isinstance(again, JobResult)
    assert again.error is not None
    assert again.error.type == "duplicate_id"
    assert unnamed.context.id == "row-3-2"


def test_a_limit_counts_the_rows_of_the_whole_job(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n' * 9)
    assert [row.context.index for row in read(path, Shard(1, 3), limit=5)] == [1, 4]


def test_positions_in_a_shard() -> None:
    shard = Shard(1, 4)
    rows = [index for index in range(20) if index in shard]
    assert rows == [shard.row(position) for position in range(5)]
    assert [shard.next_row(index) for index in range(7)] == [1, 1, 5, 5, 5, 5, 9]
    assert [shard.num_rows(total) for total in (0, 1, 2, 5, 6)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4/4", "counted from 0; allowed: 0/4 to 3/4"),
        ("1/0", "allowed: I/N"),
        ("1", "allowed: I/N"),
        ("-1/4", "allowed: I/N"),
        ("auto", "not a task that srun started"),
    ],
)
def test_a_shard_that_there_is_not_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_shard(text, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # as in the script of a batch job


def test_the_shard_of_a_slurm_task() -> None:
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}
    assert choose_shard("auto", step) == Shard(3, 8)
    with pytest.raises(ConfigError, match=r"--shard \$SLURM_ARRAY_TASK_ID/8$"):
        choose_shard("auto", {**step, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "7"})
