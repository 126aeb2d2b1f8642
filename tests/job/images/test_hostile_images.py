"""Damaged and hostile images and PDF files never end a run: each row has an answer or an error of its own."""

from __future__ import annotations

import base64
import ctypes
import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from file_jobs import generate
from hostile_images import bombs, mutated, valid_images
from hostile_pdfs import valid_pdfs
from model_engine import ModelEngine
from nvcli.core.config import JobConfig, RunConfig
from nvcli.job.images.image_process import PageCount
from nvcli.job.images.image_processes import ImageProcesses
from nvcli.job.progress.display import Progress
from vision_model import write_vision_model

pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")


class Silent(Progress):
    def note(self, line: str) -> None:
        pass

    warn = detail = note


def image_row(data: bytes) -> dict[str, Any]:
    return {"prompt": "?", "photo": "data:;base64," + base64.b64encode(data).decode()}


def pdf_row(data: bytes) -> dict[str, Any]:
    part = {"type": "pdf", "path": "data:;base64," + base64.b64encode(data).decode()}
    return {"messages": [{"role": "user", "content": [part]}]}


def answer(rows: Iterable[dict[str, Any]], folder: Path) -> list[str]:
    """Answer rows, and return the type of each one's error; empty: it was answered."""
    source, output = folder / "rows.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        count = sum(file.write(json.dumps(row) + "\n") > 0 for row in rows)
    job = JobConfig(order="input", image_field="photo", max_leading_errors=0, max_pixels=1 << 16)  # a quick tower
    sampling = {"max_tokens": 1, "temperature": 0}
    run = RunConfig(
        model=str(write_vision_model(folder / "model")), job=job, device="cpu", max_num_seqs=16, sampling=sampling
    )
    with (folder / "said").open("w") as said:
        generate(run, inputs=[str(source)], output=str(output), progress=Silent(said), start=ModelEngine)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(found) == count
    messages = [row["error"]["message"] for row in found if row["error"] is not None]
    print(Counter(re.sub(r".*data:[^:]*: |\d+", "", message)[:80] for message in messages).most_common(20))
    return ["" if row["error"] is None else row["error"]["type"] for row in found]


def test_valid_images_of_all_kinds_are_answered_and_bombs_are_errors(tmp_path: Path) -> None:
    valid, explosive = valid_images(), bombs()
    rows = map(image_row, [*valid.values(), *explosive.values()])
    found = dict(zip([*valid, *explosive], answer(rows, tmp_path), strict=True))
    assert {name: found[name] for name in valid if found[name]} == {}
    assert [name for name in explosive if found[name] != "invalid_image"] == ["PNG of 90 million pixels"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_images_are_answers_or_errors(count: int, tmp_path: Path) -> None:
    images = list(valid_images().values())
    found = Counter(answer(map(image_row, mutated(images, count, seed=count)), tmp_path))
    print(dict(found))
    assert found.keys() == {"", "invalid_image"}
    assert min(found.values()) > count // 10


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_pdf_files_are_answers_or_errors(count: int, tmp_path: Path) -> None:
    valid = valid_pdfs()
    files = [*valid.values(), *mutated(list(valid.values()), count, seed=count)]
    errors = answer(map(pdf_row, files), tmp_path)
    assert errors[: len(valid)] == [""] * len(valid)
    found = Counter(errors)
    print(dict(found))
    assert found.keys() == {"", "invalid_image"}
    assert min(found.values()) > count // 10


class _Crash:
    """A question that crashes whoever reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ctypes.string_at, (0,)


def test_a_process_that_crashes_is_replaced_and_a_problem_of_its_image() -> None:
    with closing(ImageProcesses()) as processes:
        assert processes.ask(_Crash()).problem == "its process was killed by SIGSEGV"  # type: ignore[arg-type]
        assert processes.ask(PageCount(valid_pdfs()["drawing"])).num_pages == 2
