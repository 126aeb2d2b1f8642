"""Inputs that are PDF files: a row for each page."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from file_jobs import generate
from model_engine import ModelEngine
from nvcli.core.config import JobConfig, RunConfig
from nvcli.demo import demo_path
from nvcli.errors import ConfigError, InputChanged
from nvcli.job.files import check_inputs, choose_output, expand_inputs
from nvcli.job.images.image_parts import images_of_row
from nvcli.job.images.pdf_files import count_pages_of_inputs
from nvcli.job.input.known_input import know_inputs
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job
from nvcli.job.progress.display import Progress
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.row_digest import InputRows
from nvcli.job.run.resolve import resolve_job, resolve_settings
from nvcli.job.text.prepare import PreparedRow
from nvcli.tools.bench.file_workload import prepared_rows
from pdf_files import pdf
from vision_model import write_vision_model

PAGES = pdf("1 0 0", "0 1 0", "0 0 1")
JOB = JobConfig(order="input", prompt_template="Page {page} of {file}?")
SAMPLING = {"max_tokens": 4, "temperature": 0}


class Silent(Progress):
    def note(self, line: str) -> None:
        pass

    warn = detail = note


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_vision_model(tmp_path_factory.mktemp("pdf") / "model"))


def answer(model: str, *inputs: Path | str, job: JobConfig = JOB, **options: Any) -> list[dict[str, Any]]:
    """Answer inputs into `out.jsonl` in the working folder, and return its rows."""
    run = RunConfig(model=model, job=job, device="cpu", max_num_seqs=4, sampling=SAMPLING)
    names, progress = [str(name) for name in inputs], Silent(io.StringIO())
    generate(run, inputs=names, output="out.jsonl", progress=progress, start=ModelEngine, **options)
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("tokenizer", "warm_engines")
def test_each_page_is_a_row_and_a_bad_file_is_one(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scans, elsewhere = Path("scans"), Path("elsewhere.pdf")
    scans.mkdir()
    (scans / "a.pdf").write_bytes(PAGES)
    (scans / "b.pdf").write_bytes(PAGES[:60])
    elsewhere.write_bytes(pdf("1 1 0"))
    (scans / "c.pdf").symlink_to(elsewhere.resolve())
    parts = [{"type": "pdf", "path": "scans/a.pdf", "pages": n} for n in (1, 2, 3)]
    parts.append({"type": "pdf", "path": "elsewhere.pdf"})
    asked = [f"Page {n} of scans/a.pdf?" for n in (1, 2, 3)] + ["Page 1 of scans/c.pdf?"]
    pairs = zip(parts, asked, strict=True)
    contents = [[part, {"type": "text", "text": text}] for part, text in pairs]
    lines = [json.dumps({"messages": [{"role": "user", "content": content}]}) for content in contents]
    Path("same.jsonl").write_text("\n".join(lines))
    same = answer(model, "same.jsonl", job=JobConfig(order="input"))
    Path("out.jsonl").unlink()
    answer(model, scans, limit=2, overwrite=True)
    rows = answer(model, scans)
    assert [(row["id"], row["file"], row.get("page")) for row in rows] == [
        ("row-0", "scans/a.pdf", 1),
        ("row-1", "scans/a.pdf", 2),
        ("row-2", "scans/a.pdf", 3),
        ("row-3", "scans/b.pdf", None),
        ("row-4", "scans/c.pdf", 1),
    ]
    assert [row["choices"] for row in rows if not row["error"]] == [row["choices"] for row in same]
    assert rows[3]["error"] == {
        "type": "invalid_image",
        "message": "all pages of scans/b.pdf: cannot be read: Failed to load document (PDFium: Data format error); "
        "replace it with an intact PDF file, or leave it out",
    }
    (scans / "b.pdf").write_bytes(pdf("0 1 1", "1 0 1"))
    with pytest.raises(ConfigError, match=r"1 row edited, 1 new(.|\n)*not readable → .* 2 pages"):
        answer(model, scans)
    updated = answer(model, scans, update=True)
    assert [(row["index"], row["file"], row.get("page")) for row in updated[3:]] == [
        (3, "scans/b.pdf", 1),
        (4, "scans/b.pdf", 2),
        (5, "scans/c.pdf", 1),
    ]
    assert [row["choices"] for row in (*updated[:3], updated[5])] == [row["choices"] for row in same]


def identities(name: Path) -> InputRows:
    names = [str(name)]
    return RowReader(names, RowParser({}), known=know_inputs(names), pdfs=count_pages_of_inputs(names)).identify_all()


def test_a_page_is_the_same_row_while_its_file_has_the_same_name_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    files = {name: tmp_path / name for name in ("a.pdf", "b.pdf", "sub/a.pdf")}
    for file in files.values():
        file.write_bytes(PAGES)
    digests = {name: bytes(identities(file).digests) for name, file in files.items()}
    assert digests["a.pdf"] == digests["sub/a.pdf"] != digests["b.pdf"]
    assert len({digests["a.pdf"][at : at + 16] for at in (0, 16, 32)}) == 3
    files["a.pdf"].write_bytes(pdf("1 0 0", "0 1 0", "0 0 0"))
    assert not set(divided(digests["a.pdf"])) & set(divided(bytes(identities(files["a.pdf"]).digests)))


def divided(digests: bytes) -> list[bytes]:
    return [digests[at : at + 16] for at in range(0, len(digests), 16)]


@pytest.mark.usefixtures("tokenizer", "warm_engines")
def test_a_file_that_changes_during_the_run_ends_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.pdf").write_bytes(PAGES)
    run = RunConfig(model=model, job=JOB, device="cpu", sampling=SAMPLING)
    job = resolve_job(run, inputs=["a.pdf"], output="out.jsonl", limit=None)
    images = job.row_images()
    assert images is not None
    prepared = prepared_rows(resolve_settings(run), "a.pdf")  # as `bench` and `compare-quality` read them
    assert [row.images is not None for row in prepared if isinstance(row, PreparedRow)] == [True] * 3
    ((*_, page),) = job.make_reader().batches()
    assert isinstance(page, Job)
    ((drawn,),) = images.read([images_of_row(page)])  # type: ignore[misc]
    del drawn  # what a row holds is not drawn again
    os.utime("a.pdf", ns=(1, 1))
    with pytest.raises(InputChanged, match=r"a\.pdf was changed during the run: another program wrote to it"):
        images.read([images_of_row(page)])
    images.close()


@pytest.mark.parametrize(
    ("name", "data", "settings", "problem"),
    [
        ("a.pdf", PAGES[:60], {}, r"a\.pdf: cannot be read: .*; replace it with an intact PDF file"),
        ("a.pdf", b"", {}, r"a\.pdf: the file is empty; replace it with an intact PDF file"),
        ("a.pdf", pdf("0 0 0", encrypted=True), {}, r"a\.pdf: the file is encrypted; save it without its password"),
        ("a.pdf", PAGES, {"job": JobConfig()}, r"no(.|\n)*prompt(.|\n)*say what .*: --prompt-template 'Transcribe"),
        ("a.pdf", PAGES, {"model": str(demo_path())}, r"pages are images, and .* text alone; take one that reads"),
        ("a.pdf", PAGES, {"images": "never"}, r"whose pages are images, and `images` is never"),
        ("a.pdf.gz", b"\x1f\x8b", {}, r"a compressed PDF file, which is not read; unpack it"),
        (
            "a.jsonl",
            PAGES,
            {},
            r"holds a PDF file, and its name does not say so; rename it: mv .*\.jsonl\.pdf",
        ),
        ("a.pdf", b"\x28\xb5\x2f\xfd", {}, r"holds zstd data, and its name does not say so"),
    ],
    ids=["cut off", "empty", "encrypted", "no prompt", "text model", "never", "packed", "other name", "zstd"],
)
def test_an_input_that_cannot_be_read_is_refused_before_the_run(
    model: str, tmp_path: Path, name: str, data: bytes, settings: dict[str, Any], problem: str
) -> None:
    (tmp_path / name).write_bytes(data)
    run = msgspec.structs.replace(RunConfig(model=model, job=JOB, device="cpu"), **settings)
    with pytest.raises(ConfigError, match=problem):
        resolve_job(run, inputs=[str(tmp_path / name)], output=str(tmp_path / "out.jsonl"), limit=None)


def test_the_file_must_be_a_regular_one_and_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="not a regular file, which a PDF file must be"):
        check_inputs([str(tmp_path / "a.pdf")])
    monkeypatch.setattr("nvcli.job.files.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs pypdfium2: pip install 'nvcli\[pdf\]'"):
        check_inputs([str(tmp_path / "a.pdf")])


def test_a_folder_of_pdf_files_is_an_input_also_once_its_output_is_there(tmp_path: Path) -> None:
    for name in ("b.pdf", "a.pdf", "a.out.jsonl", "all.jsonl", "all.jsonl.manifest.json"):
        (tmp_path / name).touch()
    output = str(tmp_path / "all.jsonl")
    assert choose_output([str(tmp_path / "a.pdf")], None) == str(tmp_path / "a.out.jsonl")
    assert expand_inputs([str(tmp_path)], output) == [str(tmp_path / "a.pdf"), str(tmp_path / "b.pdf")]
    (tmp_path / "rows.jsonl").touch()
    assert expand_inputs([str(tmp_path)], output) == [str(tmp_path / "rows.jsonl")]
