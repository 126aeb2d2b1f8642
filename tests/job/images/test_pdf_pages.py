"""Parts of PDF files become the images of their pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from file_jobs import generate
from model_engine import ModelEngine
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.system.pixel_file import PixelFile
from nvcli.core.validation import InvalidValue
from nvcli.errors import RowError
from nvcli.job.images.image_process import PageCount, Prepared, Question, answer
from nvcli.job.images.pdf_page import PdfPage
from nvcli.job.images.pixel_memory import PixelMemory
from nvcli.job.progress.display import Progress
from nvcli.job.report.build import ReportFile
from nvcli.job.rows.conversation import check_messages
from nvcli.models.vision.image_processor import ImageProcessor
from nvcli.models.vision.image_size import AreaRule, SizeRule
from nvcli.models.vision.tile_size import TileRule
from pdf_files import pdf
from vision_model import write_vision_model

AREA = AreaRule(side=28, min_pixels=56 * 56, max_pixels=40 * 28**2)
TILES = TileRule(side=28, tile=112, most=12)
MEMORY = PixelMemory()
FILE = PixelFile(MEMORY.path)
PAGES = pdf("1 0 0", "0 1 0", "0 0 1")


def prepare(source: bytes | Path, number: int = 1, dpi: int = 200, rule: SizeRule = AREA) -> Prepared:
    processor = ImageProcessor(rule=rule, resampling="bicubic", factor=1 / 255, mean=(0, 0, 0), std=(1, 1, 1))
    return answer(Question(source, processor, MEMORY.path, 0, PdfPage(number, dpi)), FILE)


def test_a_page_is_drawn_at_its_resolution_within_the_limits_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(PAGES)
    for source in (PAGES, tmp_path / "a.pdf"):
        found = prepare(source, 2)
        assert (found.problem, found.fit.height, found.fit.width) == ("", 140, 196)  # 250 x 167 pixels are too many
        pixels = np.empty((found.fit.height, found.fit.width, 3), dtype=np.uint8)
        FILE.read(pixels.data.cast("B"), 0)
        assert pixels[:, :96].reshape(-1, 3).tolist() == [[0, 255, 0]] * (140 * 96)
        assert pixels[:, 102:].min() == 255  # paper is white
    small = prepare(PAGES, 2, dpi=72)
    assert (small.fit.height, small.fit.width) == (56, 84)
    assert len({prepare(PAGES, number).key for number in (1, 2, 3, 3)}) == 3
    assert answer(PageCount(PAGES), None).num_pages == 3


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (PAGES, "the file has 3 pages"),
        (b"hello", "cannot be read: Failed to load document"),
        (b"", "the file is empty"),
        (PAGES[:60], "cannot be read: Failed to load document"),
        (pdf(*["0 0 0"] * 9, encrypted=True), "the file is encrypted; save it without its password"),
        (pdf(*["0 0 0"] * 9, size=(14_000, 3)), "its longer side is more than 200 times as long"),
    ],
    ids=["no such page", "text", "empty", "cut off", "encrypted", "too long"],
)
def test_what_cannot_be_read_is_a_problem(data: bytes, problem: str) -> None:
    assert prepare(data, 9).problem.startswith(problem)


@pytest.mark.parametrize("rule", [AREA, TILES])
def test_a_page_of_any_size_takes_no_more_pixels_than_an_image(rule: SizeRule) -> None:
    found = prepare(pdf("0 0 0", size=(14_000, 14_000)), dpi=1200, rule=rule)
    assert found.problem == ""
    assert found.fit.height * found.fit.width <= rule.most_pixels


def test_a_long_page_is_not_drawn_before_its_size_is_known() -> None:
    found = prepare(pdf("0 0 0", size=(1_000_000, 30)), dpi=1200, rule=TILES)
    assert found.problem.endswith("pixels; allowed: 100,000,000 together")


def parts(**keys: Any) -> list[dict[str, Any]]:
    content = [{"type": "pdf", "path": "a.pdf", **keys}]
    (message,) = check_messages([{"role": "user", "content": content}], under=("messages",))
    return message["content"]


@pytest.mark.parametrize(
    ("pages", "found"),
    [("2", [2]), (2, [2]), ("1-3", [1, 2, 3]), ("3, 1-2", [3, 1, 2]), ("2,4-", [2, "4-"]), (None, ["1-"])],
)
def test_pages_are_numbers_and_ranges(pages: Any, found: list[Any]) -> None:
    read = parts(pages=pages, max_pixels=9_000)
    assert [part.get("page", f"{part.get('first_page')}-") for part in read] == found
    same = {"type": "image", "image": "a.pdf", "dpi": 200, "max_pixels": 9_000}
    assert all(part.items() >= same.items() for part in read)


@pytest.mark.parametrize("pages", ["", "0", "a", "3-1", "-2", True, [1], "1-2-3", "²", "9" * 5_000])
def test_other_pages_are_refused(pages: Any) -> None:
    with pytest.raises(InvalidValue, match=r"`messages\[0\]\.content\[0\]\.pages` is .*allowed: pages from 1"):
        parts(pages=pages)
    with pytest.raises(RowError, match="allowed: 64 pages"):
        parts(pages="1-60,70-74")


@pytest.mark.usefixtures("tokenizer", "warm_engines")
def test_rows_with_pages_are_answered_and_what_is_wrong_names_file_and_page(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(PAGES)
    (tmp_path / "long.pdf").write_bytes(pdf(*["1 0 0"] * 65))
    (tmp_path / "bad.pdf").write_bytes(PAGES[:60])
    keys: list[dict[str, Any]] = [
        {"pages": "1-3"},
        {},
        {"pages": "3,1-2"},
        {"pages": 2},
        {"pages": "2-4"},
        {"pages": "4-"},
        {"path": "long.pdf"},
        {"path": "bad.pdf"},
        {"path": "../a.pdf", "pages": "1"},
    ]
    text = {"type": "text", "text": "What?"}
    rows = [
        {"messages": [{"role": "user", "content": [text, {"type": "pdf", "path": "a.pdf", **each}, text]}]}
        for each in keys
    ]
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(write_vision_model(tmp_path / "model"))
    sampling = {"max_tokens": 6, "temperature": 0}
    run = RunConfig(model=model, job=JobConfig(order="input"), device="cpu", max_num_seqs=4, sampling=sampling)
    with (tmp_path / "said").open("w") as said:
        report = ReportFile(tmp_path / "report.html")
        progress = Progress(said)
        generate(run, inputs=[str(source)], output=str(output), report=report, progress=progress, start=ModelEngine)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert 3 <= (tmp_path / "report.html").read_text().count('<img src="data:image/jpeg;base64,') <= 36
    answers = [row["choices"][0]["text"] for row in found[:4]]
    tokens = [row["usage"]["prompt_tokens"] for row in found[:4]]
    assert answers[0] == answers[1]
    assert tokens[0] == tokens[1] == tokens[2] > tokens[3]
    assert [re.sub(r"^line \d: ", "", row["error"]["message"]).split(";")[0] for row in found[4:]] == [
        'the image "a.pdf": page 4: the file has 3 pages',
        'the image "a.pdf": page 4: the file has 3 pages',
        'the image "long.pdf": it has 65 pages',
        'the image "bad.pdf": cannot be read: Failed to load document (PDFium: Data format error).',
        'the image "../a.pdf": it is not below the folder of the input',
    ]
