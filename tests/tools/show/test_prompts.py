"""The prompt of a row is found in the row or in the job's input, and never that of another row."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvcli.job.input.known_input import describe_input
from nvcli.job.output.manifest import Manifest, save_manifest
from nvcli.tools.show import prompts as module
from nvcli.tools.show.answers import ShownRow, read_shown_row
from nvcli.tools.show.page import Page
from nvcli.tools.show.prompts import Prompts


def row(index: int, row_id: str | int | None = None, **others: Any) -> ShownRow:
    line = {"id": row_id or f"row-{index}", "index": index, "choices": [], "error": None, **others}
    shown = read_shown_row(msgspec.json.encode(line))
    assert shown is not None
    return shown


def job(folder: Path, *inputs: str, **facts: str) -> Path:
    """An output with a manifest that names its inputs."""
    names = []
    for number, text in enumerate(inputs):
        path = folder / f"in{number}.jsonl"
        path.write_text(text)
        names.append(str(path))
    output = folder / "out.jsonl"
    described = list(zip(names, map(describe_input, names), strict=True))
    save_manifest(output, Manifest(created=1, model="m", facts=dict(facts), inputs=described))
    return output


def test_prompts_of_all_rows_in_any_order(tmp_path: Path) -> None:
    first = "\ufeff" + "".join(json.dumps({"prompt": f"p{number}"}) + "\n \n" for number in range(700))
    second = "".join(json.dumps({"prompt": f"p{number}", "id": f"i{number}"}) + "\n" for number in range(700, 1000))
    with Prompts(job(tmp_path, first, second)) as prompts:
        for index in (5, 999, 0, 256, 255, 699, 700, 998, 512, 3):
            own_id = f"i{index}" if index >= 700 else None
            assert prompts.of(row(index, own_id)) == f"p{index}"
        assert prompts.of(row(1000)) is None
        assert prompts.of(row(800, "another id")) is None


def test_forms_of_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": None}]
    rows: list[Any] = [
        {"question": "q", "prompt": "a column"},
        {"messages": messages},
        {"custom_id": "c", "body": {"messages": messages[:1]}},
        {"question": 5},
        {"custom_id": "e", "body": {"input": "embedded"}},
    ]
    text = "".join(json.dumps(each) + "\n" for each in rows) + "no json\n"
    error = {"type": "invalid_json", "message": "m"}
    with Prompts(job(tmp_path, text, **{"job.prompt_field": "question"})) as prompts:
        assert [prompts.of(row(index, "c" if index == 2 else None)) for index in (0, 1, 2, 3, 5)] == [
            "q",
            "user: Hi\nassistant: ",
            "user: Hi",
            None,
            None,
        ]
        assert prompts.of(row(4, "e")) == "embedded"
        assert [prompts.of(row(index, error=error)) for index in (3, 5)] == ['{"question": 5}', "no json"]
        assert prompts.of(row(0, question="kept")) == "kept"
        assert prompts.of(row(0, input={"question": "kept inside"})) == "kept inside"


def test_images_are_named_and_their_bytes_are_not_shown(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(1000)).decode()
    parts = [
        {"type": "image", "image": "cats/1.jpg"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "pdf", "path": "a.pdf", "pages": "1-3"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "text", "text": "What?"},
    ]
    rows = [
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "What?", "photo": ["b.png", url]},
        {"prompt": 5, "photo": url},
        {"prompt": "What?", "photo": ""},
    ]
    output = job(tmp_path, "".join(json.dumps(each) + "\n" for each in rows), **{"job.image_field": "photo"})
    shown = "data:image/png, 1,000 bytes"
    with Prompts(output) as prompts:
        found = [prompts.of(row(number)) for number in (0, 1, 3)]
        failed = prompts.of(row(2, error={"type": "invalid_value", "message": "m"}))
    assert found == [
        f"user: [image cats/1.jpg]\n[image {shown}]\n[PDF a.pdf, pages 1-3]\n[input_audio]\nWhat?",
        f"[image b.png]\n[image {shown}]\nWhat?",
        "What?",
    ]
    assert failed == f'{{"prompt": 5, "photo": "{shown}"}}'
    page = Page(is_coloured=False).format(row(0, photo=url.replace("image/png", "")), None)
    assert 'photo: "data:, 1,000 bytes"' in page


def test_an_input_that_was_changed_or_is_far_away_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = job(tmp_path, '{"prompt": "a"}\n' * 4)
    (tmp_path / "moved").mkdir()
    for file in tmp_path.glob("*.json*"):
        file.rename(tmp_path / "moved" / file.name)
    output = tmp_path / "moved" / output.name
    with Prompts(output) as prompts:
        assert prompts.of(row(3)) == "a"  # found beside the output
    monkeypatch.setattr(module, "_MOST_BYTES", 40)
    with Prompts(output) as prompts:
        assert [prompts.of(row(index)) for index in range(4)] == ["a", "a", "a", None]
    (tmp_path / "moved" / "in0.jsonl").write_text('{"prompt": "b"}\n' * 4)
    with Prompts(output) as prompts:
        assert prompts.of(row(3)) is None
    (tmp_path / "moved" / "out.jsonl.manifest.json").write_text("{")
    with Prompts(output) as prompts:
        assert prompts.of(row(3)) is None
