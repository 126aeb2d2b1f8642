"""A file's rows as a workload: prepared as `generate` does it, each answer as long as the row asks, none cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvcli.core.config import RunConfig
from nvcli.core.messages import unpack
from nvcli.engine.request import Request
from nvcli.errors import ConfigError
from nvcli.job.run.resolve import resolve_settings
from nvcli.tools.bench.file_workload import FileWorkload
from weightless_model import MAX_POSITIONS, write_weightless_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weightless_model(tmp_path_factory.mktemp("model"))


def requests_of(model: Path, rows: list[Any], said: list[str] | None = None, **options: Any) -> list[Request]:
    file = model / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunConfig(model=str(model), load_format="dummy")
    workload = FileWorkload(input=str(file), **options)
    return workload.requests(resolve_settings(run), say=(said if said is not None else []).append)


def test_rows_become_requests_of_fixed_length(model: Path) -> None:
    sampling = {"max_tokens": 9, "temperature": 0.5, "stop": "x", "stop_token_ids": [5], "min_tokens": 2}
    (request,) = requests_of(model, [{"prompt_token_ids": [7, 8, 9], "sampling": sampling}])
    assert list(unpack(request.prompt_ids)) == [7, 8, 9]
    assert request.max_tokens == 9
    assert request.sampling.temperature == 0.5
    assert request.stop_ids == []
    assert not request.stream
    assert request.sampling.min_tokens == 0


def test_each_sample_is_a_request(model: Path) -> None:
    requests = requests_of(model, [{"prompt": "ab", "sampling": {"max_tokens": 3, "n": 2}}, {"prompt": "c"}])
    assert [request.request_id for request in requests] == [0, 1, 2]
    assert [request.sample for request in requests] == [0, 1, 0]


def test_rows_without_max_tokens_get_a_drawn_length_that_fits(model: Path) -> None:
    requests = requests_of(model, [{"prompt_token_ids": [5] * 10}] * 20, output_len=(3, 6))
    assert {request.max_tokens for request in requests} == {3, 4, 5, 6}
    (request,) = requests_of(model, [{"prompt_token_ids": [5] * 10}], output_len=(500, 500))
    assert request.max_tokens == MAX_POSITIONS - 10


def test_the_first_rows_alone(model: Path) -> None:
    assert len(requests_of(model, [{"prompt": "a"}] * 5, num_rows=2)) == 2


def test_rows_that_fail_are_left_out_and_counted(model: Path) -> None:
    said: list[str] = []
    assert len(requests_of(model, [{"prompt": 5}, {"prompt": "a"}, {"nothing": 1}], said)) == 1
    (line,) = said
    assert "left out 2 rows that cannot be answered; the first" in line
    assert "line 1: `prompt`" in line


def test_files_of_all_formats_and_folders_of_them(model: Path, tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("prompt\na\nb\n")
    (tmp_path / "a.csv").write_text('prompt,sampling\nc,"{""n"": 2}"\n')
    resolved = resolve_settings(RunConfig(model=str(model), load_format="dummy"))
    for name, count in (("b.csv", 2), ("", 4)):
        workload = FileWorkload(input=str(tmp_path / name))
        assert len(workload.requests(resolved, say=print)) == count
    (tmp_path / "b.csv").write_text("question\na\n")
    with pytest.raises(ConfigError, match=r"--set job\.prompt_field=question\n"):
        FileWorkload(input=str(tmp_path / "b.csv")).requests(resolved, say=print)


@pytest.mark.parametrize(("rows", "reason"), [([], "no rows"), ([{"prompt_token_ids": [1] * 99}], "max_model_len")])
def test_a_file_without_a_row_to_answer_is_refused(model: Path, rows: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"rows.jsonl has no row.*{reason}"):
        requests_of(model, rows)
