"""A chat: the conversation grows by what was answered, and commands are obeyed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from held_engine import MakeLLM
from nvcli.core.config import JobConfig
from nvcli.core.lora_config import LoraConfig
from nvcli.errors import ConfigError
from nvcli.llm.answer import Answer
from nvcli.llm.chat import HELP, Chat, run_chat
from nvcli.llm.llm import LLM, AnswerStream


class Typed:
    """Somebody who types these lines. A KeyboardInterrupt among them gives up the line."""

    def __init__(self, *lines: str | KeyboardInterrupt) -> None:
        self._lines = iter(lines)
        self.seen: list[str] = []

    def read_line(self, *, goes_on: bool) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    def show(self, stream: AnswerStream) -> Answer:
        if text := "".join(stream):
            self.seen.append(text)
        return stream.answer

    def say(self, text: str) -> None:
        self.seen.append(f"says: {text}")

    def say_error(self, text: str) -> None:
        self.seen.append(f"error: {text}")


@pytest.fixture
def llm(make_llm: MakeLLM) -> Iterator[LLM]:
    with make_llm(engine={"tokens_per_poll": 1}, seed=3) as made:
        yield made


def chat(llm: LLM, *lines: str | KeyboardInterrupt, system: str | None = None) -> tuple[Chat, list[str]]:
    made, person = Chat(llm, system=system), Typed(*lines)
    run_chat(made, person)
    return made, person.seen


def test_the_adapter_of_the_next_answers_is_chosen(make_llm: MakeLLM, named_adapters: LoraConfig) -> None:
    with make_llm(lora=named_adapters) as llm:
        _, seen = chat(llm, "/lora", "a", "/clear", "/lora two", "b", "/lora sql", "/clear", "/lora", "c")
    assert [line for line in seen if ": " in line] == [
        "says: the base model answers",
        "says: the conversation is forgotten",
        "says: the adapter two answers",
        "error: sql is no adapter; there are: one, two",
        "says: the conversation is forgotten",
        "says: the base model answers",
    ]
    assert [request.adapter for request in make_llm.engines[0].received] == [0, 2, 0]
    _, seen = chat(make_llm(), "/lora sql")
    assert seen == ["error: there are no adapters with names; give them when the chat begins: --lora NAME=PATH"]


def test_each_turn_holds_those_before_it(llm: LLM, make_llm: MakeLLM) -> None:
    made, seen = chat(llm, "ab", "", "cd", system="s")
    assert seen == [">a<ba>u<s>s<", ">a<dc>u<<s>s<u>ab<a>>a<ba>u<s>s<"]
    assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [request.seed for request in make_llm.engines[0].received] == [3, 4]


def test_commands(llm: LLM) -> None:
    lines = ["ab", "/clear", "/system be brief", "cd", "/system", "/clear", "//x", "/nope", "/help", "/exit", "never"]
    made, seen = chat(llm, *lines)
    assert seen == [
        ">a<ba>u<",
        "says: the conversation is forgotten",
        "says: the system message is set",
        ">a<dc>u<feirb eb>s<",
        "says: there is no system message",
        "says: the conversation is forgotten",
        ">a<x/>u<",
        "error: /nope is not a command; /help shows them, and // begins a message with a slash",
        f"says: {HELP}",
    ]
    assert made.messages[0] == {"role": "user", "content": "/x"}


def test_a_message_of_several_lines_and_a_line_that_is_given_up(llm: LLM) -> None:
    made, _ = chat(llm, '"""', "a", "b", '"""', KeyboardInterrupt(), '"""c', KeyboardInterrupt(), 'd"""', '"""e')
    assert [message["content"] for message in made.messages[::2]] == ["a\nb", 'd"""', "e"]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(llm: LLM, make_llm: MakeLLM) -> None:
    made = Chat(llm)

    def stop(stream: AnswerStream) -> Answer:
        next(stream)
        raise KeyboardInterrupt

    assert made.ask("abc", stop) is None
    deadline = time.monotonic() + 20
    while make_llm.engines[0]._running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert made.messages[1] == {"role": "assistant", "content": ">"}
    assert made.ask("de", lambda stream: stream.answer) is not None
    assert len(made.messages) == 4


def test_a_question_that_cannot_be_answered_is_dropped(llm: LLM) -> None:
    made, seen = chat(llm, "x" * 100, "ab", "y" * 50, "c")
    assert seen[0].startswith("error: the prompt has 106 tokens, and `max_model_len` is 64")
    assert "/clear" not in seen[0]
    assert seen[2].endswith("the conversation is too long for the model: /clear starts a new one")
    assert [message["content"] for message in made.messages[::2]] == ["ab", "c"]


def test_a_model_without_a_chat_template(make_llm: MakeLLM, tmp_path: Path) -> None:
    folder = shutil.copytree(make_llm.model, tmp_path / "base")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    make_llm.model = folder
    assert not make_llm().has_chat_template
    with pytest.raises(ConfigError, match=r"has no chat template, so it cannot chat; .* --raw -p TEXT"):
        make_llm(needs_chat_template=True)


def test_what_was_thought_is_not_said_again(make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "thinking.jinja").write_text("{# <think></think> #}{{ messages[-1].content }}")
    made, seen = chat(make_llm(job=JobConfig(chat_template="~/thinking.jinja")), "<think>mm</think>hello"[::-1])
    assert seen == ["<think>mm</think>hello"]
    assert made.messages[-1] == {"role": "assistant", "content": "hello"}
