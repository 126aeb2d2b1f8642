"""Finds tool calls in the text of an answer, in the formats of the model families.

A format finds nothing, or calls and the text beside them. Text that was meant as a call and is none raises
BadToolCall: the answer then stays text. An answer may repeat a mark a hundred thousand times, and all others wait while
it is read, so no pattern here looks at a part of a text again and again.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nvcli.core.validation import is_text, show
from nvcli.job.job import FunctionCall

Tools = Sequence[Mapping[str, Any]]
"""The tools of a row, in OpenAI's form."""


class BadToolCall(ValueError):
    """A text was meant as a tool call, but cannot be read as one."""


FoundCalls = tuple[str, list[FunctionCall]]
"""The text beside the calls of an answer, and the calls, at least one."""

FindCalls = Callable[[str, Tools], FoundCalls | None]
"""Finds the calls in a text that includes special tokens. Raises BadToolCall."""


def harmony_call(name: str, body: str) -> FunctionCall:
    """Read a message of gpt-oss to a function as a call. Raises BadToolCall."""
    return _call(name, _decode(body) if body.strip() else {}, body)


def find_tagged(tag: str) -> FindCalls:
    """Return the format of calls between tags, each of them JSON (Hermes, Qwen), or parameters as XML (Qwen3-Coder,
    GLM)."""
    opening, closing = f"<{tag}>", f"</{tag}>"

    def find(text: str, tools: Tools) -> FoundCalls | None:
        before, found, rest = text.partition(opening)
        if not found:
            return None
        calls, texts = [], [before.strip()]
        while found:
            rest = rest.lstrip()
            if rest.startswith("{"):  # tags in the texts of JSON are none
                if closing not in rest and not rest.endswith("}"):
                    raise BadToolCall(f"a call does not end: {show(rest)}")
                value, body, rest = _decode_first(rest)
                calls.append(_from_json(value, body))
                if rest.startswith(closing):
                    rest = rest.removeprefix(closing)
                elif rest and not rest.startswith(opening):
                    raise BadToolCall(f"a call does not end: {show(body)}")
                after, found, rest = rest.partition(opening)
            else:
                part, found, rest = rest.partition(opening)
                body, closed, after = part.partition(closing)
                body = body.strip()
                if not closed and not body.endswith(("</function>", "</arg_value>")):
                    raise BadToolCall(f"a call does not end: {show(body)}")
                read = _from_function if body.startswith("<function=") else _from_arg_keys
                calls.append(read(body, tools))
            texts.append(after.strip())
        return "\n".join(filter(None, texts)), calls

    return find


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,500})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_ARGUMENT = (re.compile("<arg_key>"), re.compile(r"</arg_key>\s*<arg_value>"), re.compile("</arg_value>"))
_NAME = re.compile(r"[\w.\-]+")


def _from_function(body: str, tools: Tools) -> FunctionCall:
    match = _FUNCTION.match(body)
    if match is None:
        raise BadToolCall(f"no function is named: {show(body)}")
    name = match[1].strip()
    values = ((key.strip(), value.removeprefix("\n").removesuffix("\n")) for key, value in _PARAMETER.findall(match[2]))
    return _call(name, _typed(values, name, tools), body)


def _from_arg_keys(body: str, tools: Tools) -> FunctionCall:
    name = body.partition("<arg_key>")[0].strip()
    if not _NAME.fullmatch(name):
        raise BadToolCall(f"no function is named: {show(body)}")
    values = ((body[a.end() : b.start()], body[b.end() : c.start()]) for a, b, c in _marks(body, *_ARGUMENT))
    return _call(name, _typed(values, name, tools), body)


def _marks(text: str, *marks: re.Pattern[str]) -> Iterator[list[re.Match[str]]]:
    """Yield the matches of marks that repeat in this order in a text, with anything between them."""
    at = 0
    while True:
        found = []
        for mark in marks:
            match = mark.search(text, at)
            if match is None:  # and so there is none after a later one before it
                return
            found.append(match)
            at = match.end()
        yield found


def _typed(values: Iterator[tuple[str, str]], name: str, tools: Tools) -> dict[str, Any]:
    """Convert arguments from texts to the types in the tool's schema."""
    functions: list[Mapping[str, Any]] = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    schema = functions[0].get("parameters") if functions else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    return {key: _typed_value(value, properties.get(key)) for key, value in values}


def _typed_value(text: str, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text != "null"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        lowered = text.strip().lower()
        return {"true": True, "false": False, "none": None}.get(lowered, text)


def find_json_after(mark: str, *, end: str = "") -> FindCalls:
    """Return the format of a JSON list of calls after a mark (Mistral, Granite 3, Cohere)."""

    def find(text: str, tools: Tools) -> FoundCalls | None:
        before, found, rest = text.partition(mark)
        if not found:
            return None
        calls = []
        while True:
            listed, rest = _first_listed(rest)
            calls += listed
            if not rest.startswith(mark):
                break
            rest = rest.removeprefix(mark)
        if rest and not (end and rest.startswith(end)):
            raise BadToolCall(f"not JSON: {show(rest)}")
        if not calls:
            raise BadToolCall(f"an empty list of calls: {show(text[len(before) :])}")
        return before.strip(), calls

    return find


_NAME_BEHIND_MARK = re.compile(r"\s*([\w.\-]+)\s*+(?:\[CALL_ID\][^\[{]*+)?(?:\[ARGS\])?\s*(?=\{)")
"""Mistral's form since the eleventh version of its tokenizer: the name, and an object of arguments."""


def _first_listed(text: str) -> tuple[list[FunctionCall], str]:
    """Read one call or a list at the beginning of a text, and return the calls with the rest of the text."""
    match = _NAME_BEHIND_MARK.match(text)
    if match is not None:
        value, body, rest = _decode_first(text[match.end() :])
        return [_call(match[1], value, body)], rest
    value, body, rest = _decode_first(text.lstrip())
    return [_from_json(each, body) for each in (value if isinstance(value, list) else [value])], rest


_NEXT_VALUE = re.compile(r"[^ \n\t;,]")


def find_llama(text: str, tools: Tools) -> FoundCalls | None:
    """Find the calls of Llama 3 (JSON, one after the other) and Llama 4 (as in Python)."""
    before, found, after = text.partition("<|python_tag|>")
    body = (after if found else text.replace("<|python_start|>", "").replace("<|python_end|>", "")).strip()
    if body.startswith("["):
        return find_pythonic(body, tools)
    if not body.startswith("{"):
        if found:
            raise BadToolCall(f"not JSON after <|python_tag|>: {show(body)}")
        return None
    decoder, at = json.JSONDecoder(), 0
    values: list[Any] = []
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except ValueError:
            if not found and not values and '"name"' not in body:
                return None  # an answer that is something else in braces
            raise BadToolCall(f"not JSON: {show(body[at:])}") from None
        values.append(value)
        at = len(body) if (match := _NEXT_VALUE.search(body, at)) is None else match.start()
    if not found and not all(isinstance(value, dict) and "name" in value for value in values):
        return None
    return before.strip() if found else "", [_from_json(value, body) for value in values]


_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


def find_pythonic(text: str, tools: Tools) -> FoundCalls | None:
    """Find a list of calls as in Python: `[look(at="x"), wait()]`."""
    text = text.strip()
    if not _PYTHONIC.match(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError
        calls = [_from_node(node) for node in tree.elts]
    except BadToolCall:
        raise
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise BadToolCall(f"no list of calls: {show(text)}") from None
    return "", calls


def _from_node(node: ast.expr) -> FunctionCall:
    """Read one call. Raises ValueError for anything but literals as named arguments."""
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return _call(ast.unparse(node.func), arguments, ast.unparse(node))


def find_function_calls(text: str, tools: Tools) -> FoundCalls | None:
    """Find the calls of Olmo 3: lines as in Python between tags."""
    before, found, rest = text.partition("<function_calls>")
    if not found:
        return None
    inside, closed, _ = rest.rpartition("</function_calls>")
    lines = [line.strip() for line in (inside if closed else rest).split("\n")]
    calls = find_pythonic(f"[{', '.join(filter(None, lines))}]", tools)
    if calls is None:
        raise BadToolCall(f"no calls: {show(rest)}")
    return before.strip(), calls[1]


_GEMMA_CALL = (re.compile(r"<\|tool_call>\s*call:\s*([\w.\-]+)\s*\{"), re.compile(r"\}\s*<tool_call\|>"))
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.\-]*)\s*:")


def find_gemma4(text: str, tools: Tools) -> FoundCalls | None:
    """Find the calls of Gemma 4: keys without quotes, and texts between quotes that are tokens of their own."""
    before, found, rest = text.partition("<|tool_call>")
    if not found:
        return None
    calls = []
    for opening, closing in _marks(text, *_GEMMA_CALL):
        name, body = opening[1], text[opening.end() - 1 : closing.start() + 1]
        parts = body.split('<|"|>')
        parts[::2] = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        calls.append(_call(name, _decode("".join(parts)), body))
    if len(calls) != text.count("<|tool_call>"):
        raise BadToolCall(f"a call does not end, or names no function: {show(rest)}")
    return before.strip(), calls


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadToolCall(f"not JSON: {show(text.strip())}") from None


def _decode_first(text: str) -> tuple[Any, str, str]:
    """Read the JSON that a text begins with. Returns its value, its text and the rest without leading blanks."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        raise BadToolCall(f"not JSON: {show(text.strip())}") from None
    return value, text[:end], text[end:].lstrip()


def _call(name: str, arguments: Any, text: str) -> FunctionCall:
    """Return a call that was written as `text`. Raises BadToolCall if the arguments are not JSON."""
    if not isinstance(arguments, dict):
        raise BadToolCall(f"the arguments are not an object: {show(text.strip())}")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        written = ""
    if not written or not is_text(written) or not is_text(name):
        raise BadToolCall(f"the arguments are not JSON: {show(text.strip())}")
    return FunctionCall(name=name, arguments=written)


def _from_json(value: Any, text: str) -> FunctionCall:
    """Read a call that was written as a JSON object, with the key names of all families."""
    name = (value.get("name") or value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise BadToolCall(f"no function is named: {show(text.strip())}")
    arguments = value.get("arguments", value.get("parameters")) or {}
    return _call(name, _decode(arguments) if isinstance(arguments, str) else arguments, text)
