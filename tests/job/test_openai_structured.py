"""The spellings in which an OpenAI row asks for a structured answer, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.core.structured import Structured
from nvcli.errors import RowError
from nvcli.job.rows.native_row import RowDefaults
from nvcli.job.rows.openai_structured import structured_of

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}, "required": ["z"]}
TEXT = '{"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}, "required": ["z"]}'


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json_schema": SCHEMA},
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": TEXT, "regex": None, "json_object": False}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, {"json_schema": SCHEMA}),
        ({"guided_json": TEXT}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"], "response_format": {"type": "text"}}, {"choice": ["a"]}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"json_schema": TEXT}, {"json_schema": SCHEMA}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": "root ::= x"}, {"grammar": "root ::= x"}),
    ],
)
def test_spellings(body: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    found = structured_of(body)
    assert found == wanted
    if found is not None and wanted is not None:
        assert RowDefaults({}).sampling({"structured": found}, under="body").structured == Structured(**wanted)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": "json"}, '`body.response_format` is "json"; allowed: an object whose `type` is'),
        (
            {"response_format": {"type": "json_schema"}},
            "`body.response_format.json_schema` is null; expected an object",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "json_schema.schema` is 5"),
        (
            {"response_format": {"type": "json_object", "response_schema": SCHEMA}},
            "format.response_schema` is not supp",
        ),
        ({"guided_json": "{"}, '`body.guided_json` is "{", which is not JSON'),
        ({"guided_json": 5}, "`body.guided_json` is 5; allowed: a JSON schema"),
        ({"guided_regex": 5}, "`body.guided_regex` is 5; allowed: text"),
        ({"guided_choice": []}, "`body.guided_choice` is []; allowed: a list of texts"),
        ({"guided_choice": ["a", 1]}, "allowed: a list of texts"),
        ({"structured_outputs": 5}, "`body.structured_outputs` is 5; expected an object"),
        ({"structured_outputs": {}}, "`body.structured_outputs` holds 0 of json, json_object, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "`body.structured_outputs` holds 2 of"),
        ({"structured_outputs": {"jsn": {}}}, "`body.structured_outputs.jsn` is not supported; did you mean `json`?"),
        ({"guided_regex": "a", "guided_json": {}}, "`body.guided_json` and `body.guided_regex` are given"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as error:
        structured_of(body)
    assert message in error.value.message
