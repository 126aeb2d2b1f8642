"""Damaged and hostile images never end a run: each row has an answer or an error of its own."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import pytest

from hostile_images import bombs, mutated, valid_images
from model_engine import ModelEngine
from nvcli.core.config import JobConfig, RunConfig
from nvcli.job.progress.display import Progress
from nvcli.job.run.generate import generate
from vision_model import write_vision_model

pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")


class Silent(Progress):
    def note(self, line: str) -> None:
        pass

    warn = detail = note


def answer(images: list[bytes], folder: Path) -> list[str]:
    """Answer a row for each image, and return the type of its error; empty: it was answered."""
    source, output = folder / "rows.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        for data in images:
            row = {"prompt": "?", "photo": "data:;base64," + base64.b64encode(data).decode()}
            file.write(json.dumps(row) + "\n")
    job = JobConfig(order="input", image_field="photo", max_leading_errors=0, max_pixels=1 << 16)  # a quick tower
    sampling = {"max_tokens": 1, "temperature": 0}
    run = RunConfig(
        model=str(write_vision_model(folder / "model")), job=job, device="cpu", max_num_seqs=16, sampling=sampling
    )
    with (folder / "said").open("w") as said:
        generate(run, inputs=[str(source)], output=str(output), progress=Silent(said), start=ModelEngine)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(found) == len(images)
    return ["" if row["error"] is None else row["error"]["type"] for row in found]


def test_valid_images_of_all_kinds_are_answered_and_bombs_are_errors(tmp_path: Path) -> None:
    valid, explosive = valid_images(), bombs()
    found = dict(zip([*valid, *explosive], answer([*valid.values(), *explosive.values()], tmp_path), strict=True))
    assert {name: found[name] for name in valid if found[name]} == {}
    assert [name for name in explosive if found[name] != "invalid_image"] == ["PNG of 90 million pixels"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_images_are_answers_or_errors(count: int, tmp_path: Path) -> None:
    found = Counter(answer([*mutated(count, seed=count)], tmp_path))
    print(dict(found))
    assert found.keys() == {"", "invalid_image"}
    assert min(found.values()) > count // 10
