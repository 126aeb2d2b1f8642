"""The tokenizer in use, and weights against config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nvcli.demo import demo_path
from nvcli.tools.doctor.findings import Level
from nvcli.tools.doctor.model_probe import check_tensors, check_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_path(), tmp_path / "model"))


def test_a_sound_model(folder: Path) -> None:
    findings = [*check_tokenizer(folder, 640), check_tensors(folder)]
    assert [finding.level for finding in findings] == [Level.OK] * 3


def test_a_decoder_without_lm_head(folder: Path) -> None:
    """It makes embeddings, and its tensors may lack `model.` before their names."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    assert check_tensors(folder).level == Level.OK
    file = folder / "model.safetensors"
    save_file({name.removeprefix("model."): value for name, value in load_file(file).items()}, file)
    assert check_tensors(folder).level == Level.OK


def test_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (finding,) = check_tokenizer(folder, 640)
    assert (finding.level, finding.name) == (Level.PROBLEM, "tokenizer")


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (finding,) = check_tokenizer(folder, 640)
    assert "cannot load the tokenizer" in finding.found


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    (finding,) = check_tokenizer(folder, 10)
    assert finding.level == Level.PROBLEM
    assert "the model has 10" in finding.found


def test_no_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    _, template = check_tokenizer(folder, 640)
    assert template.level == Level.WARNING
    assert "no chat template" in template.found


@pytest.mark.parametrize(
    ("text", "level", "told"),
    [
        ("{{ nonsense", Level.WARNING, "become errors"),
        ("hello", Level.WARNING, "leaves the message out"),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
         "{% endfor %}", Level.NOTE, "does not accept system messages"),
    ],
)  # fmt: skip
def test_chat_templates(folder: Path, text: str, level: Level, told: str) -> None:
    (folder / "chat_template.jinja").write_text(text)
    _, template = check_tokenizer(folder, 640)
    assert (template.level, told in template.found) == (level, True), template


def test_weights_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    finding = check_tensors(folder)
    assert finding.level == Level.PROBLEM
    assert "config.json asks for" in finding.found
