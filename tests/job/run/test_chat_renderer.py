"""A chat template that does not end, or takes all memory, costs its own rows and no others."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nvcli.demo import demo_path
from nvcli.errors import LoadError, RowError
from nvcli.job.text.chat_renderer import ChatRenderer, Conversation

pytestmark = pytest.mark.usefixtures("warm_engines")  # what renders is a copy too

TEMPLATE = """
{%- set text = messages[0].content -%}
{%- if text == "loop" -%}{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif text == "power" -%}{%- set n = 8 + messages|length -%}{{ n ** (n ** n) }}
{%- elif text == "bomb" -%}{{ "x" * 10 ** 10 }}
{%- elif text == "surrogate" -%}{{ "\\ud800" }}
{%- elif text == "silent" -%}{{ raise_exception("") }}
{%- elif text == "refuse" -%}{{ raise_exception("never") }}
{%- endif -%}
[{{ text }}]"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        shutil.copy(demo_path() / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def renderer(model: Path) -> Iterator[ChatRenderer]:
    with closing(ChatRenderer(model, max_seconds=0.5)) as renderer:
        yield renderer


def conversation(text: str, **variables: Any) -> Conversation:
    return Conversation([{"role": "user", "content": text}], variables)


def message(result: str | RowError) -> str:
    assert isinstance(result, RowError)
    assert result.type == "chat_template_error"
    return result.message


def test_a_template_that_goes_on_for_ever_costs_its_own_rows(renderer: ChatRenderer) -> None:
    """Loops, and one operation that takes hours and lets no other thread of its process run."""
    started = time.monotonic()
    texts = ["a", "loop", "b", "power", "refuse"]
    first, loop, second, power, refused = renderer.render([conversation(text) for text in texts])
    assert (first, second) == ("[a]", "[b]")
    assert (
        message(loop)
        == message(power)
        == "the chat template cannot render `messages`: its process is not done after 0.5 s"
    )
    assert "never" in message(refused)
    assert time.monotonic() - started < 60


def test_a_template_that_takes_all_memory_or_gives_no_text_costs_its_own_rows(renderer: ChatRenderer) -> None:
    texts = ("bomb", "silent", "surrogate", "a")
    bomb, silent, surrogate, fine = renderer.render([conversation(text) for text in texts])
    assert message(bomb) == "the chat template cannot render `messages`: it takes more than 4 GiB of memory"
    assert message(silent) == "the chat template refused `messages`: TemplateError"
    assert "lone surrogate" in message(surrogate)
    assert fine == "[a]"


def test_variables_and_another_template_reach_the_process(model: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mode }}{{ '|' if add_generation_prompt }}"
    with closing(ChatRenderer(model, chat_template=template)) as renderer:
        conversations = [
            conversation("a"),
            conversation("a", mode="!"),
            conversation("a", add_generation_prompt=False),
            conversation("a", continue_final_message=True),
            conversation("a", self=1),
        ]
        *texts, refused = renderer.render(conversations)
    assert texts == ["a|", "a!|", "a", "a"]
    assert "refused `messages`" in message(refused)


def test_numbers_that_only_json_has_reach_the_template(renderer: ChatRenderer) -> None:
    deep: Any = 10**30
    for _ in range(390):
        deep = {"a": deep}
    assert renderer.render([Conversation([{"role": "user", "content": "x", "extra": deep}])]) == ["[x]"]


def test_a_process_that_is_killed_is_started_anew(renderer: ChatRenderer) -> None:
    def process_of(renderer: ChatRenderer) -> Any:
        return renderer.worker.process

    renderer.render([conversation("a")])
    os.kill(process_of(renderer).pid, signal.SIGKILL)
    assert renderer.render([conversation("a")]) == ["[a]"]
    assert process_of(renderer).is_alive


def test_closing_ends_a_rendering_at_once(model: Path) -> None:
    renderer = ChatRenderer(model)
    assert renderer.render([]) == []
    assert renderer.worker.process is None
    assert renderer.render([conversation("a")]) == ["[a]"]
    results: list[str | RowError] = []
    thread = threading.Thread(target=lambda: results.extend(renderer.render([conversation("loop")])))
    thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    renderer.close()
    thread.join()
    assert time.monotonic() - started < 5
    assert [type(result) for result in results] == [RowError]
    (late,) = renderer.render([conversation("a")])
    assert isinstance(late, RowError)
    assert late.type == "aborted"


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("tokenizer.json", "{}", r"tokenizer.json: cannot load the tokenizer"),
        (
            "chat_template.jinja",
            "{%- set a = 1 %}\n{{ a }",
            r"/chat_template.jinja:2: not a Jinja template: unexpected '}'",
        ),
    ],
)
def test_a_broken_file_is_an_error_of_the_model(
    model: Path, tmp_path: Path, file: str, text: str, problem: str
) -> None:
    """No process is started again and again, and no row is at fault."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(text)
    with closing(ChatRenderer(tmp_path)) as renderer, pytest.raises(LoadError, match=problem):
        renderer.render([conversation("a")])
