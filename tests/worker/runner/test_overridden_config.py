"""A rank whose config.json is changed by `hf_overrides` answers as one whose config.json has the changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from nvcli.demo import demo_path
from nvcli.job.text.tokenizer import Tokenizer
from one_rank import make_runner, run_requests
from requests_factory import make_request

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def answer(path: Path, **overrides: Any) -> list[int]:
    runner = make_runner(path, "cpu", **overrides)
    prompt = Tokenizer.load(path).encode(["Count from 9 to 24.\n"], add_special_tokens=False)[0]
    assert isinstance(prompt, list)
    return run_requests(runner, [make_request(0, prompt, 40)])[0]


def test_yarn_by_overrides_gives_the_answers_of_a_checkpoint_with_yarn(tmp_path: Path) -> None:
    shutil.copytree(demo_path(), tmp_path / "yarn")
    file = tmp_path / "yarn" / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] |= YARN
    file.write_text(json.dumps(config))
    changed = answer(demo_path(), hf_overrides={"rope_scaling": YARN})
    assert changed == answer(tmp_path / "yarn")
    assert changed != answer(demo_path())
