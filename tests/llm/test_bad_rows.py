"""Rows of a Python program that hold what no line of a file can: each is an error of its own, and no other row's."""

from __future__ import annotations

import collections
import datetime
import math
import sqlite3
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from nvcli.errors import ConfigError
from nvcli.llm.llm import LLM

pytestmark = pytest.mark.usefixtures("warm_engines")

HALF = "a\ud800"  # half of a character, which UTF-8 cannot hold
HUGE = 10**5000  # more digits than Python writes


class Text(str):
    pass


class Table(dict[str, Any]):
    pass


class Model:
    """A model as Pydantic makes them."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def model_dump(self) -> dict[str, Any]:
        return {**self.values, "refusal": None}


class Rude:
    """An object that raises whatever it is asked."""

    def tolist(self) -> Any:
        raise LookupError("no")

    def __str__(self) -> str:
        raise LookupError("no")

    __repr__ = __str__


def nested(levels: int, key: str = "a") -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {key: value}
    return value


LOOP: dict[str, Any] = {}
LOOP["a"] = LOOP
LOOPS: list[Any] = []
LOOPS.append(LOOPS)
HI = [{"role": "user", "content": "hi"}]
SQL = sqlite3.connect(":memory:")
SQL.row_factory = sqlite3.Row


def sampling(**values: Any) -> dict[str, Any]:
    return {"prompt": "x", "sampling": {"max_tokens": 2, **values}}


def structured(**values: Any) -> dict[str, Any]:
    return sampling(structured=values)


def chat(**values: Any) -> dict[str, Any]:
    return {"messages": HI, "sampling": {"max_tokens": 2}, **values}


def variables(**values: Any) -> dict[str, Any]:
    return chat(chat_template_kwargs=values)


def tools(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def openai(**body: Any) -> dict[str, Any]:
    return {"custom_id": "o", "url": "/v1/chat/completions", "body": {"messages": HI, **body}}


NO_TEXT = "is not text: it holds the lone surrogate"
TOO_DEEP = "is nested too deep"
TOO_LARGE = "is a number that is too large"
NOT_FINITE = "is not a finite number"
TYPES = (
    "invalid_value",
    "invalid_id",
    "invalid_sampling",
    "not_an_object",
    "token_out_of_vocabulary",
    "missing_prompt",
)
KINDS: dict[str, tuple[Any, str]] = {
    "half a character as the row": (HALF, f"`prompt` {NO_TEXT}"),
    "half a character in the prompt": ({"prompt": HALF}, f"`prompt` {NO_TEXT}"),
    "half a character in the id": ({"prompt": "x", "id": HALF}, f"`id` {NO_TEXT}"),
    "half a character in stop": (sampling(stop=["x", HALF]), f"`sampling.stop[1]` {NO_TEXT}"),
    "half a character as stop": (sampling(stop=HALF), f"`sampling.stop` {NO_TEXT}"),
    "half a character in bad_words": (sampling(bad_words=[HALF]), f"`sampling.bad_words[0]` {NO_TEXT}"),
    "half a character in logit_bias": (sampling(logit_bias={HALF: 1}), "a key of `sampling.logit_bias` is not text"),
    "half a character in choice": (structured(choice=[HALF]), f"`sampling.structured.choice[0]` {NO_TEXT}"),
    "half a character in regex": (structured(regex=HALF), f"`sampling.structured.regex` {NO_TEXT}"),
    "half a character in grammar": (structured(grammar=f'start: "{HALF}"'), f"`sampling.structured.grammar` {NO_TEXT}"),
    "half a character in a schema": (structured(json_schema={"const": HALF}), f"json_schema.const` {NO_TEXT}"),
    "half a character in a key of a schema": (
        structured(json_schema={"properties": {HALF: {}}}),
        "a key of `sampling.structured.json_schema.properties` is not text",
    ),
    "half a character in a message": ([{"role": "user", "content": HALF}], f"`messages[0].content` {NO_TEXT}"),
    "half a character in a message's key": ([{**HI[0], HALF: 1}], "a key of `messages[0]` is not text"),
    "half a character in a variable": (variables(a=HALF), f"`chat_template_kwargs.a` {NO_TEXT}"),
    "half a character in a body": (openai(stop=HALF), f"`body.stop` {NO_TEXT}"),
    "a deep schema": (structured(json_schema=nested(500, "not")), f"`sampling` {TOO_DEEP}"),
    "a very deep schema": (structured(json_schema=nested(100_000)), f"`sampling` {TOO_DEEP}"),
    "deep tools": (chat(tools=tools(nested(500))), f"`tools` {TOO_DEEP}"),
    "deep documents": (chat(documents=[nested(500)]), f"`documents` {TOO_DEEP}"),
    "a deep key of a message": ([{**HI[0], "a": nested(500)}], f"`messages` {TOO_DEEP}"),
    "a deep variable": (variables(a=nested(900)), f"`chat_template_kwargs` {TOO_DEEP}"),
    "deep arguments of a call": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 900 + "]" * 900}}]}],
        "has arguments that are not JSON",
    ),
    "a schema that holds itself": (structured(json_schema=LOOP), f"`sampling` {TOO_DEEP}, or holds itself"),
    "messages that hold themselves": ({"messages": LOOPS}, f"`messages` {TOO_DEEP}, or holds itself"),
    "variables that hold themselves": (variables(a=LOOP), f"`chat_template_kwargs` {TOO_DEEP}, or holds itself"),
    "a huge number in a schema": (structured(json_schema={"const": HUGE}), f"json_schema.const` {TOO_LARGE}"),
    "a huge number of tokens": (sampling(max_tokens=HUGE), f"`sampling.max_tokens` {TOO_LARGE}"),
    "a huge token id": ([5, HUGE], "`prompt_token_ids` holds a value of the type `int`; the model's tokens are"),
    "half a character among token ids": ([5, HALF], f"`prompt_token_ids[1]` {NO_TEXT}"),
    "a huge number as the prompt": ({"prompt": HUGE}, "`prompt` is a value of the type `int`; allowed: text"),
    "a huge number as the id": ({"prompt": "x", "id": HUGE}, "`id` is a value of the type `int`; allowed"),
    "an object in a schema": (structured(json_schema={"a": object()}), "an object of the type `object`"),
    "a function in a schema": (structured(json_schema={"a": [len]}), "json_schema.a[0]` is an object of the type"),
    "a function in a variable": (
        variables(a=lambda: 1),
        "`chat_template_kwargs.a` is an object of the type `function`",
    ),
    "a function in tools": (chat(tools=tools({"a": lambda: 1})), "`tools[0].function.parameters.a` is an object"),
    "an object in documents": (chat(documents=[{"text": object()}]), "`documents[0].text` is an object"),
    "a key that is a tuple": (structured(json_schema={(1, 2): 3}), "has a key of the type `tuple`"),
    "no number": (sampling(temperature=math.nan), f"`sampling.temperature` {NOT_FINITE}"),
    "no number in a variable": (variables(a=[math.inf]), f"`chat_template_kwargs.a[0]` {NOT_FINITE}"),
    "bytes as the prompt": ({"prompt": b"\xff"}, "allowed: text"),
    "bytes in a variable": (variables(a=b"x"), "`chat_template_kwargs.a` is an object of the type `bytes`"),
    "JSON as the sampling": ({"prompt": "x", "sampling": msgspec.Raw(b"[" * 999)}, "expected an object with keys"),
    "a set": (sampling(stop={"x"}), "`sampling.stop` is an object of the type `set`"),
    "an object as the row": (object(), "expected a dict"),
    "a message as the row": ({"role": "user", "content": "x"}, "give one; a list of messages is one row: llm.chat"),
    "a number as the row": (np.int64(5), "; token ids are a row together: [[1, 2, 3]]"),
    "an object that raises, as the row": (Rude(), "the row cannot be read: LookupError: no"),
    "an object that raises, as the prompt": ({"prompt": Rude()}, "`prompt` cannot be read: LookupError: no"),
    "an object that raises, in a variable": (variables(a=Rude()), "`chat_template_kwargs` cannot be read: LookupError"),
    # What stands for plain data is answered.
    "numbers of numpy": (sampling(temperature=np.float32(0.5), seed=np.int64(3)), ""),
    "large numbers": (sampling(temperature=0, structured={"json_schema": {"enum": [-(2**70), 5]}}), ""),
    "arrays": (variables(a=np.array([1, 2])), ""),
    "an array of token ids": ({"prompt_token_ids": np.array([5, 6])}, ""),
    "texts of numpy": ({"prompt": np.str_("x")}, ""),
    "subclasses": (Table(prompt=Text("x"), sampling=Table(stop=[Text("y")])), ""),
    "subclasses in a conversation": (Table(messages=(Table(role=Text("user"), content=Text("x")),)), ""),
    "mappings": (types.MappingProxyType({"prompt": "x", "sampling": types.MappingProxyType({"max_tokens": 2})}), ""),
    "a row of a database": (SQL.execute("SELECT 'x' AS prompt, 5 AS topic").fetchone(), ""),
    "a named tuple": (collections.namedtuple("Row", "prompt topic")("x", 5), ""),
    "a message of OpenAI's client": ([Model(**HI[0])], ""),
    "a message of OpenAI's client in a row": ({"messages": [HI[0], Model(role="assistant", content="x")]}, ""),
    "keys that are numbers": (sampling(logit_bias={5: 1.0}), ""),
    "dates": (variables(a=datetime.date(2026, 1, 2)), ""),
    "other keys hold anything": ({"prompt": "x", HALF: object(), 3: LOOP}, ""),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {"device": "cpu", "kv_cache_memory": "64MiB", "max_num_seqs": 4, "sampling": {"max_tokens": 2}}
    with LLM("demo", **settings) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_bad_row_is_an_error_of_its_own(llm: LLM, kind: str) -> None:
    row, message = KINDS[kind]
    bad, good = llm.generate([row, "good"], order="input")
    assert good.error is None
    if not message:
        assert bad.error is None
        return
    assert bad.error is not None
    assert bad.error.type in TYPES
    assert message in bad.error.message
    assert bad.error.message.startswith("rows[0]: ")
    assert bad.error.message.isprintable()


def test_rows_that_are_scored_pass_the_same_checks(llm: LLM) -> None:
    rows: list[Any] = [{"prompt": "x", "choices": value} for value in ([HALF, "a"], {"a"}, LOOPS, ["a", "b"])]
    errors = [answer.error and answer.error.type for answer in llm.score(rows, order="input")]
    assert errors == ["invalid_value"] * 3 + [None]


def test_what_is_said_for_all_rows_passes_them_too(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"`sampling\.structured\.json_schema\.a` is an object of the type `object`"):
        llm.generate("x", sampling={"structured": {"json_schema": {"a": object()}}})
    for settings, message in [
        ({"sampling": {"stop": [HALF]}}, r"`sampling\.stop\[0\]` is not text"),
        ({"job": {"chat_template_kwargs": {"a": LOOP}}}, "`job` is nested too deep, or holds itself"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM("demo", **settings)
