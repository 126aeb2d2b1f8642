"""A job that is divided into shards: what several runs answer is joined into what one run answers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from file_jobs import generate
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.config_types import Order
from nvcli.errors import ConfigError, WorkerError
from nvcli.job.output.merge import merge_outputs
from nvcli.job.progress.display import Progress
from nvcli.job.progress.summary import Summary
from nvcli.job.shard import Shard

pytestmark = pytest.mark.usefixtures("tokenizer")  # imports transformers once, before the runs

COUNT = 3
BAD = (4, 11)


def write_input(path: Path) -> None:
    rows = [
        {"id": f"r{number}", "prompt": f"prompt {number}"} if number % 5 else {"prompt": "x"} for number in range(40)
    ]
    for number in BAD:
        rows[number] = {"id": "r1", "prompt": "the id of another shard's row"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer(folder: Path, model: Path, order: Order, *, polls: int | None = None, **options: Any) -> Summary:
    """One run of the job. The engine dies after so many polls; None: it does not."""
    run = RunConfig(model=str(model), device="cpu", max_num_seqs=4, job=JobConfig(order=order, sync_seconds=0.1))
    return generate(
        run,
        **{"inputs": [str(folder / "in.jsonl")], "output": None, **options},
        progress=Progress(io.StringIO()),
        start=lambda config: FakeEngine(config, dies_after_polls=polls),
    )


@pytest.mark.parametrize("order", ["input", "completion"])
def test_joined_shards_are_the_output_of_one_run(tmp_path: Path, model_folder: Path, order: Order) -> None:
    write_input(tmp_path / "in.jsonl")
    whole = answer(tmp_path, model_folder, order)
    for number in range(COUNT):
        shard = Shard(number, COUNT)
        if number == 1:
            with pytest.raises(WorkerError):
                answer(tmp_path, model_folder, order, shard=shard, polls=1)
        summary = answer(tmp_path, model_folder, order, shard=shard)
        assert Path(summary.output).name == f"in.shard-{number}-of-{COUNT}.out.jsonl"
        assert summary.rows == shard.num_rows(40)
        assert answer(tmp_path, model_folder, order, shard=shard).was_complete
        if order == "input":
            indices = [json.loads(line)["index"] for line in Path(summary.output).read_bytes().splitlines()]
            assert indices == list(range(number, 40, COUNT))
    joined = tmp_path / "joined.jsonl"
    merged = merge_outputs([f"{tmp_path}/in.shard-*"], str(joined))
    assert (merged.rows, merged.errors) == (40, {"duplicate_id": len(BAD)})
    lines = joined.read_bytes().splitlines()
    assert lines == sorted(Path(whole.output).read_bytes().splitlines(), key=lambda line: json.loads(line)["index"])
    assert answer(tmp_path, model_folder, order, output=str(joined)).was_complete
    again = answer(tmp_path, model_folder, order, output=str(joined), retry_errors=True)
    assert (again.rows, again.counts.rows_done, again.errors) == (40, len(BAD), {"duplicate_id": len(BAD)})
    assert sorted(joined.read_bytes().splitlines()) == sorted(lines)


def test_a_shard_is_not_continued_as_another_one(tmp_path: Path, model_folder: Path) -> None:
    write_input(tmp_path / "in.jsonl")
    output = str(tmp_path / "out.jsonl")
    answer(tmp_path, model_folder, "completion", shard=Shard(0, 3), output=output)
    with pytest.raises(ConfigError, match=r"shard: 0/3 → 1/3"):
        answer(tmp_path, model_folder, "completion", shard=Shard(1, 3), output=output)
    with pytest.raises(ConfigError, match=r"shard: 0/3 → not set"):
        answer(tmp_path, model_folder, "completion", output=output)


def test_a_pattern_of_inputs_leaves_out_the_outputs_of_other_shards(tmp_path: Path, model_folder: Path) -> None:
    write_input(tmp_path / "in.jsonl")
    pattern = [str(tmp_path / "*.jsonl")]
    for number in range(2):
        summary = answer(tmp_path, model_folder, "completion", inputs=pattern, shard=Shard(number, 2))
        assert summary.rows == 20
