"""What a row says about its conversation beside the messages, in both forms of rows and in tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nvcli.job.images.image_fetch import invalid_image
from nvcli.job.job import CallRule, Job, JobResult
from nvcli.job.rows.image_values import named_images
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import Cells, RowParser
from output_jobs import extra_of

ReadRows = Callable[..., list[Job | JobResult]]
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def read(read_rows: ReadRows, form: str, **keys: Any) -> Job | JobResult:
    row: dict[str, Any] = {"messages": MESSAGES, **keys}
    if form == "openai":
        row = {"custom_id": "a", "url": "/v1/chat/completions", "body": row}
    (parsed,) = read_rows(msgspec.json.encode(row) + b"\n")
    return parsed


@pytest.mark.parametrize("form", ["native", "openai"])
def test_options_become_arguments_of_the_chat_template(read_rows: ReadRows, form: str) -> None:
    documents = [{"title": "t", "text": "x"}]
    job = read(
        read_rows, form, tools=[TOOL], tool_choice="auto", documents=documents, continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert isinstance(job, Job)
    assert job.chat_template_kwargs == {"enable_thinking": False}
    assert job.template_arguments == {"tools": [TOOL], "documents": documents, "continue_final_message": True}
    assert job.tools == [TOOL]
    assert job.context.extra == {}
    none = read(read_rows, form, tools=[TOOL], tool_choice="none")
    assert isinstance(none, Job)
    assert (none.tools, none.template_arguments) == ((), None)  # a model that does not see tools calls none


STRICT = {"type": "function", "function": {"name": "wait", "strict": True}}
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({}, None),
        ({"tool_choice": "none", "parallel_tool_calls": False}, None),
        ({"parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, CallRule(is_single=True)),
        ({"tool_choice": "required"}, CallRule(is_required=True)),
        (
            {"tool_choice": NAMED, "parallel_tool_calls": False},
            CallRule(is_required=True, function="look", is_single=True),
        ),
        ({"tools": [TOOL, STRICT]}, CallRule()),
        (
            {
                "tools": [msgspec.json.encode({"function": TOOL["function"]}).decode()],
                "tool_choice": {"function": {"name": "look"}},
            },
            CallRule(is_required=True, function="look"),
        ),
    ],
)
@pytest.mark.parametrize("form", ["native", "openai"])
def test_what_calls_are_held_to(read_rows: ReadRows, form: str, keys: dict[str, Any], rule: CallRule | None) -> None:
    job = read(read_rows, form, **{"tools": [TOOL], **keys})
    assert isinstance(job, Job)
    assert job.call_rule == rule


BAD = [
    ({"tools": [{"type": "function"}]}, "invalid_value", 'tools[0]` is {"type": "function"}; allowed: {"type"'),
    ({"tools": "look"}, "invalid_value", 'tools` is "look"; allowed: a list'),
    ({"tools": [TOOL], "tool_choice": "any"}, "invalid_value", 'tool_choice` is "any"; allowed: none, auto'),
    ({"tool_choice": "required"}, "invalid_value", 'tool_choice` is "required", and there are no tools'),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "lok"}}},
        "invalid_value",
        'tool_choice` names the function "lok"; did you mean `look`?',
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}], "tool_choice": "required"},
        "invalid_value",
        'tools[0].function.parameters` is 7; allowed: a JSON schema of the type "object"',
    ),
    (
        {"tools": [{**STRICT, "function": {"name": "f", "strict": True, "parameters": {"properties": [1]}}}]},
        "invalid_value",
        "tools[0].function.parameters.properties` is [1]; allowed: an object",
    ),
    (
        {"tools": [{**STRICT, "function": {"name": "f", "strict": "yes"}}]},
        "invalid_value",
        'tools[0].function.strict` is "yes"; allowed: true or false',
    ),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "invalid_value", 'parallel_tool_calls` is "no"; allowed: true or'),
    ({"documents": ["x"]}, "invalid_value", 'documents[0]` is "x"'),
    ({"continue_final_message": 1}, "invalid_value", "continue_final_message` is 1; allowed: true or false"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "invalid_value", "are both true"),
]


@pytest.mark.parametrize("form", ["native", "openai"])
@pytest.mark.parametrize(("keys", "kind", "message"), BAD)
def test_a_wrong_option_is_named(read_rows: ReadRows, form: str, keys: dict[str, Any], kind: str, message: str) -> None:
    result = read(read_rows, form, **keys)
    assert isinstance(result, JobResult)
    assert result.error is not None
    assert result.error.type == kind
    assert ("`body." in result.error.message) == (form == "openai")
    assert message in result.error.message


def test_beside_a_prompt_they_are_columns_like_others_and_the_user_is_told() -> None:
    parser = RowParser({})
    job = parser.parse(b'{"prompt": "x", "tools": [1], "documents": "d"}', index=0, where="line 1")
    assert isinstance(job, Job)
    assert extra_of(job) == {"tools": [1], "documents": "d"}
    assert "has `tools` at its top level" in "".join(parser.warnings.take_new())
    keeping = RowParser({}, keep_input=True)
    keeping.parse(msgspec.json.encode({"messages": MESSAGES, "tools": [TOOL]}), index=0, where="line 1")
    assert keeping.warnings.take_new() == []


def test_cells_of_a_table_hold_them_as_json() -> None:
    texts = {"messages": msgspec.json.encode(MESSAGES).decode(), "tools": msgspec.json.encode([TOOL]).decode()}
    job = RowParser({}).parse(Cells(texts), index=0, where="row 1")
    assert isinstance(job, Job)
    assert job.tools == [TOOL]


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_an_error_that_says_so(read_rows: ReadRows, kind: str) -> None:
    result = read(read_rows, "openai", messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert isinstance(result, JobResult)
    assert result.error is not None
    assert result.error.type == "unsupported_content"
    assert f'`body.messages[0].content[0]` is a part of the type "{kind}"' in result.error.message


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": ["a", {"text": "b"}, {"type": "refusal", "refusal": "c"}]}, "a\nb\nc"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": None, "tool_calls": [{"function": {"name": "look"}}]}, ""),  # null stops the template of Qwen3
        (
            {"content": [{"image": "a.png"}, {"image_url": "b.png"}, "c"]},
            [{"type": "image", "image": "a.png"}, {"type": "image", "image": "b.png"}, {"type": "text", "text": "c"}],
        ),
    ],
)
def test_contents_in_the_forms_of_other_servers(read_rows: ReadRows, message: dict[str, Any], content: Any) -> None:
    job = read(read_rows, "openai", messages=[{"role": "assistant", **message}, *MESSAGES])
    assert isinstance(job, Job)
    assert job.messages is not None
    assert job.messages[0]["content"] == content


def test_arguments_of_earlier_tool_calls_become_objects(read_rows: ReadRows) -> None:
    def calls(arguments: str | None) -> list[dict[str, Any]]:
        function = {"name": "look", "arguments": arguments}
        return [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]

    job = read(read_rows, "native", messages=calls('{"at": [1, "x"]}'))
    assert isinstance(job, Job)
    assert job.messages is not None
    assert job.messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": [1, "x"]}
    for none in ("", "null", None):
        job = read(read_rows, "native", messages=calls(none))
        assert isinstance(job, Job)
        assert job.messages is not None
        assert job.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    result = read(read_rows, "native", messages=calls("{at"))
    assert isinstance(result, JobResult)
    assert result.error is not None
    assert "`messages[1].tool_calls` has arguments that are not JSON" in result.error.message


def test_a_key_of_images_that_rows_lack_is_told() -> None:
    parser = RowParser({}, RowKeys(image="photo"))
    for row in (b'{"prompt": "x", "photo": "a.png"}', b'{"prompt": "x", "pohto": "a.png"}', b'{"prompt": "x"}'):
        assert isinstance(parser.parse(row, index=0, where="line 7"), Job)
    (warning,) = parser.warnings.take_new()
    assert warning == "warning: line 7 has nothing under the key of `job.image_field`, and is sent without an image"
    assert parser.warnings.totals() == ["2 rows without an image, though `job.image_field` names a key"]


def test_parts_without_a_name_take_the_images_of_the_row_in_turn() -> None:
    """As in data sets for TRL."""
    parser = RowParser({}, RowKeys(image="images"))
    content = [{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image", "text": None, "max_pixels": 9}]

    def parse(*images: str, num_parts: int = 3) -> Job | JobResult:
        row = {"messages": [{"role": "user", "content": content[:num_parts]}], "images": images}
        return parser.parse(msgspec.json.encode(row), index=0, where="line 1")

    job = parse("a.png", "b.png")
    assert isinstance(job, Job)
    assert job.messages is not None
    assert job.messages[0]["content"] == [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "x"},
        {"type": "image", "image": "b.png", "max_pixels": 9},
    ]
    for images, num_parts, told in (
        (("a", "b", "c"), 3, "`images` holds 3 images, and the messages have 2 parts"),
        (("a", "b"), 1, "`images` holds 2 images, and the messages have 1 part for them"),
        (("a",), 3, "; `job.image_field` (--image-field) names a key of images"),
    ):
        result = parse(*images, num_parts=num_parts)
        assert isinstance(result, JobResult)
        assert result.error is not None
        assert told in result.error.message


@pytest.mark.parametrize(("image", "told"), [(["a.png", None], "`photo[1]` is null; allowed"), (7, "`photo` is 7")])
def test_what_names_no_image(image: Any, told: str) -> None:
    row = msgspec.json.encode({"prompt": "x", "photo": image})
    result = RowParser({}, RowKeys(image="photo")).parse(row, index=0, where="line 1")
    assert isinstance(result, JobResult)
    assert result.error is not None
    assert told in result.error.message


def test_an_image_of_bytes_is_told_by_their_number() -> None:
    column = named_images(b"abcd", "photo")
    assert invalid_image(column, "it is empty").message == "the image of 4 bytes: it is empty"
