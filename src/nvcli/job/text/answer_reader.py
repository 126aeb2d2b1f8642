"""AnswerReader: parses the answer to a conversation into its thought, text and tool calls.

Rows that are no conversations have no reader: their answers are texts. What is read depends on the answer, its prompt
and the tools of its row alone.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import msgspec

from nvcli.job.job import FunctionCall, ToolCall
from nvcli.job.text.call_grammars import HARMONY, TOOL_FORMATS, tool_format_name
from nvcli.job.text.reasoning import HARMONY_MARKS, PromptState, ReasoningParser, find_reasoning_format
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.job.text.tool_calls import BadToolCall, FoundCalls, harmony_call

_ID_CHARS = 9
"""Length of call ids; Mistral's chat templates refuse others."""
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How to parse the answers to a row."""

    reader: AnswerReader
    state: PromptState
    """State of the answer's thought at the end of the prompt."""
    tools: Sequence[Mapping[str, Any]]
    """Tools that the answer may call; empty: do not look for calls."""

    @property
    def tells_thoughts(self) -> bool:
        """Whether the tokens of thoughts are counted."""
        return self.reader.reasoning is not None

    @property
    def digest(self) -> bytes:
        """Bytes that are equal for rows whose answers are parsed alike."""
        return b"%d" % self.state.value + msgspec.json.encode(self.tools)


class ParsedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed answer."""

    text: str
    """The answer without its thought and calls."""
    reasoning: str | None = None
    """The thought; None: there is none."""
    num_reasoning_tokens: int = 0
    """Tokens of the thought, including its marks."""
    calls: Sequence[FunctionCall] = ()
    problem: str = ""
    """Why a text that looks like a tool call is not one, and stays text; empty: there is no such text."""


class AnswerReader:
    """Parses the answers of a model."""

    def __init__(self, tokenizer: Tokenizer, *, reasoning_parser: str, tool_parser: str) -> None:
        """`reasoning_parser` and `tool_parser` are `job.reasoning_parser` and `job.tool_parser`."""
        template = tokenizer.chat_template
        form = find_reasoning_format(reasoning_parser, template)
        self._tokenizer = tokenizer
        self.reasoning = None if form is None else ReasoningParser(form, tokenizer)
        """Finds thoughts; None: they stay part of the text."""
        choices = (reasoning_parser, tool_parser)
        writes_harmony = all(mark in template for mark in HARMONY_MARKS)
        self._is_harmony = HARMONY in choices or (writes_harmony and "auto" in choices)
        name = HARMONY if self._is_harmony else tool_format_name(tool_parser, template)
        self.call_format = None if tool_parser == "none" else name
        """Name of the format of tool calls; None: do not look for calls."""
        self._tool_format = None if name is None else TOOL_FORMATS.get(name)

    def reading(
        self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], last_message: str | None
    ) -> AnswerFormat | None:
        """Return how to parse the answers to a prompt; None: they are plain texts.

        `last_message` is the message that the answer goes on with; None: it begins a new one.
        """
        tools = tools if self.call_format is not None else []
        state = PromptState.CLOSED
        if self.reasoning is not None:
            state = self.reasoning.state_of(prompt_ids, last_message)
        if state is PromptState.CLOSED and not tools:
            return None
        return AnswerFormat(reader=self, state=state, tools=tools)

    def read(
        self, ids: array[int], reading: AnswerFormat, *, text_before_stop: str | None, skip_special_tokens: bool
    ) -> ParsedAnswer:
        """Parse an answer. `text_before_stop` is its text if a stop string ended it, or None."""
        num_cut = 0
        if text_before_stop is not None:
            whole = self._tokenizer.decode_one(ids, skip_special_tokens=skip_special_tokens)
            num_cut = max(0, len(whole) - len(text_before_stop))
        if self._is_harmony:
            return self._read_harmony(ids, reading, num_cut)
        count = None if self.reasoning is None else self.reasoning.split(ids, reading.state)
        rest = ids[count or 0 :]
        text = self._tokenizer.decode_one(rest, skip_special_tokens=skip_special_tokens)
        text, num_cut = _cut(text, num_cut)
        reasoning = None
        if count is not None:
            assert self.reasoning is not None
            reasoning, _ = _cut(self.reasoning.text_of(ids[:count]), num_cut)
            text = text.lstrip("\n")
        found, problem = self._find_calls(text if text_before_stop is not None else None, rest, reading)
        return ParsedAnswer(
            text=text if found is None else found[0],
            reasoning=reasoning,
            num_reasoning_tokens=count or 0,
            calls=() if found is None else found[1],
            problem=problem,
        )

    def _find_calls(self, cut: str | None, ids: Sequence[int], reading: AnswerFormat) -> tuple[FoundCalls | None, str]:
        """Find the calls in an answer's tokens after its thought, or in its text if a stop string has `cut` it."""
        if not reading.tools or self._tool_format is None:
            return None, ""
        text = self._tokenizer.decode_one(ids, skip_special_tokens=False) if cut is None else cut
        try:
            return self._tool_format.find(text, reading.tools), ""
        except (BadToolCall, RecursionError) as error:
            return None, _problem(error)

    def _read_harmony(self, ids: array[int], reading: AnswerFormat, num_cut: int) -> ParsedAnswer:
        """Parse the messages of an answer by their channels and recipients."""
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[FunctionCall] = []
        problem, num_reasoning_tokens = "", 0
        for part in _split(ids, self._tokenizer.token_id("<|start|>")):
            header, found, body = self._tokenizer.decode_one(part, skip_special_tokens=False).partition("<|message|>")
            if not found:
                continue
            body = _END.sub("", body)
            recipient = _RECIPIENT.search(header)
            if recipient is not None and reading.tools:
                try:
                    calls.append(harmony_call(recipient[1], body))
                    continue
                except (BadToolCall, RecursionError) as error:
                    problem = problem or _problem(error)
            channel = _CHANNEL.search(header)
            if channel is not None and channel[1] == "analysis" and self.reasoning is not None:
                thoughts.append(body)
                num_reasoning_tokens += len(part)
            else:
                texts.append(body)
        text, num_cut = _cut("\n".join(texts), num_cut)
        reasoning, _ = _cut("\n".join(thoughts), num_cut)
        return ParsedAnswer(
            text=text,
            reasoning=reasoning if thoughts else None,
            num_reasoning_tokens=num_reasoning_tokens,
            calls=calls,
            problem=problem,
        )


def _problem(error: BadToolCall | RecursionError) -> str:
    """Explain why a text that looks like a tool call is not one."""
    return str(error) if isinstance(error, BadToolCall) else "a call is nested too deep"


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.\-]+)")
_END = re.compile(r"<\|(?:end|return|call)\|>")


def _split(ids: array[int], start_id: int | None) -> Iterator[array[int]]:
    """Yield the messages of an answer. The first lacks its role, and the others begin with `start_id`."""
    starts = [at for at, token in enumerate(ids) if at and token == start_id]
    for start, end in pairwise((0, *starts, len(ids))):
        yield ids[start:end]


def _cut(text: str, num_chars: int) -> tuple[str, int]:
    """Cut characters from the end of a text, and return it with the number still to be cut before it."""
    kept = max(0, len(text) - num_chars)
    return text[:kept], num_chars - (len(text) - kept)


def tool_calls_of(calls: Sequence[FunctionCall], prompt_ids: bytes, choice: int) -> list[ToolCall]:
    """Return calls in OpenAI's form. Their ids depend only on the prompt, the number of the choice and the call."""
    return [ToolCall(id=_call_id(prompt_ids, choice, number), function=call) for number, call in enumerate(calls)]


def _call_id(prompt_ids: bytes, choice: int, number: int) -> str:
    digest = int.from_bytes(blake2b(b"%d:%d:%b" % (choice, number, prompt_ids), digest_size=8).digest())
    chars = []
    for _ in range(_ID_CHARS):
        digest, place = divmod(digest, len(_ALPHABET))
        chars.append(_ALPHABET[place])
    return "".join(chars)
