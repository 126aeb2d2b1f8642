"""Says what must become of a row, by the format's documentation (docs/rows.md) and not by nvcli's code.

A line is parsed with Python's own `json`. `Oracle.expect` says whether it is a row, of which form, under which id,
which keys with which bytes pass through, and which error types are allowed: none, or one of those of everything that is
wrong with it. `check` compares that with the output row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

MAX_LEVELS = 400
_OUTPUT_LEVELS = MAX_LEVELS + 1
"""Values under `input` are one level deeper than they were."""
INT64 = range(-(1 << 63), 1 << 63)
_MAX_EXACT = 1 << 53
"""All integers below it differ as floating-point numbers too."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OURS = ("kv_cache_too_small", "tokenizer_error", "aborted")

_NATIVE_OUTPUT = ("id", "index", "choices", "usage", "error", "prompt_logprobs")
_OPENAI_OUTPUT = ("id", "index", "custom_id", "response", "error")
_SHARED = (
    *("max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("logprobs", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "echo"),
    *("include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words", "truncate_prompt_tokens"),
    *("stop_repetition", "thinking_budget", "prompt_logprobs"),
)
_RANKING = ("best_of", "rank_by")
_IGNORED = ("model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
_HARMLESS = {"stream": False, "tools": []}
_FORMS = {"json_schema": dict, "regex": str, "choice": list}
_NO_GRAMMARS = ("(", {"items": {"type": "strng"}})
"""The regular expression and the schema of the fuzzed rows that cannot be used."""
_NUMBERS = {
    # name: whether it must be an integer, and what is allowed
    "max_tokens": (True, lambda value: 1 <= value in INT64),
    "min_tokens": (True, lambda value: 0 <= value in INT64),
    "temperature": (False, lambda value: 0 <= value <= 100),
    "top_p": (False, lambda value: 0 < value <= 1),
    "top_k": (True, lambda value: -1 <= value in INT64),
    "min_p": (False, lambda value: 0 <= value <= 1),
    "seed": (True, lambda value: value in INT64),
    "n": (True, lambda value: 1 <= value <= 1024),
    "presence_penalty": (False, lambda value: -2 <= value <= 2),
    "frequency_penalty": (False, lambda value: -2 <= value <= 2),
    "repetition_penalty": (False, lambda value: 0.01 <= value <= 100),
    "logprobs": (True, lambda value: 0 <= value <= 20),
    "prompt_logprobs": (True, lambda value: 0 <= value <= 20),
    "best_of": (True, lambda value: 1 <= value <= 1024),
    "truncate_prompt_tokens": (True, lambda value: value == -1 or 1 <= value in INT64),
    "thinking_budget": (True, lambda value: 0 <= value in INT64),
}
_NO_VARIABLES = (
    *("messages", "conversation", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
_PLACE = re.compile(r"\{(\w+)\}")
_MAY_BE_NULL = (
    *("max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of", "truncate_prompt_tokens", "thinking_budget"),
)
_MAX_DIGITS = 4300
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAY_BE_TOO_LARGE = re.compile(r"[eE]|\d{300}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The settings of a job that decide what becomes of its rows."""

    max_model_len: int
    vocab_size: int
    prompt_key: str = "prompt"
    messages_key: str = "messages"
    id_key: str = "id"
    on_too_long: str = "error"
    max_tokens: int | None = None
    """The configuration's `sampling.max_tokens`."""
    prompt_template: str | None = None
    """A template with places such as `{topic}` and no other braces."""
    system: str | None = None


@dataclass(slots=True)
class Expected:
    """The required outcome of one row."""

    index: int
    id: str | int
    is_openai: bool = False
    errors: set[str] = field(default_factory=set)
    """One of these is its error type; empty: the row is answered."""
    passed: dict[str, str] = field(default_factory=dict)
    """The keys that pass through, with their values as they stand in the line."""
    under_input: dict[str, str] = field(default_factory=dict)
    """The keys that go under `input`, likewise."""
    prompt_tokens: int | None = None
    num_choices: int = 0
    is_conversation: bool = False
    has_prompt_logprobs: bool = False
    """Whether the output row has the log-probabilities of the prompt's tokens under a key of their own."""
    has_echoed_logprobs: bool = False
    """Whether those of each choice begin with them."""


class _Bad(ValueError):
    """The line is not JSON as the format wants it."""


Limits = tuple[int, dict[str, Any]]
"""The tokens of a prompt and the sampling of its row."""


class Oracle:
    """Says what must become of the lines of one job, in their order: ids must differ."""

    def __init__(self, facts: JobFacts, tokenizer: Path) -> None:
        self._facts = facts
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._ids: set[tuple[type, str | int]] = set()

    def expect(self, data: bytes) -> Iterator[Expected]:
        """Yield what must become of each row of an input, by its bytes."""
        index = 0
        lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        for line in lines:
            if line and not line.isspace():
                yield self._row(line, index)
                index += 1

    def _row(self, line: bytes, index: int) -> Expected:
        try:
            values, texts = _parse(line)
        except _Bad as bad:
            return Expected(index, self._name(index), errors={str(bad)})
        facts = self._facts
        prompts = (facts.prompt_key, facts.messages_key, "prompt_token_ids")

        def is_given(key: str) -> bool:
            return values.get(key) is not None

        is_openai = sum(map(is_given, ("custom_id", "url", "body"))) >= 2 and not any(map(is_given, prompts))
        own: tuple[str, ...] = ("custom_id", "method", "url", "body")
        if not is_openai:
            own = (facts.id_key, "sampling", "chat_template_kwargs")
            own = own if facts.prompt_template is not None else (*own, *prompts)
        given = [texts[key] for key in own if is_given(key)]
        if any(_has_too_large_number(text) or _has_nonfinite(text) for text in given):
            return Expected(index, self._name(index), errors={"invalid_json"})
        values = {key: value for key, value in values.items() if value is not None}
        expected = Expected(index, "", is_openai)
        output_keys = _OPENAI_OUTPUT if is_openai else _NATIVE_OUTPUT
        kept = {key: _with_nulls(text) for key, text in texts.items() if key not in own}
        if any(key in output_keys for key in kept):
            expected.under_input = {key: kept.pop(key) for key in (*output_keys, "input") if key in kept}
        expected.passed = kept
        self._check_id(values, expected)
        limits = self._openai(values, expected) if is_openai else self._native(values, texts, expected)
        if limits is not None and expected.errors <= {"invalid_structured"}:  # of several errors any may be told
            self._check_lengths(*limits, expected)
        return expected

    def _take(self, row_id: str | int) -> bool:
        """Take an id; False if another row has it."""
        key = type(row_id), row_id
        is_new = key not in self._ids
        self._ids.add(key)
        return is_new

    def _name(self, index: int) -> str:
        """The id of a row that brings none."""
        name, number = f"row-{index}", 1
        while not self._take(name):
            number += 1
            name = f"row-{index}-{number}"
        return name

    def _check_id(self, values: dict[str, Any], expected: Expected) -> None:
        key = "custom_id" if expected.is_openai else self._facts.id_key
        given = values.get(key)
        if not expected.is_openai and isinstance(given, float) and given.is_integer() and abs(given) < _MAX_EXACT:
            given = int(given)
        is_text = isinstance(given, str)
        is_number = not expected.is_openai and _is_integer(given) and given in INT64
        if not is_text and not is_number:
            if key in values or expected.is_openai:
                expected.errors.add("invalid_id")
            expected.id = self._name(expected.index)
            return
        assert given is not None
        expected.id = given
        if not self._take(given):
            expected.errors.add("duplicate_id")

    def _native(self, values: dict[str, Any], texts: dict[str, str], expected: Expected) -> Limits | None:
        facts = self._facts
        sampling = values.get("sampling", {})
        if isinstance(sampling, dict):
            never_null = _native_sampling().difference(_MAY_BE_NULL, ("allowed_token_ids", "structured"))
            sampling = {key: value for key, value in sampling.items() if value is not None or key not in never_null}
            sampling = self._with_defaults(sampling)
        if not isinstance(sampling, dict) or not _is_sound(sampling) or not sampling.keys() <= _native_sampling():
            expected.errors.add("invalid_sampling")
        elif any(grammar in _NO_GRAMMARS for grammar in (sampling.get("structured") or {}).values()):
            expected.errors.add("invalid_structured")
        variables = values.get("chat_template_kwargs")
        if variables is not None and not _are_variables(variables):
            expected.errors.add("invalid_value")
        given = [key for key in (facts.prompt_key, facts.messages_key, "prompt_token_ids") if key in values]
        if facts.prompt_template is not None:
            columns = _PLACE.findall(facts.prompt_template)
            if variables is not None:
                expected.errors.add("invalid_value")
            if not set(given) <= set(columns):
                expected.errors.add("conflicting_prompts")
            if not all(column in values for column in columns):
                expected.errors.add("missing_column")
            if expected.errors or not isinstance(sampling, dict):
                return None
            shown = {column: values[column] if isinstance(values[column], str) else texts[column] for column in columns}
            length = self._text(_PLACE.sub(lambda place: shown[place[1]], facts.prompt_template), expected)
            return None if length is None else (length, sampling)
        if len(given) != 1:
            expected.errors.add("conflicting_prompts" if given else "missing_prompt")
            return None
        key, value = given[0], values[given[0]]
        if variables is not None and key != facts.messages_key:
            expected.errors.add("invalid_value")
        if key == facts.prompt_key:
            length = self._text(value, expected)
        elif key == facts.messages_key:
            length = self._messages(value, variables, expected)
        else:
            length = self._token_ids(value, expected)
        return None if length is None or not isinstance(sampling, dict) else (length, sampling)

    def _openai(self, values: dict[str, Any], expected: Expected) -> Limits | None:
        if str(values.get("method", "POST")).upper() != "POST":
            expected.errors.add("invalid_value")
        url, body = values.get("url"), values.get("body")
        if url is None and isinstance(body, dict):
            url = CHAT if body.get("messages") is not None else COMPLETION if body.get("prompt") is not None else None
        if isinstance(url, str):
            path = "/" + url.rstrip("/")
            url = next((known for known in (CHAT, COMPLETION) if path.endswith(known.removeprefix("/v1"))), url)
        if url not in (CHAT, COMPLETION):
            expected.errors.add("unsupported_url")
        if not isinstance(body, dict):
            expected.errors.add("invalid_value")
        if not isinstance(body, dict) or url not in (CHAT, COMPLETION):
            return None
        given = {key: value for key, value in body.items() if value is not None}
        is_chat = url == CHAT
        known = (
            *_SHARED,
            *_IGNORED,
            *(
                ("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
                if is_chat
                else ("prompt", *_RANKING)
            ),
        )
        if given.pop("response_format", {"type": "text"}) != {"type": "text"}:
            expected.errors.add("invalid_structured")
        if is_chat and given.get("tools", []) != []:
            expected.errors.add("invalid_value")  # no maker of rows makes sound ones
            given = {**given, "tools": []}
        for key, value in given.items():
            if not (value == _HARMLESS[key] and not _is_number(value) if key in _HARMLESS else key in known):
                expected.errors.add("unsupported_parameter")
        if not isinstance(given.get("model", ""), str):
            expected.errors.add("invalid_value")
        sampling = {key: given[key] for key in (*_SHARED, *(() if is_chat else _RANKING)) if key in given}
        if is_chat:
            if "max_completion_tokens" in given:
                if given.get("max_tokens", given["max_completion_tokens"]) != given["max_completion_tokens"]:
                    expected.errors.add("invalid_sampling")
                sampling["max_tokens"] = given["max_completion_tokens"]
            wanted, count = sampling.pop("logprobs", False), given.get("top_logprobs", 0)
            is_count = _is_integer(count) and 0 <= count <= 20
            if not isinstance(wanted, bool) or not is_count or (count and not wanted):
                expected.errors.add("invalid_sampling")
        sampling = self._with_defaults(sampling)
        if not _is_sound(sampling):
            expected.errors.add("invalid_sampling")
        name = "messages" if is_chat else "prompt"
        if name not in given:
            expected.errors.add("missing_prompt")
            return None
        value = given[name]
        if is_chat:
            variables = given.get("chat_template_kwargs")
            if variables is not None and not _are_variables(variables):
                expected.errors.add("invalid_value")
            length = self._messages(value, variables, expected)
        else:
            if isinstance(value, list) and value and isinstance(value[0], str | list):
                return self._prompts(value, sampling, expected)
            length = self._token_ids(value, expected) if isinstance(value, list) else self._text(value, expected)
        return None if length is None else (length, sampling)

    def _prompts(self, values: list[Any], sampling: dict[str, Any], expected: Expected) -> Limits | None:
        """The limits of the last of several prompts, once the others are looked at."""
        if len(values) > 1 and sampling.get("prompt_logprobs") is not None:
            expected.errors.add("unsupported_parameter")
        lengths = [
            self._token_ids(value, expected) if isinstance(value, list) else self._text(value, expected)
            for value in values
        ]
        *others, last = [length for length in lengths if length is not None] or [None]
        if last is None or len(others) + 1 < len(lengths):
            return None
        for length in others:
            if expected.errors <= {"invalid_structured"}:
                self._check_lengths(length, sampling, expected)
        return last, sampling

    def _with_defaults(self, sampling: dict[str, Any]) -> dict[str, Any]:
        default = self._facts.max_tokens
        return sampling if default is None else {"max_tokens": default, **sampling}

    def _text(self, value: Any, expected: Expected) -> int | None:
        if not isinstance(value, str):
            expected.errors.add("invalid_value")
            return None
        return len(self._tokenizer.encode(value).ids)

    def _messages(self, value: Any, variables: Any, expected: Expected) -> int | None:
        """The tokens of a conversation, by the template of the built-in model and its variables."""
        if not isinstance(value, list) or not value or not all(map(_is_message, value)):
            expected.errors.add("invalid_value")
            if isinstance(value, list) and any(map(_has_other_part, value)):
                expected.errors.add("unsupported_content")
            return None
        text = ""
        expected.is_conversation = True
        system = self._facts.system
        if system is not None and all(message["role"] not in ("system", "developer") for message in value):
            value = [{"role": "system", "content": system}, *value]
        for message in value:
            content = _content(message)
            if content is None or message.get("tool_calls"):
                expected.errors.add("chat_template_error")  # of the built-in model, which knows no calls
                return None
            joined = content if isinstance(content, str) else "\n".join(map(_part_text, content))
            role = "system" if message["role"] == "developer" else message["role"]
            text += f"<|im_start|>{role}\n{joined}<|im_end|>\n"
        if not isinstance(variables, dict) or variables.get("add_generation_prompt", True):
            text += "<|im_start|>assistant\n"
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _token_ids(self, value: Any, expected: Expected) -> int | None:
        if not isinstance(value, list) or not all(map(_is_integer, value)):
            expected.errors.add("invalid_value")
            return None
        if not all(0 <= token < self._facts.vocab_size for token in value):
            expected.errors.add("token_out_of_vocabulary")
        return len(value)

    def _check_lengths(self, num_tokens: int, sampling: Mapping[str, Any], expected: Expected) -> None:
        """Check a prompt of so many tokens and its answer against the model."""
        facts = self._facts
        biased = []
        for key in sampling.get("logit_bias", {}):
            ids = [int(key)] if re.fullmatch(r"0|[1-9]\d*", key) else self._tokenizer.encode(key).ids
            biased += ids
            if len(ids) != 1:
                expected.errors.add("invalid_sampling")
        allowed = sampling.get("allowed_token_ids") or ()
        if any(token >= facts.vocab_size for token in (*biased, *sampling.get("stop_token_ids", ()), *allowed)):
            expected.errors.add("token_out_of_vocabulary")
        for word in sampling.get("bad_words", ()):
            text = word.strip()
            if any(len(self._tokenizer.encode(spelled).ids) > 32 for spelled in (text, f" {text}")):
                expected.errors.add("invalid_sampling")
        if sampling.get("echo") and expected.is_conversation:
            expected.errors.add("invalid_sampling")
        if sampling.get("thinking_budget") is not None:
            expected.errors.add("unsupported_parameter")  # the built-in model does not think
        cut = sampling.get("truncate_prompt_tokens")
        on_too_long = "truncate-left" if cut == -1 else facts.on_too_long
        if cut is not None and cut > 0:
            num_tokens = min(num_tokens, cut)
        asked = sampling.get("max_tokens")
        most = facts.max_model_len
        answer = asked if asked is not None else max(1, most - num_tokens)
        kept = num_tokens
        if not num_tokens:
            expected.errors.add("empty_prompt")
        elif num_tokens + (asked or 1) > most:
            if on_too_long == "error":
                expected.errors.add("prompt_too_long" if num_tokens >= most else "max_tokens_too_large")
            else:
                answer = asked if asked is not None else max(1, most // 4)
                kept = most - answer
                if kept < 1:
                    expected.errors.add("max_tokens_too_large")
        if sampling.get("min_tokens", 0) > answer:
            expected.errors.add("max_tokens_too_large")
        expected.prompt_tokens = (expected.prompt_tokens or 0) + kept  # of several prompts
        expected.num_choices += sampling.get("n", 1)
        expected.has_prompt_logprobs = sampling.get("prompt_logprobs") is not None
        expected.has_echoed_logprobs = bool(sampling.get("echo")) and sampling.get("logprobs") is not None


def index_of(line: bytes) -> int:
    """Return the number of the input row that an output row answers."""
    row, _ = _parse(line, _OUTPUT_LEVELS)
    return int(row["index"] if "index" in row else row["id"].removeprefix("batch_req_"))


def error_of(line: bytes) -> str | None:
    """Return the error type of an output row; None for an answer."""
    error = _parse(line, _OUTPUT_LEVELS)[0]["error"]
    return None if error is None else str(error["code" if "code" in error else "type"])


def check(line: bytes, expected: Expected) -> str | None:
    """Say what is wrong with an output row; None where it is what must become of its input row."""
    row, texts = _parse(line, _OUTPUT_LEVELS)
    if expected.is_openai:
        error, index = row["error"] and row["error"]["code"], int(row["id"].removeprefix("batch_req_"))
        row_id, body = row["custom_id"], row["response"]["body"]
        status = 200 if error is None else 500 if error in OURS else 400
        is_form = row["response"]["status_code"] == status and (error is None) == ("choices" in body)
        output_keys: Sequence[str] = ("id", "custom_id", "response", "error")
    else:
        error, index, row_id, body = row["error"] and row["error"]["type"], row["index"], row["id"], row
        is_form = error is None or (row["choices"] == [] and row["usage"]["prompt_tokens"] == 0)
        output_keys = _NATIVE_OUTPUT
    passed = {key: text for key, text in texts.items() if key not in output_keys}
    under_input = _parse(passed.pop("input").encode())[1] if expected.under_input and "input" in passed else {}
    found = [
        ("index", index, expected.index),
        ("form", is_form, True),
        ("id", (type(row_id), row_id), (type(expected.id), expected.id)),
        ("passed", passed, expected.passed),
        ("under input", under_input, expected.under_input),
    ]
    if error not in (expected.errors or {None}):
        found.append(("error", error, expected.errors or None))
    if error is None and not expected.errors:
        found.append(("choices", len(body["choices"]), expected.num_choices))
        found.append(("prompt tokens", body["usage"]["prompt_tokens"], expected.prompt_tokens))
        of_prompt = body.get("prompt_logprobs")
        found.append(("prompt_logprobs", of_prompt is not None, expected.has_prompt_logprobs))
        if of_prompt is not None:
            found.append(("tokens of prompt_logprobs", _num_tokens(of_prompt), expected.prompt_tokens))
        for choice in body["choices"]:
            of_choice = choice.get("logprobs")
            if of_choice is not None and "tokens" in of_choice:  # a conversation of OpenAI's has another form
                nulls = [index for index, logprob in enumerate(of_choice["token_logprobs"]) if logprob is None]
                found.append(("nulls of logprobs", nulls, [0] if expected.has_echoed_logprobs else []))
                of_answer = _num_tokens(of_choice) - (expected.prompt_tokens if expected.has_echoed_logprobs else 0)
                found.append(("logprobs of tokens", 1 <= of_answer <= body["usage"]["completion_tokens"], True))
    wrong = [f"{name} is {got!r}, must be {wanted!r}" for name, got, wanted in found if got != wanted]
    if wrong and error is not None:
        wrong.append(row["error"]["message"])
    return "; ".join(wrong) or None


def _num_tokens(logprobs: dict[str, list[Any]]) -> int:
    """The tokens that log-probabilities are of; -1: its lists have several lengths."""
    (*lengths,) = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    return lengths[0] if len(lengths) == 1 else -1


def _parse(line: bytes, max_levels: int = MAX_LEVELS) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a line by key, and the text of each. Raises _Bad with the type of the error."""
    try:
        text = line.decode()
        if _depth(text) > max_levels:
            raise _Bad("invalid_json")
        value, texts = _values(text, _no_constant if max_levels == _OUTPUT_LEVELS else _null)
        if _SURROGATE.search(text) and not _is_text(value):
            raise _Bad("invalid_json")
    except ValueError:
        raise _Bad("invalid_json") from None
    if not isinstance(value, dict):
        raise _Bad("not_an_object")
    return value, texts


def _values(text: str, constant: Callable[[str], None]) -> tuple[Any, dict[str, str]]:
    """Parse JSON; with the text of each value where it is an object. `constant` says what becomes of NaN."""
    hook = _object if _SURROGATE.search(text) else None
    decoder = json.JSONDecoder(parse_constant=constant, parse_int=_integer, object_pairs_hook=hook)
    stripped = text.strip(" \t\r\n")
    value = decoder.decode(stripped)
    texts: dict[str, str] = {}
    if isinstance(value, dict):
        at = 1
        while True:
            at = _skip(stripped, at, " \t\r\n,")
            if stripped[at] == "}":
                break
            key, at = decoder.raw_decode(stripped, at)
            at = _skip(stripped, at, " \t\r\n:")
            _, end = decoder.raw_decode(stripped, at)
            texts[key] = stripped[at:end]
            at = end
    return value, texts


def _skip(text: str, at: int, characters: str) -> int:
    while text[at] in characters:
        at += 1
    return at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object, after a look at the values that a later equal key hides."""
    values = dict(pairs)
    if len(values) < len(pairs) and not all(_is_text([key, value]) for key, value in pairs):
        raise ValueError("half of a surrogate pair")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _null(name: str) -> None:
    """Take NaN and Infinity, which Python writes, for null."""


_NONFINITE = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN', re.DOTALL)


def _with_nulls(text: str) -> str:
    return _NONFINITE.sub(lambda found: found[0] if found[0].startswith('"') else "null", text)


def _has_nonfinite(text: str) -> bool:
    return _with_nulls(text) != text


def _integer(digits: str) -> int | float:
    return float("inf") if len(digits.removeprefix("-")) > _MAX_DIGITS else int(digits)


def _depth(text: str) -> int:
    if text.count("[") + text.count("{") <= MAX_LEVELS:
        return 0
    depth = deepest = 0
    is_string = is_escaped = False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = is_string
        elif character == '"':
            is_string = not is_string
        elif not is_string and character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif not is_string and character in "]}":
            depth -= 1
    return deepest


def _leaves(value: Any) -> Iterator[Any]:
    """Every value in a value that is no object and no list, and every key."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            todo += value
        else:
            yield value


def _is_text(value: Any) -> bool:
    """Whether UTF-8 can hold all texts of a value, which have no half of a surrogate pair."""
    return not any("\ud800" <= c <= "\udfff" for leaf in _leaves(value) if isinstance(leaf, str) for c in leaf)


def _has_too_large_number(text: str) -> bool:
    """Whether a number in JSON text is one that cannot be held, under a key that is given twice too."""
    if _MAY_BE_TOO_LARGE.search(text) is None:
        return False
    numbers: list[float] = []
    json.loads(text, parse_float=lambda digits: numbers.append(float(digits)), parse_int=_note_integer(numbers))
    return float("inf") in map(abs, numbers)


def _note_integer(numbers: list[float]) -> Callable[[str], int | float]:
    def note(digits: str) -> int | float:
        value = _integer(digits)
        if isinstance(value, float):
            numbers.append(value)
        return value

    return note


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_variables(value: Any) -> bool:
    """Whether a value of `chat_template_kwargs` is one that a chat template can be given."""
    return isinstance(value, dict) and value.keys().isdisjoint(_NO_VARIABLES)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = _content(message)
    if isinstance(content, list):
        return all(isinstance(_part_text(part), str) for part in content)
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def _content(message: dict[str, Any]) -> Any:
    """The content of a message, or the text of a refusal without one."""
    content, refusal = message.get("content"), message.get("refusal")
    return refusal if content is None and isinstance(refusal, str) else content


def _part_text(part: Any) -> Any:
    """The text of a part of a message; anything else if it is no text."""
    if not isinstance(part, dict):
        return part
    kind = "text" if part.get("type") is None else part["type"]
    return part.get(kind) if kind in ("text", "refusal") else None


def _has_other_part(message: Any) -> bool:
    """Whether a message has a part of another type than text, such as an image."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text" for part in content
    )


def _native_sampling() -> set[str]:
    return {*_SHARED, *_RANKING, "return_token_ids", "structured"}


def _is_structured(value: Any) -> bool:
    """Whether a value says what an answer must look like, in one of the forms that fuzzed rows have."""
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((name, form),) = value.items()
    return isinstance(form, _FORMS.get(name, ())) and (name != "choice" or all(isinstance(text, str) for text in form))


def _is_sound(sampling: Mapping[str, Any]) -> bool:
    """Whether all values of a `sampling` object are allowed."""
    for name, (is_integer, is_allowed) in _NUMBERS.items():
        value = sampling.get(name, ...)
        if value is ... or (value is None and name in _MAY_BE_NULL):
            continue
        if not (_is_integer(value) if is_integer else _is_number(value)) or not is_allowed(value):
            return False
    flags = (
        sampling.get(name, False)
        for name in ("ignore_eos", "return_token_ids", "echo", "include_stop_str_in_output", "skip_special_tokens")
    )
    words, allowed = sampling.get("bad_words", []), sampling.get("allowed_token_ids")
    best_of, loops = sampling.get("best_of"), sampling.get("stop_repetition", False)
    if not isinstance(words, list) or not (allowed is None or (isinstance(allowed, list) and allowed)):
        return False
    if not all(isinstance(word, str) and word for word in words):
        return False
    if not all(_is_integer(token) and token >= 0 for token in allowed or ()):
        return False
    if sampling.get("rank_by", "mean") not in ("mean", "sum") or loops not in (True, False, {"min_count": 2}):
        return False
    if _is_number(loops) or (best_of is not None and best_of < sampling.get("n", 1)):
        return False
    stops = sampling.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    stop_ids, bias = sampling.get("stop_token_ids", []), sampling.get("logit_bias", {})
    max_tokens, min_tokens = sampling.get("max_tokens"), sampling.get("min_tokens", 0)
    structured = sampling.get("structured")
    return (
        all(isinstance(flag, bool) for flag in flags)
        and (structured is None or (_is_structured(structured) and not sampling.get("ignore_eos", False)))
        and (isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops))
        and (isinstance(stop_ids, list) and all(_is_integer(token) and token >= 0 for token in stop_ids))
        and isinstance(bias, dict)
        and all(_is_number(value) and -100 <= value <= 100 for value in bias.values())
        and len(bias) + len(stop_ids) + len(words) + len(allowed or ()) <= 1024
        and (max_tokens is None or min_tokens <= max_tokens)
    )
