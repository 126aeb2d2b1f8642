"""What a row may ask its answer to look like, and what of it becomes a grammar of the built-in model's tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nvcli.core.grammars import GrammarError, Vocabulary, grammar_of
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import MAX_GRAMMAR_BYTES, Structured
from nvcli.core.validation import InvalidValue, convert
from nvcli.demo import demo_path

END_ID = 0


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(demo_path(), vocab_size=640, end_ids=[END_ID, 2])


def allows(vocabulary: Vocabulary, wanted: Structured, text: str) -> bool:
    """Whether a text, and nothing behind it, is an answer."""
    matcher = vocabulary.matcher(vocabulary.compile(wanted))
    tokens = vocabulary.tokenizer.greedy_tokenize(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (
            {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            ['{"a":1}', '{"a": -10}', '{\n  "a": 1\n}', '{"a": 1, "b": [null]}'],
            ["{}", '{"a": "1"}', "1", ' {"a":1}', '{"a":' + " " * 40 + "1}"],
        ),
        ({"json_schema": True}, ["1", '"x"', "[]", "null"], ["x", ""]),
        ({"json_object": True}, ["{}", '{"x": [1, {}]}'], ["[]", "null"]),
        ({"regex": "[a-c]{2}-[0-9]+"}, ["ab-1", "cc-123"], ["ab-", "xab-1", "ab-1x"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["maybe"]),
        ({"choice": ["a", 'b"c\\', "d\ne", "größe 😀"]}, ["a", 'b"c\\', "d\ne", "größe 😀"], ["b", "ad"]),
        ({"choice": [*map(str, range(3000)), ""]}, ["", "7", "2999"], ["3000", "07"]),
        ({"grammar": 'root ::= "a" [0-9]+'}, ["a1", "a12"], ["a", "b1"]),
        ({"grammar": 'start: "a" B\nB: /[0-9]+/'}, ["a1", "a12"], ["a", "b1"]),
        ({"grammar": '?start: "a" "::=" b\n?b: "c"'}, ["a::=c"], ["a"]),
        (
            {"json_schema": {"properties": {"format": {"enum": [{"format": "x"}]}, "default": {"format": "binary"}}}},
            ['{"format": {"format": "x"}, "default": 1}'],
            ['{"format": {}}'],
        ),
    ],
)
def test_answers_are_what_was_asked_for_and_nothing_else(
    vocabulary: Vocabulary, wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    structured = Structured(**wanted)
    assert [text for text in good if not allows(vocabulary, structured, text)] == []
    assert [text for text in bad if allows(vocabulary, structured, text)] == []


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json_schema": {"properties": {"a": {"items": {"type": "strng"}}}}}, "strng (at #/properties/a/items)"),
        ({"json_schema": {"$defs": {"x/y": {"not": {}}}, "$ref": "#/$defs/x~1y"}}, '["not"] (at #/$defs/x~1y)'),
        ({"json_schema": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=a)"}]}}, "(at #/anyOf/1)"),
        ({"json_schema": {"properties": {"a": {"$ref": "#/$defs/b"}}}}, "does not exist (at #/properties/a)"),
        ({"json_schema": {"$ref": "https://example.org/x"}}, "https://example.org/x"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        (
            {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "fit several alternatives, write anyOf",
        ),
        ({"json_schema": False}, "allows nothing"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "root ::= other"}, "Rule 'other' not found"),
        ({"grammar": 'start: "a" B'}, "unknown name"),
        ({"choice": ["x" * MAX_GRAMMAR_BYTES]}, "bytes; allowed: 524,288"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(
    vocabulary: Vocabulary, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrammarError) as error:
        vocabulary.compile(Structured(**wanted))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "a loop of references": {"json_schema": {"$ref": "#"}},
    "a longer loop": {
        "json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "a loop in allOf": {"json_schema": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"}},
    "depth": {"json_schema": deep(380)},
    "alternatives that multiply": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}": {"type": "string"}}}, {"properties": {f"b{i}": {"type": "null"}}}]}
                for i in range(18)
            ]
        }
    },
    "a deep regex": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "a deep grammar": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "a deep GBNF grammar": {"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "left recursion": {"grammar": "start: start | start"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_quickly(vocabulary: Vocabulary, name: str) -> None:
    with pytest.raises(GrammarError):
        vocabulary.compile(Structured(**HOSTILE[name]))


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "^(a+)+$"},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": ".*a.{60}"},
        {"json_schema": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}},
        {"json_schema": {"type": "array", "minItems": 100_000, "maxItems": 1_000_000}},
        {"json_schema": {"enum": [f"value {i * 7919}" for i in range(20_000)]}},
    ],
)
def test_what_makes_other_engines_slow_is_an_ordinary_grammar(vocabulary: Vocabulary, wanted: dict[str, Any]) -> None:
    assert vocabulary.compile(Structured(**wanted))


def test_an_end_token_is_allowed_at_the_end_alone(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.matcher(vocabulary.compile(Structured(choice=["95", "957"])))
    allowed = []
    for token in [None, *vocabulary.tokenizer.greedy_tokenize("957")]:
        assert token is None or matcher.consume_token(token)
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed.append([end for end in (END_ID, 2) if bits >> end & 1])
    assert allowed == [[], [], [END_ID, 2], [END_ID, 2]]


def test_the_order_of_properties_is_that_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    inner = json.loads(grammar_of(Structured(json_schema=schema)))["grammars"][0]["json_schema"]
    assert list(inner["properties"]) == ["z", "a"]


def test_a_tokenizer_without_its_file_is_a_reason(tmp_path: Any) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json, which constrained answers need, cannot be read"):
        Vocabulary.load(tmp_path, vocab_size=640, end_ids=[0])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="llguidance cannot use the tokenizer"):
        Vocabulary.load(tmp_path, vocab_size=640, end_ids=[0])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"structured": {}}, "`structured` holds none of its keys; give one of `json_schema`"),
        ({"structured": {"regex": "a", "choice": ["a"]}}, "holds `regex` and `choice`"),
        ({"structured": {"choice": []}}, "`structured.choice` is an empty list"),
        ({"structured": {"choice": ["a", 5]}}, "`sampling.structured.choice[1]` is 5; allowed: text"),
        ({"structured": {"jsn": {}}}, "unknown key `sampling.structured.jsn`"),
        ({"structured": "json"}, "`sampling.structured` is"),
        ({"structured": {"json_object": True}, "ignore_eos": True}, "`ignore_eos` is true with `structured`"),
    ],
)
def test_sampling_says_what_is_wrong_with_structured(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue) as error:
        convert(sampling, SamplingParams, under=("sampling",))
    assert message in error.value.message
