"""A replica answers tables: the columns stay, a bad row is an error row, and an engine that dies is started again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from fake_engine import FakeEngine
from nvcli.core.config import load_run_config
from nvcli.core.engine_config import EngineConfig
from nvcli.errors import ConfigError, WorkerError

pytest.importorskip("ray")

from nvcli.ray.replica import MAX_DEATHS, Replica, row_seed

pytestmark = pytest.mark.usefixtures("tokenizer")  # imports transformers once, before the runs

MakeReplica = Callable[..., Replica]


@pytest.fixture
def engines() -> list[FakeEngine]:
    return []


@pytest.fixture
def make_replica(model_folder: Path, engines: list[FakeEngine]) -> Iterator[MakeReplica]:
    made: list[Replica] = []

    def make(deaths: int = 0, **settings: Any) -> Replica:
        """A replica whose first engines die."""

        def start(config: EngineConfig) -> FakeEngine:
            engines.append(FakeEngine(config, dies_after_polls=1 if len(engines) < deaths else None))
            return engines[-1]

        made.append(
            Replica(load_run_config(None, settings={"model": str(model_folder), "device": "cpu", **settings}), start)
        )
        return made[-1]

    yield make
    for replica in made:
        replica.close()
    assert all(engine.closed for engine in engines)


def test_columns_are_kept_and_answers_added(make_replica: MakeReplica) -> None:
    rows = [
        {"id": "a", "prompt": "abc", "when": 1.5, "sampling": {"n": 2, "logprobs": None}},
        {"id": "a", "prompt": None, "when": None, "sampling": None},
        {"id": "b", "prompt": "xy", "when": 2.5, "sampling": {"n": 1, "logprobs": 1}},
    ]
    table = pyarrow.Table.from_pylist(rows)
    answered = make_replica().answer(table)
    assert answered.select(table.column_names) == table
    first, bad, last = answered.to_pylist()
    assert [choice["text"] for choice in first["choices"]] == ["cba", "cba"]
    assert (first["error"], first["usage"]["completion_tokens"]) == (None, 10)
    assert (bad["choices"], bad["error"]["type"]) == ([], "missing_prompt")
    (choice,) = last["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"][0]) == ("yx", "y")
    empty = make_replica().answer(table.slice(0, 0))
    assert empty.schema == answered.schema


def test_prompts_from_columns(make_replica: MakeReplica) -> None:
    table = pyarrow.table({"text": ["ab", "cd"], "number": [1, 2]})
    answered = make_replica(job={"prompt_template": "{text}{number}", "chat": "never"}).answer(table)
    assert [row["choices"][0]["text"] for row in answered.to_pylist()] == ["1ba", "2dc"]
    assert [row["error"]["type"] for row in make_replica().answer(table).to_pylist()] == ["missing_prompt"] * 2


def test_a_row_that_is_nested_too_deep_is_an_error_of_its_own(make_replica: MakeReplica) -> None:
    kind, value = pyarrow.int64(), 1
    for _ in range(1500):
        kind, value = pyarrow.list_(kind), [value]  # type: ignore[assignment]
    table = pyarrow.table({"messages": pyarrow.array([value, None], kind), "prompt": [None, "ab"]})
    deep, good = make_replica().answer(table).to_pylist()
    assert "`messages` is nested too deep" in deep["error"]["message"]
    assert good["choices"][0]["text"] == "ba"


def test_random_numbers_follow_from_the_row_and_not_from_its_batch(
    make_replica: MakeReplica, engines: list[FakeEngine]
) -> None:
    rows = [{"id": id, "prompt": prompt} for id, prompt in [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")]]
    replica = make_replica(job={"plan": False})
    replica.answer(pyarrow.Table.from_pylist(rows))
    replica.answer(pyarrow.Table.from_pylist(rows[1:2]))
    unseeded = {**rows[0], "sampling": {"seed": -1}}
    replica.answer(pyarrow.Table.from_pylist([unseeded]))
    seeds = [request.sampling.seed for request in sorted(engines[0].received, key=lambda each: each.request_id)]
    assert seeds == [row_seed(row, 0) for row in (*rows, rows[1], unseeded)]
    assert len(set(seeds)) == 4
    assert row_seed(rows[0], 0) != row_seed(rows[0], 1)


def test_a_seed_that_is_given_is_kept(make_replica: MakeReplica, engines: list[FakeEngine]) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "x", "sampling": {"seed": 5}}])
    make_replica().answer(table)
    make_replica(sampling={"seed": 7}).answer(table.select(["prompt"]))
    assert [engine.received[0].sampling.seed for engine in engines] == [5, 7]


def test_an_engine_that_dies_is_started_again(
    make_replica: MakeReplica, engines: list[FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    table = pyarrow.table({"prompt": [f"prompt {number}" for number in range(600)]})
    with caplog.at_level(logging.WARNING, "nvcli"):
        answered = make_replica(deaths=2, max_num_seqs=16).answer(table)
    assert [row["choices"][0]["text"] for row in answered.to_pylist()] == [
        row["prompt"][::-1] for row in table.to_pylist()
    ]
    assert len(engines) == 3
    assert "its rows are recomputed" in caplog.text


def test_an_engine_that_dies_again_and_again_ends_the_computation(
    make_replica: MakeReplica, engines: list[FakeEngine]
) -> None:
    table = pyarrow.table({"prompt": ["x"] * 50})
    with pytest.raises(WorkerError):
        make_replica(deaths=100, max_num_seqs=16, job={"plan": False}).answer(table)
    assert len(engines) == 1 + MAX_DEATHS


def test_a_column_of_the_answers_names_is_refused(make_replica: MakeReplica) -> None:
    with pytest.raises(ConfigError, match=r"a column `error`.*rename_columns"):
        make_replica().answer(pyarrow.table({"prompt": ["x"], "error": [1]}))


def test_a_column_that_looks_like_a_setting_is_warned_of_once(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    for _ in range(2):
        replica.answer(pyarrow.table({"prompt": ["x"], "temperature": [1.0]}))
    assert caplog.text.count("the dataset has `temperature` at its top level") == 1
