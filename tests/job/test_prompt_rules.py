"""What a job says about the prompts of its rows: templates, the system message, and template variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nvcli.core.config import load_run_config
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.text_template import TextTemplate
from nvcli.job.job import Job, JobResult
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.prompt_rules import PromptRules
from nvcli.job.run.row_settings import row_keys

Parse = Callable[..., Job | JobResult]

USER = {"role": "user", "content": "hi"}


def parser_of(keys: RowKeys | None = None, **rules: Any) -> RowParser:
    return RowParser({}, keys, PromptRules(**rules))


def parse(row: bytes | dict[str, Any], parser: RowParser, index: int = 0) -> Job | JobResult:
    line = row if isinstance(row, bytes) else msgspec.json.encode(row)
    return parser.parse(line, index=index, where=f"line {index + 1}")


def error_of(row: Job | JobResult) -> tuple[str, str]:
    assert isinstance(row, JobResult)
    assert row.error is not None
    return row.error.type, row.error.message


def chat_row(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [USER], **body}}


def test_a_prompt_template_is_filled_from_columns() -> None:
    parser = parser_of(prompt_template=TextTemplate("{{{prompt}}} {number} {b} {o}: {text}"))
    row = parse(
        b'{"prompt":"p\\u00fc","text":"{prompt}","number":1.10,"b":true,"o":{ "a":1},"sampling":{"n":2}}', parser
    )
    assert isinstance(row, Job)
    assert row.prompt == '{pü} 1.10 true { "a":1}: {prompt}'
    assert row.sampling.n == 2
    assert list(row.context.extra) == ["prompt", "text", "number", "b", "o"]  # columns are copied, whatever their names
    from_table = parser.parse({"prompt": "p", "text": "t", "number": 1.5, "b": True, "o": [1]}, index=1, where="row 2")
    assert isinstance(from_table, Job)
    assert from_table.prompt == "{p} 1.5 true [1]: t"


def test_a_column_that_is_missing_is_named_with_those_there_are() -> None:
    parser = parser_of(prompt_template=TextTemplate("{text}"))
    for row in ({"txt": "a", "n": 1}, {"txt": "a", "text": None, "n": 1}):
        assert error_of(parse(row, parser)) == (
            "missing_column",
            "line 1: no column `text`, which `job.prompt_template` names; the row has `txt`, `n`",
        )
    many = {f"c{number}": 1 for number in range(1000)}
    assert error_of(parse(many, parser))[1].endswith("`c11` and 988 more")
    assert error_of(parse({}, parser))[1].endswith("the row has none")


def test_a_row_with_a_prompt_that_the_template_leaves_out_is_no_silent_loss() -> None:
    parser = parser_of(prompt_template=TextTemplate("{text}"))
    kind, message = error_of(parse({"text": "a", "messages": [USER]}, parser))
    assert kind == "conflicting_prompts"
    assert "{messages}" in message
    renamed = parser_of(RowKeys(prompt="question"), prompt_template=TextTemplate("{text}"))
    assert isinstance(parse({"text": "a", "prompt": "a column like others"}, renamed), Job)


def test_messages_templates_make_conversations() -> None:
    parser = parser_of(
        messages_template=(
            ("user", TextTemplate("{a}")),
            ("assistant", TextTemplate("ok")),
            ("user", TextTemplate("{b}")),
        ),
        system="Be brief.",
        chat_template_kwargs={"enable_thinking": False, "level": 1},
    )
    row = parse({"a": "x", "b": 2, "chat_template_kwargs": {"level": 2}}, parser)
    assert isinstance(row, Job)
    assert row.messages is not None
    assert [(message["role"], message["content"]) for message in row.messages] == [
        ("system", "Be brief."),
        ("user", "x"),
        ("assistant", "ok"),
        ("user", "2"),
    ]
    assert row.chat_template_kwargs == {"enable_thinking": False, "level": 2}
    assert error_of(parse({"a": "x"}, parser))[1].startswith("line 1: no column `b`, which `job.messages_template`")


def test_a_row_of_an_openai_file_is_no_row_of_columns() -> None:
    parser = parser_of(prompt_template=TextTemplate("{text}"))
    row = parse(chat_row(), parser)
    assert isinstance(row, Job)
    assert row.messages == [USER]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_system_message_is_for_conversations_without_one(role: str) -> None:
    parser = parser_of(system="S")
    own = [{"role": role, "content": "own"}, USER]
    for row, messages in (
        ({"messages": [USER]}, [{"role": "system", "content": "S"}, USER]),
        ({"messages": own}, own),
        (chat_row(), [{"role": "system", "content": "S"}, USER]),
        (chat_row(messages=own), own),
    ):
        job = parser_of(system="S").parse(msgspec.json.encode(row), index=0, where="")
        assert isinstance(job, Job)
        assert job.messages == messages
    assert isinstance(parse({"prompt": "p"}, parser), Job)
    assert isinstance(parse({"prompt": "p"}, parser), Job)
    (warning,) = parser.warnings.take_new()
    assert "line 1 is not a conversation" in warning
    assert parser.warnings.totals()[0].startswith("2 rows without a conversation")


def test_template_variables_of_both_forms() -> None:
    parser = parser_of(chat_template_kwargs={"enable_thinking": True})
    for given, expected in (({"enable_thinking": False}, False), ({}, True), (None, True)):
        rows: list[dict[str, Any]] = [
            {"messages": [USER], "chat_template_kwargs": given},
            {**chat_row(chat_template_kwargs=given)},
        ]
        for number, row in enumerate(rows):
            job = parser_of(chat_template_kwargs={"enable_thinking": True}).parse(
                msgspec.json.encode(row), index=number, where=""
            )
            assert isinstance(job, Job)
            assert job.chat_template_kwargs == {"enable_thinking": expected}
            assert "chat_template_kwargs" not in job.context.extra
    assert error_of(parse(chat_row(chat_template_kwargs=3), parser)) == (
        "invalid_value",
        "line 1: `body.chat_template_kwargs` is 3; allowed: an object with keys",
    )
    kind, message = error_of(parse({**chat_row(chat_template="x"), "custom_id": "b"}, parser))
    assert kind == "unsupported_parameter"
    assert "--chat-template" in message
    completion = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "p", "chat_template_kwargs": {}}}
    assert error_of(parse(completion, parser))[0] == "unsupported_parameter"


def test_prompts_that_are_conversations() -> None:
    """As in TRL's data sets."""
    row = {"prompt": [USER], "none": "a column", "completion": [{"role": "assistant", "content": "ho"}]}
    _, message = error_of(parse(row, parser_of()))
    assert message.endswith(
        "allowed: text; `job.messages_field: prompt` (--messages-field prompt) reads conversations there"
    )
    run = load_run_config(None, settings={"model": "m", "job": {"messages_field": "prompt"}})
    parser = parser_of(row_keys(run.job))
    job, line = parse(row, parser), parser.parse("hi", index=1, where="line 2")
    assert isinstance(job, Job)
    assert isinstance(line, Job)
    assert (job.messages, job.context.extra.keys()) == ([USER], {"none", "completion"})
    assert (line.prompt, line.context.extra) == ("hi", {})
    assert error_of(parse({}, parser))[1].endswith("none of `prompt` and `prompt_token_ids` is given; give one")


def test_null_in_sampling_is_as_good_as_absent() -> None:
    """As in tables, whose rows all have the same keys; null as a value of its own goes over the job's."""
    parser = RowParser({"temperature": 0.5, "stop": ["x"], "max_tokens": 9})
    job = parse({"prompt": "p", "sampling": {"temperature": None, "stop": None, "max_tokens": None, "n": 2}}, parser)
    assert isinstance(job, Job)
    assert job.sampling == SamplingParams(temperature=0.5, stop=["x"], max_tokens=None, n=2)


def test_settings_in_the_wrong_place_are_warned_of_once_with_a_count() -> None:
    parser = parser_of()
    for index in range(3):
        assert isinstance(parse({"prompt": "p", "max_tokens": 5, "topic": 1}, parser, index), Job)
    assert isinstance(parse({"prompt": "p", "system": "s", "chat_template": "c"}, parser, 3), Job)
    warnings = parser.warnings.take_new()
    assert parser.warnings.take_new() == []
    assert len(warnings) == 3
    assert warnings[0].startswith("warning: line 1 has `max_tokens` at its top level")
    assert warnings[0].endswith("put it into `sampling`")
    assert parser.warnings.totals()[0] == "`max_tokens` stood at the top level of 3 rows and had no effect there"
    parse({"prompt": "p", "response_format": {"type": "json_object"}}, parser, 4)
    parse({"messages": [{"role": "user", "content": "p"}], "reasoning_effort": "low"}, parser, 5)
    parse({"prompt": "p", "lora": "sql"}, parser, 6)
    parse({"prompt": "p", "multi_modal_data": {"image": "a.png"}}, parser, 6)
    parse({**chat_row(), "temperature": 0}, parser, 7)
    parse({**chat_row(), "sampling": {}}, parser, 8)
    parse({"prompt": "p", "sampling_params": {}}, parser, 9)
    parse({"messages": [USER], "functions": []}, parser, 10)
    parse({"prompt": "p", "images": ["a.png"]}, parser, 11)
    parse({**chat_row(), "image": "a.png"}, parser, 12)
    ends = [warning.partition("setting, ")[2] for warning in parser.warnings.take_new()]
    assert ends == [
        "put what it asks for into `sampling.structured`",
        "put it into `chat_template_kwargs`",
        "name the adapters that rows choose from in `lora` (--lora NAME=PATH)",
        "put images into `messages`, or under the key that `job.image_field` names",
        "put it into `body`",
        "put its keys into `body`",
        "call it `sampling`",
        "give `tools` next to `messages`",
        "`job.image_field: images` (--image-field images) reads images there",
        "put images into `body.messages`",
    ]
    named = parser_of(prompt_template=TextTemplate("{system}"))
    assert isinstance(parse({"system": "a column"}, named), Job)
    assert named.warnings.take_new() == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "a placeholder is the name of a column"),
        ("{a!r}", "a placeholder is the name"),
        ('JSON: {"a": 1}', "a placeholder is the name"),
        ("a { b", "expected '}'"),
        ("a } b", "single '}'"),
    ],
)
def test_a_text_that_is_no_template_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: text with placeholders such as \{name\}") as caught:
        TextTemplate(text)
    assert reason in str(caught.value)
