"""What makes masks is started beside the weights where the first rows of a job ask for a grammar, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_runners import engine_config
from nvcli.core.config import load_run_config
from nvcli.demo import demo_path
from nvcli.job.run.resolve import resolve_job
from nvcli.worker.runner.constraints import Constraints, start_workers

CHOICE = {"structured": {"choice": ["a"]}}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "sampling", "is_prepared"),
    [
        ({"prompt": "a"}, {}, False),
        ({"messages": MESSAGES, "tools": TOOLS}, {}, False),
        ({"prompt": "a", "sampling": CHOICE}, {}, True),
        ({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}, {}, True),
        ({"prompt": "a"}, CHOICE, True),
    ],
)
def test_the_first_rows_say_whether_it_is_prepared(
    tmp_path: Path, row: dict[str, Any], sampling: dict[str, Any], is_prepared: bool
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"prompt": "x"}}\n{json.dumps(row)}\n')
    run = load_run_config(None, settings={"model": "demo", "device": "cpu", "sampling": sampling})
    assert resolve_job(run, inputs=[str(file)], output=None, limit=None).config.prepare_grammars is is_prepared


def test_what_is_started_ahead_is_taken_if_it_is_what_answers_need() -> None:
    device, config = torch.device("cpu"), engine_config(model_path=demo_path(), max_num_seqs=2)
    workers = start_workers(config, 640, [0, 2], device)
    for end_ids, is_taken in (([0, 2], True), ([2], False)):
        constraints = Constraints(
            *(config, 640, device),
            follows=True,
            may_hold=True,
            token_ids=torch.zeros(3, 8, dtype=torch.int32),
            workers=workers,
        )
        constraints._load(end_ids)
        assert (constraints._workers is workers) is is_taken
        assert constraints.memory is not None


def test_without_tokens_every_answer_fails(tmp_path: Path) -> None:
    config = engine_config(model_path=tmp_path, max_num_seqs=2)
    assert start_workers(config, 640, [0], torch.device("cpu")).wait_ready() is None
