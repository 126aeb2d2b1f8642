"""Answers that are held to tool calls: whatever is chosen at random among the tokens that a format's grammar allows,
its reader finds calls in it, with arguments that the tools' schemas allow."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nvcli.core.grammars import GrammarError, Vocabulary
from nvcli.core.structured import Structured
from nvcli.job.job import CallRule
from nvcli.job.text.call_grammars import HARMONY, TOOL_FORMATS, callable_tools, write_call_grammar

MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call>", "<tool_call|>"),
    *('<|"|>', "<seed:tool_call>", "</seed:tool_call>", "<function_calls>", "</function_calls>"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"),
)
ENDS = ("\n</parameter>\n", "</parameter>\n", "</function>")
END = "<eos>"
NODE = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]}
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "far": {"type": "integer"},
        "deep": {
            "type": "object",
            "properties": {
                "x": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1},
                "sure": {"type": ["null", "boolean"]},
            },
            "required": ["x"],
            "additionalProperties": False,
        },
        "unit": {"enum": ["m", "k\"m'", "é"]},
        "name": {"type": "string", "enum": ["a b", "c"]},
    },
    "required": ["at", "unit"],
    "additionalProperties": False,
    "$defs": {"node": NODE},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "strict": True, "parameters": LOOK}},
    {"type": "function", "function": {"name": "wait"}},
    {"type": "function", "function": {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}}}},
]
SCHEMAS = {"look": LOOK, "wait": {"maxProperties": 0}, "say": TOOLS[2]["function"]["parameters"]}
REQUIRED = CallRule(is_required=True)
NAMED = CallRule(is_required=True, function="look", is_single=True)
SINGLE = CallRule(is_single=True)


KEYWORDS = (
    *("properties", "required", "type", "enum", "const", "anyOf", "oneOf", "items", "$ref", "$defs", "minItems"),
    *("additionalProperties", "string", "object", "#/$defs/a", "a"),
)


class Model:
    """A vocabulary of single bytes, of the marks, which are tokens of their own or not, and of other ends of texts."""

    def __init__(self, *, has_marks: bool) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        bytes_of = dict(zip((" ", "\n"), ("Ġ", "Ċ"), strict=True))
        spelled = [*ENDS, *(() if has_marks else MARKS)]
        words = ["".join(bytes_of.get(char, char) for char in text) for text in spelled]
        tokens = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*alphabet, *words])}, merges=[]))
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokens.decoder = decoders.ByteLevel()
        tokens.add_tokens([AddedToken(END, special=True)])
        if has_marks:
            tokens.add_tokens([AddedToken(mark, special=n % 2 == 0, normalized=False) for n, mark in enumerate(MARKS)])
        self._tokens, self._has_marks = tokens, has_marks
        self._end = tokens.token_to_id(END)
        self.vocabulary = Vocabulary(tokens.to_str(), vocab_size=tokens.get_vocab_size(), end_ids=[self._end])
        likely = [*"\"}])',\n<>/=", *words, *MARKS]
        self._likely = {self.token_id(text) for text in likely} - {None}

    def token_id(self, text: str) -> int | None:
        found: int | None = self._tokens.token_to_id(text)
        return found

    def grammar(self, name: str, rule: CallRule, template: str = "", tools: Any = TOOLS) -> str:
        text = write_call_grammar(
            name,
            callable_tools(tools, rule),
            rule,
            chat_template=template,
            token_id=lambda mark: self.token_id(mark) if self._has_marks else None,
        )
        return self.vocabulary.compile(Structured(grammar=text))

    def answer(self, grammar: str, rng: random.Random) -> str:
        """Return a random answer that a grammar allows, which ends soon."""
        matcher = self.vocabulary.matcher(grammar)
        chosen: list[int] = []
        for _ in range(3000):
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(mask).tolist()
            if self._end in allowed and (len(allowed) == 1 or rng.random() < 0.4):
                return str(self._tokens.decode(chosen, skip_special_tokens=False))
            likely = [token for token in allowed if token in self._likely]
            choices = likely if likely and rng.random() < 0.7 else [token for token in allowed if token != self._end]
            chosen.append(rng.choice(choices))
            assert matcher.consume_token(chosen[-1])
        raise AssertionError(f"no end: {self._tokens.decode(chosen[:300], skip_special_tokens=False)!r}")

    def allows(self, grammar: str, text: str) -> bool:
        """Whether a text is an answer that a grammar allows, spelled with marks where there are any."""
        matcher = self.vocabulary.matcher(grammar)
        ids = self._tokens.encode(text).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


SPELLED = Model(has_marks=False)


@pytest.fixture(scope="module", params=[True, False], ids=["marks are tokens", "marks are texts"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(has_marks=True) if request.param else SPELLED


def check_calls(name: str, answer: str, rule: CallRule) -> int:
    """Check the calls that the reader finds in an answer, and return how many there are."""
    found = TOOL_FORMATS[name].find(answer, TOOLS)
    if found is None:
        assert not rule.is_required, answer
        return 0
    text, calls = found
    assert not (rule.is_required and text), answer
    assert not (rule.is_single and len(calls) > 1), answer
    for call in calls:
        assert rule.function in (None, call.name), answer
        if rule.is_required or call.name == "look":
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return len(calls)


@pytest.mark.pairwise
@pytest.mark.parametrize("rule", [REQUIRED, NAMED, CallRule(), SINGLE], ids=["required", "named", "auto", "single"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_reader_finds_calls_in_every_answer(model: Model, name: str, rule: CallRule) -> None:
    counts = []
    for template in ("", "[ARGS]", "[CALL_ID][ARGS]") if name == "mistral" else ("",):
        grammar = model.grammar(name, rule, template)
        rng = random.Random(5)
        counts += [check_calls(name, model.answer(grammar, rng), rule) for _ in range(6)]
    assert not rule.is_required or min(counts) >= 1


WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "look", "arguments": {"at": "<a> b", "unit": "m"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=at>\n<a> b\n</parameter>\n<parameter=far>\n-3\n</parameter>\n"
        '<parameter=deep>\n{"x": [1, [2]]}\n</parameter>\n<parameter=unit>\n"m"\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=wait>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value><a> b</arg_value>\n<arg_key>unit</arg_key>\n"
        '<arg_value>"m"</arg_value>\n<arg_key>name</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>\n'
        "<tool_call>wait\n</tool_call>"
    ),
    "seed_oss": (
        '<seed:tool_call>\n<function=look>\n<parameter=at><a> b</parameter>\n<parameter=unit>"m"</parameter>\n'
        "</function>\n</seed:tool_call>"
    ),
    "olmo3": "<function_calls>look(at=\"<a> b\", far=3, unit='m')\nwait()</function_calls>",
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x", "unit": "é"}}]',
    "granite": '<|tool_call|>[{"name": "wait", "arguments": {}}]',
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"at": "x", "unit": "m"}},\n'
        '    {"tool_call_id": "1", "tool_name": "wait", "parameters": {}}\n]<|END_ACTION|>'
    ),
    "gemma4": (
        '<|tool_call>call:look{at:<|"|>a "b"<|"|>,deep:{x:[1,[]],sure:null},unit:<|"|>m<|"|>}<tool_call|>'
        "<|tool_call>call:wait{}<tool_call|>"
    ),
    "llama": '{"name": "look", "parameters": {"at": "x", "unit": "m"}}; {"name": "wait", "parameters": {}}',
    "pythonic": "[look(at='x', deep={'x': [1, []], 'sure': None}, unit=\"m\"), wait()]",
    HARMONY: (
        "<|channel|>analysis<|message|>Hm <a>.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"at": "x", "unit": "m"}'
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_models_write_is_allowed(model: Model, name: str) -> None:
    """In each format as the families' templates show it, behind a text too where calls are left to the model."""
    text = WRITTEN[name]
    begins = "" if name in ("llama", "pythonic", HARMONY) else "I look.\n"
    required, free = (model.grammar(name, rule) for rule in (REQUIRED, CallRule()))
    for grammar, answer in ((required, text), (required, f"\n\n{text}"), (free, f"{begins}{text}")):
        if answer == text or name != HARMONY:
            assert model.allows(grammar, answer)
    assert not model.allows(required, text[: len(text) // 2])
    if begins:
        assert not model.allows(required, f"{begins}{text}")
    assert not model.allows(free, text.replace("look", "lok").replace("wait", "wit"))


def test_messages_of_harmony(model: Model) -> None:
    """A function stands behind either the role or the channel; other messages may go before a call, and none behind."""
    think = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary<|message|>{"at": "x", "unit": "m"}'
    final = "<|channel|>final<|message|>Well."
    required, free = (model.grammar(HARMONY, rule) for rule in (NAMED, SINGLE))
    assert model.allows(required, f"{think} to=functions.look{call}")
    assert model.allows(
        required, f"{think}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.look{call}"
    )
    assert not model.allows(required, think + final)
    assert not model.allows(required, f" to=functions.say{call}")
    assert not model.allows(free, f" to=functions.look{call}<|end|><|start|>assistant{final}")
    assert model.allows(free, think + final)
    assert model.allows(free, f" to=functions.say{call}")


def test_schemas_that_are_not_strict_keep_what_can_be_kept(model: Model) -> None:
    """Keywords that llguidance does not know are left out, unless the function is strict."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}

    def grammar(**more: Any) -> str:
        function = {"name": "look", "parameters": schema, **more}
        return model.grammar("llama", REQUIRED, tools=[{"type": "function", "function": function}])

    assert model.allows(grammar(), '{"name": "look", "parameters": {"a": [1, 1]}}')
    assert not model.allows(grammar(), '{"name": "look", "parameters": {}}')
    with pytest.raises(Exception, match="uniqueItems"):
        grammar(strict=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from([*TOOL_FORMATS, HARMONY]),
    st.dictionaries(st.sampled_from(KEYWORDS[2:]), json_values, max_size=3),
    st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_whatever_the_schemas_are_there_is_a_grammar_or_a_reason(
    name: str, schema: dict[str, Any], properties: dict[str, Any], strict: bool
) -> None:
    parameters = {**schema, "properties": properties}
    tools = [{"type": "function", "function": {"name": "look", "strict": strict, "parameters": parameters}}]
    with contextlib.suppress(GrammarError):
        SPELLED.grammar(name, REQUIRED, tools=tools)
