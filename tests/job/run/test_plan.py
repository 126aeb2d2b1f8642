"""A small job's slots are what its rows can use; nothing is assumed of inputs that cannot be read twice."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from fake_runners import engine_config
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.config_types import Order
from nvcli.job.input.reader import RowReader
from nvcli.job.rows.parser import RowParser
from nvcli.job.run import plan
from prepared_rows import prepared_row


def count_requests(inputs: list[str], defaults: dict[str, Any], *, limit: int | None, enough: int) -> int:
    return plan.count_requests(inputs, RowReader(inputs, RowParser(defaults), limit=limit), enough=enough)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_sample_of_every_good_row_counts(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", '{"prompt": "x"}\n\nnot json\n{"prompt": "y", "sampling": {"n": 4}}\n')
    second = write(tmp_path / "b.jsonl", '{"prompt": "z"}\n')
    assert count_requests([first, second], {}, limit=None, enough=256) == 6
    assert count_requests([first, second], {"n": 3}, limit=None, enough=256) == 10
    assert count_requests([first, second], {}, limit=1, enough=256) == 1
    assert count_requests([first, second], {}, limit=None, enough=5) == 5


def test_at_least_one(tmp_path: Path) -> None:
    assert count_requests([write(tmp_path / "a.jsonl", "nothing\n")], {}, limit=None, enough=256) == 1


def test_what_cannot_be_read_twice_or_quickly_is_taken_for_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}\n')
    assert count_requests([path, "-"], {}, limit=None, enough=256) == 256
    os.mkfifo(tmp_path / "pipe")
    assert count_requests([str(tmp_path / "pipe")], {}, limit=None, enough=256) == 256
    monkeypatch.setattr(plan, "QUICKLY_READ_BYTES", 10)
    assert count_requests([path], {}, limit=None, enough=256) == 256


def test_in_input_order_rows_overtake_others_only_to_be_with_those_that_begin_alike() -> None:
    prefix = [7] * 64

    def order_of_computing(order: Order) -> list[int]:
        run = RunConfig(model="m", max_num_seqs=4, job=JobConfig(order=order))
        planner = plan.make_planner(run, engine_config(block_size=64), 1)
        for index in range(200):
            prompt = [*prefix, index] if index % 50 == 0 else [100 + index]
            planner.add(prepared_row(index, prompt, max_tokens=1000 if index == 60 else 10))
        rows = [planner.take() for _ in range(200)]
        return [row.context.index for row in rows if row is not None]

    computed = order_of_computing("input")
    assert computed[:6] == [0, 50, 100, 150, 1, 2], "though more rows are overtaken than run at a time"
    assert computed[4:] == sorted(computed[4:])
    assert order_of_computing("completion")[0] == 60


def test_in_input_order_no_row_waits_long_for_its_merged_adapter() -> None:
    run = RunConfig(model="m", max_num_seqs=4, job=JobConfig(order="input"))
    planner = plan.make_planner(run, engine_config(merged_adapters=(1, 2)), 1)
    for index in range(200):
        planner.add(prepared_row(index, [100 + index], adapter=2 if index == 1 else 1))
    rows = [row.context.index for row in iter(planner.take, None)]
    assert rows.index(1) == 33, "rows of the other adapter fill the slots eight times before it"


def test_a_damaged_file_is_left_to_the_job(tmp_path: Path) -> None:
    data = gzip.compress(b'{"prompt": "x"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(data[:-20])
    assert count_requests([str(tmp_path / "a.jsonl.gz")], {}, limit=None, enough=256) == 256
