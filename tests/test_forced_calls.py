"""Answers that must call tools, from a row to its answer, by a real engine and the built-in model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from marked_model import give_marks
from nvcli import LLM
from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.job.job import CallRule, Job, JobResult, RowContext
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import Preparer
from nvcli.job.text.tokenizer import Tokenizer
from snapshot_rows import WEATHER

pytestmark = pytest.mark.usefixtures("warm_engines")

TIME = {"type": "object", "properties": {"zone": {"enum": ["CET"]}}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
SCHEMAS = {"weather": WEATHER, "time": TIME}
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
URL = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "weather"}}


def chat(**body: Any) -> dict[str, Any]:
    return {"custom_id": str(body), "url": URL, "body": {"messages": MESSAGES, "tools": TOOLS, **body}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = give_marks(tmp_path_factory.mktemp("forced") / "model")
    with LLM(str(model), max_num_seqs=8) as llm:
        yield llm


def calls_of(answer: Any) -> list[tuple[str, dict[str, Any]]]:
    assert answer.error is None, answer.error
    assert answer.finish_reason == "tool_calls", answer
    functions = [call["function"] for call in answer.tool_calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_every_answer_calls(llm: LLM) -> None:
    """Behind a thought that is ended, in both forms of rows, one call where no more are asked for."""
    sampling = {"thinking_budget": 3, "n": 4, "temperature": 1.5, "seed": 3}
    rows: list[Any] = [
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "sampling": {**sampling, "max_tokens": 200}},
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "sampling": {"thinking_budget": 0}},
        chat(tool_choice="required", parallel_tool_calls=False, thinking_budget=2),
        chat(tool_choice=NAMED, parallel_tool_calls=False, thinking_budget=2, temperature=0),
    ]
    several, named, single, greedy = llm.generate(rows, order="input")
    found = [call for choice in several["choices"] for call in choice.get("tool_calls") or ()]
    assert len(found) >= 4
    assert all(choice["reasoning_content"] is not None for choice in several["choices"])
    for answer in (named, single, greedy):
        for name, arguments in calls_of(answer):
            jsonschema.validate(arguments, SCHEMAS[name])
    assert {name for name, _ in calls_of(named)} == {"weather"}
    assert [len(calls_of(answer)) for answer in (single, greedy)] == [1, 1]
    assert single.reasoning_content is not None


def test_answers_that_may_call_are_held_to_nothing_else(llm: LLM) -> None:
    """The same row without a rule is another row, and has another answer."""
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    rows: list[Any] = [
        {"messages": MESSAGES, "tools": tools, "sampling": {"temperature": 0, "max_tokens": 12}, **more}
        for tools, more in ((TOOLS, {}), (TOOLS, {"tool_choice": "required"}), (strict, {}))
    ]
    free, forced, may = llm.generate(rows, order="input")
    assert all(answer.error is None for answer in (free, forced, may))
    assert free["choices"] != forced["choices"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
        "invalid_structured",
        '`body.tools[0].function.parameters` cannot be used: Unimplemented keys: ["not"]',
    ),
    (
        {"tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"type": "object",
          "properties": {"a": {"type": "strng"}}}}}]},
        "invalid_structured",
        "`body.tools[2].function.parameters` cannot be used: Invalid type: strng (at #/properties/a)",
    ),
    ({"response_format": {"type": "json_object"}}, "invalid_structured", "the row for an answer of another form (json"),
    ({"ignore_eos": True}, "invalid_sampling", "`ignore_eos` is true, and `body.tool_choice` asks for a call"),
]  # fmt: skip


def test_what_cannot_be_forced_is_an_error_that_says_why(llm: LLM) -> None:
    answers = llm.generate([chat(tool_choice="required", **keys) for keys, _, _ in BAD], order="input")
    for answer, (_, kind, message) in zip(answers, BAD, strict=True):
        assert answer.error is not None
        assert answer.error.type == kind
        assert message in str(answer.error)


def test_a_model_whose_format_is_not_known_cannot_be_forced() -> None:
    tokenizer = Tokenizer.load(demo_path(), chat_template="{{ tools }}{{ messages }}")
    limits = ModelLimits(max_model_len=2048, vocab_size=640, eos_token_ids=(0,))
    preparer = Preparer(tokenizer, limits, lambda conversations: ["x"] * len(conversations))

    def prepare(rule: CallRule) -> Any:
        job = Job(
            context=RowContext(id=0, index=0, line="line 1"),
            messages=MESSAGES, tools=TOOLS, call_rule=rule, sampling=SamplingParams(),
        )  # fmt: skip
        return preparer.prepare([job])[0]

    refused = prepare(CallRule(is_required=True))
    assert isinstance(refused, JobResult)
    assert refused.error is not None
    assert "`tool_choice` asks for a call, and how this model writes calls is not known" in refused.error.message
    assert prepare(CallRule(is_single=True)).constraint is None
