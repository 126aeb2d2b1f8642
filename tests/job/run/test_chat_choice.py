"""Which texts of a job become messages of a user, what the user is told, and how an output goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from file_jobs import generate
from kept_lines import KeptLines
from nvcli.core.config import JobConfig, RunConfig
from nvcli.demo import demo_path
from nvcli.errors import ConfigError
from nvcli.job.output.manifest import load_manifest, save_manifest
from nvcli.job.text.chat_renderer import Conversation
from nvcli.job.text.tokenizer import Tokenizer, has_chat_template

USER = [{"role": "user", "content": "hi"}]
COMPLETION = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "hi"}}


class InProcess:
    """Stands for the process that renders chat templates, whose start takes a second."""

    def __init__(self, model_path: Path, *, chat_template: str | None = None) -> None:
        pass

    def render(self, conversations: Sequence[Conversation]) -> list[str]:
        turns = [
            [f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in conversation.messages]
            for conversation in conversations
        ]
        return ["".join(turn) + "<|im_start|>assistant\n" for turn in turns]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvcli.job.run.resolve.ChatRenderer", InProcess)


@pytest.fixture(scope="module")
def textual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model without its chat template."""
    folder = tmp_path_factory.mktemp("models") / "textual"
    shutil.copytree(demo_path(), folder, ignore=shutil.ignore_patterns("*.jinja", "*.py", "__pycache__"))
    return folder


def run(
    folder: Path, rows: list[dict[str, Any]], model: Path | str = "demo", **job: Any
) -> tuple[list[str], list[Any]]:
    """What the user is told first, and for each output row the tokens of its prompt or its error."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = KeptLines()
    config = RunConfig(model=str(model), device="cpu", max_model_len=256, max_num_seqs=4, job=JobConfig(**job))
    generate(config, inputs=[str(source)], output=str(output), progress=notes, start=FakeEngine)
    return notes.lines, [tokens_of(json.loads(line)) for line in sorted(output.read_text().splitlines())]


def tokens_of(row: dict[str, Any]) -> Any:
    if row["error"] is not None:
        return row["error"]["code" if "custom_id" in row else "type"]
    usage = row["response"]["body"]["usage"] if "custom_id" in row else row["usage"]
    return usage["prompt_tokens"]


RAW = 2
"""The tokens of the text "hi" for the built-in model."""
SENT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def message() -> int:
    """The tokens of "hi" as the message of a user."""
    (ids,) = Tokenizer.load(demo_path()).encode([SENT], add_special_tokens=False)
    assert isinstance(ids, list)
    return len(ids)


AS_IT_IS, AS_MESSAGE = "`{}` is sent as it is, without", "`{}` is sent as a user message"


@pytest.mark.parametrize(
    ("row", "job", "told", "is_message"),
    [
        ({"prompt": "hi"}, {}, AS_IT_IS.format("prompt"), False),
        ({"prompt": "hi"}, {"prompt_field": "prompt"}, AS_IT_IS.format("prompt"), False),
        ({"prompt": "hi"}, {"chat": "always"}, AS_MESSAGE.format("prompt"), True),
        ({"q": "hi"}, {"prompt_field": "q"}, AS_MESSAGE.format("q"), True),
        ({"q": "hi"}, {"prompt_field": "q", "chat": "never"}, AS_IT_IS.format("q"), False),
        ({"q": "hi"}, {"prompt_template": "{q}"}, "the text of `job.prompt_template` is sent as a user message", True),
        ({"q": "hi"}, {"prompt_template": "{q}", "chat": "never"}, "`job.prompt_template` is sent as it is", False),
        (COMPLETION, {"prompt_field": "q"}, "the text of completions and of lines is sent as it is", False),
        (COMPLETION, {"chat": "always"}, "the text of completions and of lines is sent as a user message", True),
        (
            {"instruction": "hi", "input": "", "output": "o"},
            {},
            "`instruction` with `input` below it is sent as a",
            True,
        ),
        (
            {"instruction": "hi", "input": ""},
            {"chat": "never"},
            "`instruction` with `input` below it is sent as it",
            False,
        ),
        ({"conversations": [{"from": "human", "value": "hi"}]}, {}, "`conversations` is read as `messages`", True),
        ({"messages": USER}, {"chat": "never"}, "demo is ready", True),
    ],
)
def test_what_is_sent_and_told(
    tmp_path: Path, message: int, row: dict[str, Any], job: dict[str, Any], told: str, is_message: bool
) -> None:
    notes, found = run(tmp_path, [row], **job)
    assert told in notes[0]
    assert found == [message if is_message else RAW]


def test_the_system_message_of_prompts_that_are_messages(tmp_path: Path, message: int) -> None:
    assert run(tmp_path, [{"q": "hi"}], prompt_template="{q}", system="s")[1][0] > message


def test_a_model_without_a_chat_template(tmp_path: Path, textual: Path) -> None:
    notes, found = run(tmp_path, [{"q": "hi"}], textual, prompt_field="q")
    assert (notes[0], found) == (
        "`q` is sent as it is: the model has no chat template (--chat-template names one)",
        [RAW],
    )
    with pytest.raises(
        ConfigError, match=r"`job\.chat` is always, and .* has no chat template; .* \(--chat-template\)"
    ):
        run(tmp_path, [{"q": "hi"}], textual, chat="always")


def forget_choice(folder: Path) -> None:
    """Have an output look as if an earlier version had begun it and not finished."""
    manifest = load_manifest(folder / "out.jsonl")
    assert manifest is not None
    manifest.facts.pop("job.chat", None)
    save_manifest(folder / "out.jsonl", manifest)


Q = [{"q": "hi"}, {"q": "hi"}]
P = [{"prompt": "hi"}, {"prompt": "hi"}]
MANY = [{"messages": USER}] * 2


def test_an_output_of_an_earlier_version_goes_on_as_it_was_begun(tmp_path: Path, message: int) -> None:
    run(tmp_path, Q, prompt_field="q", chat="never")
    (tmp_path / "out.jsonl").write_text((tmp_path / "out.jsonl").read_text().splitlines()[0] + "\n")
    forget_choice(tmp_path)
    notes, found = run(tmp_path, Q, prompt_field="q")
    assert "the output was begun with prompts as they are" in notes[0]
    assert found == [RAW, RAW]
    with pytest.raises(
        ConfigError, match=r"job.chat: not set → user messages.* \(to continue as it began: with --no-chat\)"
    ):
        run(tmp_path, Q, prompt_field="q", chat="always")


@pytest.mark.parametrize(
    ("rows", "begun", "then"),
    [
        (Q, {"prompt_field": "q"}, {"prompt_field": "q", "chat": "always"}),
        (P, {}, {"chat": "never"}),
        (P, {"chat": "never"}, {}),
        (MANY, {}, {"chat": "always"}),
        (MANY, {"chat": "always"}, {"chat": "never"}),
        (Q, {"prompt_field": "q", "chat": "never"}, {"prompt_field": "q"}),
    ],
)
def test_an_output_goes_on_with_equal_prompts(
    tmp_path: Path, rows: list[dict[str, Any]], begun: dict[str, Any], then: dict[str, Any]
) -> None:
    _, first = run(tmp_path, rows, **begun)
    (tmp_path / "out.jsonl").write_text((tmp_path / "out.jsonl").read_text().splitlines()[0] + "\n")
    _, found = run(tmp_path, rows, **then)
    assert found == first


@pytest.mark.parametrize(
    ("rows", "begun", "then", "way_back"),
    [
        (P, {}, {"chat": "always"}, "with --no-chat"),
        (P, {"chat": "always"}, {}, "with --chat"),
        (Q, {"prompt_field": "q"}, {"prompt_field": "q", "chat": "never"}, "with --chat"),
        ([*MANY, *P], {}, {"chat": "always"}, "with --no-chat"),
        ([{"instruction": "hi", "input": "x"}], {}, {"chat": "never"}, "without --no-chat"),
    ],
)
def test_an_output_does_not_go_on_with_other_prompts(
    tmp_path: Path, rows: list[dict[str, Any]], begun: dict[str, Any], then: dict[str, Any], way_back: str
) -> None:
    run(tmp_path, rows, **begun)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=rf"job.chat: .* \(to continue as it began: {way_back}\)"):
        run(tmp_path, rows, **then)
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"tokenizer_config.json": '{"chat_template": "{{ 1 }}"}'}, True),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "{{ 1 }}"}]}'}, True),
        ({"tokenizer_config.json": '{"chat_template": null}'}, False),
        ({"chat_template.jinja": "{{ 1 }}"}, True),
        ({"chat_template.jinja": "", "tokenizer_config.json": '{"chat_template": "{{ 1 }}"}'}, False),
        ({"additional_chat_templates/tool_use.jinja": "{{ 1 }}"}, True),
        ({"chat_template.json": '{"chat_template": "{{ 1 }}"}'}, True),
        ({"chat_template.jinja": "", "chat_template.json": '{"chat_template": "{{ 1 }}"}'}, True),
    ],
)
def test_templates_are_found_where_the_tokenizer_finds_them(
    tmp_path: Path, files: dict[str, str], expected: bool
) -> None:
    shutil.copy(demo_path() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        values = json.loads(text) if name.endswith(".json") else None
        classed = text if values is None else json.dumps({**values, "tokenizer_class": "PreTrainedTokenizerFast"})
        (tmp_path / name).write_text(classed)
    if "tokenizer_config.json" not in files:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert has_chat_template(tmp_path) is expected
    assert bool(Tokenizer.load(tmp_path).chat_template) is expected
