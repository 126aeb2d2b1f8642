"""Tool calls in the text of an answer, in the formats of the families; what is none stays text and says so."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.job.job import FunctionCall
from nvcli.job.text.call_grammars import TOOL_FORMATS, tool_format_name
from nvcli.job.text.tool_calls import BadToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"type": "string"},
                    "far": {"type": "integer"},
                    "deep": {"type": "object"},
                    "sure": {"type": "boolean"},
                },
            },
        },
    }
]


def call(name: str, arguments: dict[str, Any]) -> FunctionCall:
    return FunctionCall(name=name, arguments=json.dumps(arguments))


REPEATED = [
    ("glm", "<tool_call>look", "<arg_key>", "</tool_call>"),
    ("glm", "<tool_call>look", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
    ("qwen3_coder", "<tool_call><function=look>", "<parameter=", "</function></tool_call>"),
    ("gemma4", "", "<|tool_call>call:look{", ""),
    ("mistral", "[TOOL_CALLS]look", " ", ""),
    ("mistral", "[TOOL_CALLS]look[CALL_ID]", " ", ""),
    ("llama", "", '{"name": "look"}; ', ""),
]


@pytest.mark.parametrize(("name", "before", "part", "behind"), REPEATED)
def test_what_is_repeated_is_read_in_time(name: str, before: str, part: str, behind: str) -> None:
    """An answer may do so until it is cut. Where each part was looked for in all of the rest, this took minutes."""
    started = time.process_time()
    with contextlib.suppress(BadToolCall):
        TOOL_FORMATS[name].find(before + 40_000 * part + behind, TOOLS)
    assert time.process_time() - started < 5


LOOK = call("look", {"at": 'a "b" <c>', "far": 3})
WAIT = call("wait", {})
FAR = call("look", {"far": 3})
DEEP = call("look", {"deep": {"x": [1, -2.5, None, True]}})

FOUND: list[tuple[str, str, str, list[FunctionCall]]] = [
    (
        "hermes",
        'Let me.\n<tool_call>\n{"name": "look", "arguments": {"at": "a \\"b\\" <c>", "far": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
        "Let me.",
        [LOOK, WAIT],
    ),
    ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"far\\": 1}"}', "", [call("look", {"far": 1})]),
    ("hermes", '<tool_call>{"name": "wait"}</tool_call>\n\nI wait.', "I wait.", [WAIT]),
    (
        "qwen3_coder",
        'Now.\n<tool_call>\n<function=look>\n<parameter=at>\na "b" <c>\n</parameter>\n'
        "<parameter=far>\n3\n</parameter>\n</function>\n</tool_call>",
        "Now.",
        [LOOK],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=at>\n12\n34\n</parameter>\n<parameter=deep>\n"
        '{"x": [1]}\n</parameter>\n<parameter=sure>\nTrue\n</parameter>\n<parameter=odd>\nx y\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        [call("look", {"at": "12\n34", "deep": {"x": [1]}, "sure": True, "odd": "x y"})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=wait>\n</function>\n</tool_call>", "", [WAIT]),
    (
        "glm",
        '<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a "b" <c></arg_value>\n<arg_key>far</arg_key>\n'
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>wait\n</tool_call>",
        "",
        [LOOK, WAIT],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=look>\n<parameter=far>3</parameter>\n</function>\n</seed:tool_call>",
        "",
        [FAR],
    ),
    (
        "olmo3",
        'So:<function_calls>look(at="x", far=3)\nwait()</function_calls>',
        "So:",
        [call("look", {"at": "x", "far": 3}), WAIT],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "look", "arguments": {"far": 3}}, {"name": "wait", "arguments": {}}]',
        "",
        [FAR, WAIT],
    ),
    ("mistral", 'Hm.[TOOL_CALLS]look[ARGS]{"far": 3}[TOOL_CALLS]wait[ARGS]{}', "Hm.", [FAR, WAIT]),
    ("mistral", '[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{"far": 3}', "", [FAR]),
    ("granite", '<|tool_call|>[{"name": "wait", "arguments": {}}]', "", [WAIT]),
    (
        "cohere",
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "look", "parameters": {"far": 3}}\n]<|END_ACTION|>',
        "",
        [FAR],
    ),
    (
        "gemma4",
        'I look.<|tool_call>call:look{at:<|"|>a "b" <c><|"|>,far:3}<tool_call|><|tool_call>call:wait{}<tool_call|>',
        "I look.",
        [LOOK, WAIT],
    ),
    (
        "gemma4",
        '<|tool_call>call:look{deep:{x:[1,<|"|>y: {z}<|"|>],n:null},sure:true}<tool_call|>',
        "",
        [call("look", {"deep": {"x": [1, "y: {z}"], "n": None}, "sure": True})],
    ),
    ("llama", '{"name": "look", "parameters": {"far": 3}}', "", [FAR]),
    (
        "llama",
        '<|python_tag|>{"name": "look", "parameters": {"far": 3}}; {"name": "wait", "parameters": {}}',
        "",
        [FAR, WAIT],
    ),
    ("llama", '<|python_start|>[look(at="x"), wait()]<|python_end|>', "", [call("look", {"at": "x"}), WAIT]),
    ("pythonic", '[look(at="a \\"b\\" <c>", far=3), wait()]', "", [LOOK, WAIT]),
    ("pythonic", "[look(deep={'x': [1, -2.5, None, True]})]", "", [DEEP]),
]


@pytest.mark.parametrize(("name", "text", "beside", "calls"), FOUND)
def test_calls_are_found(name: str, text: str, beside: str, calls: list[FunctionCall]) -> None:
    assert TOOL_FORMATS[name].find(text, TOOLS) == (beside, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "x</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "argum'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=at>\nx"),
        ("glm", "<tool_call>look at this</tool_call>"),
        ("mistral", "[TOOL_CALLS]look at this"),
        ("mistral", "[TOOL_CALLS][]"),
        ("gemma4", "<|tool_call>call:look{far:3"),
        ("gemma4", "<|tool_call>call:look{far:x}<tool_call|>"),
        ("llama", '{"name": "look", "parameters": {"far": '),
        ("llama", "<|python_tag|>print(1)"),
        ("pythonic", "[look(far=1+2)]"),
        ("pythonic", "[look(3)]"),
        ("pythonic", "[look(far=" + "(" * 5000 + ")]"),
        ("olmo3", "<function_calls>look</function_calls>"),
    ],
)
def test_what_was_meant_as_a_call_and_is_none_says_so(name: str, text: str) -> None:
    with pytest.raises(BadToolCall) as caught:
        TOOL_FORMATS[name].find(text, TOOLS)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "The tools call for patience.") for name in TOOL_FORMATS),
        ("llama", '{"answer": 3}'),
        ("llama", "{not JSON}"),
        ("pythonic", "[1, 2]"),
        ("llama", "[citation needed] (1)"),
    ],
)
def test_other_text_is_left_alone(name: str, text: str) -> None:
    assert TOOL_FORMATS[name].find(text, TOOLS) is None


def test_the_chat_template_says_which_format_it_is() -> None:
    templates: dict[str, Any] = {
        "hermes": "return a json object within <tool_call></tool_call> XML tags",
        "mistral": "{{ '[TOOL_CALLS]' }}",
        "llama": '{"name": function name, "parameters": dictionary of argument name and its value}',
        "gemma4": "<|tool_call>call:",
        "granite": "<|tool_call|>",
        "glm": "<tool_call>{{ name }}<arg_key>",
        "qwen3_coder": "<tool_call><function={{ name }}>",
    }
    for name, template in templates.items():
        assert tool_format_name("auto", template) == name
    assert tool_format_name("auto", "{{ messages }}") is None
    assert tool_format_name("none", templates["hermes"]) is None
    assert tool_format_name("pythonic", "") == "pythonic"


pieces = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "look",
            ">",
            "<parameter=at>",
            "</parameter>",
            "</function>",
            "{",
            "}",
        ),
        *(
            '"name": ',
            '"arguments": ',
            '"look"',
            ", ",
            "[",
            "]",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|tool_call>call:",
            '<|"|>',
        ),
        *(
            "<tool_call|>",
            "<|python_tag|>",
            "look(at=",
            ")",
            "{1}",
            "b'x'",
            "1e999",
            '"\\ud800"',
            "NaN",
            ":",
            "\\d",
            "3j",
        ),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function_calls>", "...", "<|START_ACTION|>"),
    ]
)
written = st.lists(pieces | st.text(max_size=3), max_size=12).map("".join)
begun = st.sampled_from([text for _, text, _, _ in FOUND])


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    written
    | st.tuples(begun, st.integers(0, 200), written).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    ),
)
def test_whatever_a_model_writes_is_calls_or_text(name: str, text: str) -> None:
    try:
        found = TOOL_FORMATS[name].find(text, TOOLS)
    except BadToolCall:
        return
    if found is not None:
        _, calls = found
        assert calls
        for each in calls:
            msgspec.json.decode(msgspec.json.encode(each))
            assert isinstance(json.loads(each.arguments), dict)
