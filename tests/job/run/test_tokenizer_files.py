"""A checkpoint's tokenizer files: none of their code is run, and the one that cannot be used is named."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from packaging.version import Version

from fake_command import ENVIRON
from nvcli.demo import demo_path
from nvcli.errors import LoadError, RowError
from nvcli.job.text import tokenizer
from nvcli.job.text.tokenizer import Tokenizer, check_tokenizer_files
from warm_process import run_warm

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_path(), tmp_path / "model", ignore=shutil.ignore_patterns("*.py*", "*.md")))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def ask_for_code(folder: Path) -> Path:
    """Make a checkpoint whose config and tokenizer are code; the file that the code writes when it is imported."""
    canary = folder / "canary"
    code = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
    (folder / "own_config.py").write_text(
        f"from transformers import Qwen3Config\n{code}class C(Qwen3Config):\n    model_type = 'own'\n"
    )
    (folder / "own_tokenizer.py").write_text(
        f"from transformers import PreTrainedTokenizerFast\n{code}class T(PreTrainedTokenizerFast):\n    pass\n"
    )
    maps = {"AutoConfig": "own_config.C", "AutoTokenizer": [None, "own_tokenizer.T"]}
    edit(folder / "config.json", lambda values: values.update(auto_map=maps, model_type="own"))
    edit(folder / CONFIG, lambda values: values.update(auto_map=maps, tokenizer_class="T"))
    return canary


def test_code_of_a_checkpoint_is_not_run_whatever_standard_input_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = ask_for_code(folder)
    asked: list[str] = []

    def agree(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", agree)
    with pytest.raises(LoadError, match=r"tokenizer_config.json: `auto_map` is .* which nvcli never runs; copy"):
        Tokenizer.load(folder)
    assert asked == []
    assert not canary.exists()

    from transformers import AutoTokenizer, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
    assert canary.exists(), "this checkpoint tells when its code is run"


def test_bench_runs_no_code_when_yes_is_piped_in(folder: Path) -> None:
    canary = ask_for_code(folder)
    (folder / "in.jsonl").write_text('{"prompt": "x"}\n')
    command = [sys.executable, "-m", "nvcli", "bench", "-m", str(folder), "--input", "in.jsonl"]
    result = run_warm(command, cwd=folder, env=ENVIRON, input="y\n" * 9, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "which nvcli never runs" in result.stderr
    assert "[y/N]" not in result.stderr + result.stdout
    assert not canary.exists()


def test_code_that_is_not_needed_is_passed_over(folder: Path) -> None:
    """Many published checkpoints name code for libraries that do not know their model."""
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'canary')!r}).touch()\n")
    edit(folder / CONFIG, lambda values: values.update(auto_map={"AutoTokenizer": [None, "own.T"]}))
    assert Tokenizer.load(folder).encode(["a"], add_special_tokens=False) != []
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (TOKENIZER, '{"a":' * 100_000, "nested too deeply"),
        (CONFIG, "[" * 100_000, "nested too deeply"),
        (CONFIG, "[]", "where a JSON object belongs"),
        (CONFIG, "{", "not valid JSON"),
        (TOKENIZER, "{}", "cannot load the tokenizer"),
        ("special_tokens_map.json", "{", "not valid JSON"),
        (CONFIG, '{"chat_template": 5}', "`chat_template`: 5 is no chat template"),
        (CONFIG, '{"chat_template": ["{{ 1 }}"]}', '`chat_template`: ["{{ 1 }}"] is no chat template'),
        ("chat_template.jinja", "\xe9", "not UTF-8 text (byte 0)"),
        (CONFIG, '{"tokenizer_class": 5}', "cannot load the tokenizer"),
        (CONFIG, '{"tokenizer_class": "TokenizersBackend", "eos_token": 5}', "eos_token"),
    ],
)
def test_the_file_at_fault_is_named(folder: Path, file: str, text: str, message: str) -> None:
    (folder / file).write_text(text, encoding="latin-1")
    with pytest.raises(LoadError) as caught:
        Tokenizer.load(folder)
    assert str(caught.value).startswith(f"{folder / file}: ")
    assert message in str(caught.value)
    assert "again" in str(caught.value) or "belongs" in str(caught.value), "a way out"


def test_a_tokenizer_that_needs_a_package_or_code_says_which(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / TOKENIZER).unlink()
    (folder / CONFIG).write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"tokenizer.model: cannot be read without sentencepiece; pip install"):
        Tokenizer.load(folder)
    (folder / "tokenizer.model").rename(folder / "tiktoken.model")
    (folder / CONFIG).write_text('{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}')
    with pytest.raises(LoadError, match=r"which nvcli never runs; copy a tokenizer.json"):
        check_tokenizer_files(folder)


IS_OLD = Version(tokenizers.__version__) < Version("0.23")
OLD = pytest.mark.skipif(IS_OLD, reason="tokenizers before 0.23 go through all ids up to the largest, in 16 GB")


@pytest.mark.parametrize("token_id", [pytest.param(4_000_000_000, marks=OLD), 2**70])
def test_ids_that_no_model_can_have(folder: Path, token_id: int) -> None:
    edit(folder / TOKENIZER, lambda values: values["model"]["vocab"].update(zz=token_id))
    with pytest.raises(LoadError, match=rf"{TOKENIZER}: .*(token \"zz\" has the id 4,000,000,000|expected u32)"):
        Tokenizer.load(folder)


def test_what_is_no_file_is_refused_before_anything_opens_it(folder: Path) -> None:
    for name in (TOKENIZER, CONFIG, "chat_template.jinja", "merges.txt", "added_tokens.json"):
        file = folder / name
        saved = file.read_bytes() if file.exists() else None
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        with pytest.raises(LoadError, match=f"{name}: cannot be read: it is a FIFO"):
            check_tokenizer_files(folder)
        file.unlink()
        file.symlink_to("nowhere")
        with pytest.raises(LoadError, match=f"{name}: cannot be read: a link to nowhere, where there is no file"):
            check_tokenizer_files(folder)
        file.unlink()
        if saved is not None:
            file.write_bytes(saved)
    check_tokenizer_files(folder)


def test_files_that_would_fill_the_memory_are_refused(folder: Path) -> None:
    for name, size in (("chat_template.jinja", 3 << 30), (TOKENIZER, 3 << 30)):
        with (folder / name).open("r+b") as file:
            file.truncate(size)  # takes no room on the disk
        with pytest.raises(LoadError, match=rf"{name}: 3,221,225,472 bytes, more than the"):
            check_tokenizer_files(folder)
        (folder / name).unlink()


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
        "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
        "{{ self._TemplateReference__context.eval_ctx.environment.loader }}{{ self.__init__.__globals__.x }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('canary', 'w') }}",
        "{{ strftime_now.__closure__[0].cell_contents.os.system('touch canary') }}",
        "{{ messages.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('touch canary') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ messages | map(attribute='__class__.__mro__') | list }}{{ (messages | attr('append')).__self__.x }}",
    ],
)
def test_a_chat_template_reaches_no_python_objects(
    folder: Path, template: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It can be asked for a row's text, and for nothing of the process that renders it."""
    monkeypatch.chdir(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(folder)
    text = ""
    with contextlib.suppress(RowError):
        text = tokenizer.render([{"role": "user", "content": "hi"}])
    assert "class" not in text
    assert "root:" not in text
    assert "builtin" not in text
    assert not (tmp_path / "canary").exists()
