"""Reasoning: the marks that a model puts around its thoughts, and where in an answer's tokens its thought ends.

A thought may be open at the end of the prompt, because the template writes the first mark; it may be closed there,
because the template writes both; or it is for the answer to begin. The last mark is one token in most vocabularies, and
is found by its id. Otherwise it is found in the text.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Sequence
from enum import Enum

import msgspec

from nvcli.core.structured import Constraint
from nvcli.engine.request import ThoughtLimit
from nvcli.errors import RowError
from nvcli.job.text.tokenizer import Tokenizer

_TAIL_TOKENS = 24
"""Tokens at the end of a prompt that are searched for marks; an empty thought takes fewer."""
_HEAD_TOKENS = 12
"""Tokens within which an answer may begin a thought."""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The marks around a thought, as text."""

    start: str
    end: str
    forced_end: str = ""
    """Text that ends a thought at its limit; empty: `end`."""
    forced_call: str = ""
    """Text that ends a thought at its limit if tool calls must follow; empty: the same."""
    other_end: str = ""
    """Another text that ends a thought; empty: none."""

    @property
    def is_harmony(self) -> bool:
        """Whether thoughts are messages of their own channel (gpt-oss) and not part of the message."""
        return self.start == ""


REASONING_FORMATS = {
    "harmony": ReasoningFormat(
        start="",
        end="<|channel|>final",
        other_end="<|channel|>commentary",
        forced_end="<|end|><|start|>assistant<|channel|>final<|message|>",
        forced_call="<|end|><|start|>assistant<|channel|>commentary",
    ),
    "gemma4": ReasoningFormat(start="<|channel>thought", end="<channel|>"),
    "mistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "seed_oss": ReasoningFormat(start="<seed:think>", end="</seed:think>"),
    "cohere": ReasoningFormat(start="<|START_THINKING|>", end="<|END_THINKING|>"),
    "think": ReasoningFormat(start="<think>", end="</think>"),
}
"""The formats by their names in `job.reasoning_parser`."""

HARMONY_MARKS = ("<|channel|>", "<|message|>")
"""Marks that identify a chat template of the harmony format."""


class PromptState(Enum):
    """State of the answer's thought at the end of a prompt."""

    OPEN = 1
    CLOSED = 2
    """The answer holds no thought."""
    LEFT = 3
    """The answer may begin one."""


def find_reasoning_format(name: str, chat_template: str) -> ReasoningFormat | None:
    """Return the format of this name; `auto`: the one whose marks the chat template writes. None: there is none."""
    if name == "none":
        return None
    if name != "auto":
        return REASONING_FORMATS[name]
    if all(mark in chat_template for mark in HARMONY_MARKS):
        return REASONING_FORMATS["harmony"]
    formats = (each for each in REASONING_FORMATS.values() if not each.is_harmony)
    return next((each for each in formats if each.start in chat_template or each.end in chat_template), None)


def unknown_marks(name: str) -> RowError:
    """Return the error of a key about thoughts if their marks are unknown."""
    return RowError(
        "unsupported_parameter",
        f"`{name}` is given, and how this model marks its thoughts is not known; leave it out, or set "
        "`job.reasoning_parser`",
    )


class ReasoningParser:
    """Finds the thoughts in a model's answers. Used by one thread for prompts and one for answers."""

    def __init__(self, form: ReasoningFormat, tokenizer: Tokenizer) -> None:
        self.form = form
        self._tokenizer = tokenizer
        self._start_ids = self._encode(form.start)
        self._end_ids = self._encode(form.end)
        self._shown_start = tokenizer.decode_one(self._start_ids)
        """The first mark as it appears in text without special tokens."""

    def state_of(self, prompt_ids: Sequence[int], last_message: str | None) -> PromptState:
        """Return the state of the thought. `last_message` is what the answer continues; None: a new message."""
        form = self.form
        if form.is_harmony:
            return PromptState.OPEN
        if last_message is not None:
            start, end = last_message.rfind(form.start), last_message.rfind(form.end)
            return PromptState.OPEN if start > end else PromptState.CLOSED if end >= 0 else PromptState.LEFT
        tail = self._tokenizer.decode_one(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        if tail.endswith(form.start):
            return PromptState.OPEN
        return PromptState.CLOSED if tail.endswith(form.end) else PromptState.LEFT

    def limit(self, budget: int, state: PromptState, name: str, *, must_call: bool = False) -> ThoughtLimit | None:
        """Return the limit of a thought; None: there is no thought. `name` is the key that asks for it.

        `must_call` tells whether the answer goes on with tool calls. Raises RowError where the engine could not see the
        end of a thought, because it is no token.
        """
        if state is PromptState.CLOSED:
            return None
        form = self.form
        if not self._sees_end:
            raise RowError(
                "unsupported_parameter",
                f"`{name}` is given, and {form.end}, which ends this model's thoughts, is {len(self._end_ids)} tokens, "
                "so that they cannot be counted; leave it out, or limit `max_tokens`",
            )
        return ThoughtLimit(
            budget=budget,
            start_ids=[] if state is PromptState.OPEN else self._start_ids,
            ends=[self._end_ids, *([self._encode(form.other_end)] if form.other_end else [])],
            forced_ids=self._encode((form.forced_call if must_call else "") or form.forced_end or form.end),
        )

    def after_thought(self, constraint: Constraint, state: PromptState, name: str) -> Constraint:
        """Make a constraint begin after the answer's thought. `name` is the key that asks for it.

        Where the answer may begin a thought and its end could not be seen, because it is no token, the constraint holds
        from the beginning, and leaves no room for one. Raises RowError where the prompt has begun such a thought.
        """
        if state is PromptState.CLOSED or (state is PromptState.LEFT and not self._sees_end):
            return constraint
        if not self._sees_end:
            raise RowError(
                "unsupported_parameter",
                f"{name} is for what follows the thought, and {self.form.end}, which ends this model's thoughts, is "
                f"{len(self._end_ids)} tokens, so that it cannot be seen in time; leave it out, or turn thinking off",
            )
        return msgspec.structs.replace(
            constraint,
            starts_after=[*self._end_ids, *(self._encode(HARMONY_MARKS[1]) if self.form.is_harmony else [])],
            opens_with=[] if state is PromptState.OPEN else self._start_ids,
        )

    def split(self, ids: array[int], state: PromptState) -> int | None:
        """Return the number of tokens of an answer's thought, with its marks; None: it has none.

        An answer that ends inside its thought is all thought.
        """
        if state is PromptState.CLOSED:
            return None
        end = self._find_end(ids)
        if end is not None:
            return end  # without a first mark too: some models leave it out
        return len(ids) if state is PromptState.OPEN or self._begins_thought(ids) else None

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of a thought without its marks and the spaces around it."""
        text = self._tokenizer.decode_one(ids).strip().removesuffix(self.form.end)
        for start in (self.form.start, self._shown_start):
            if start and text.startswith(start):
                text = text.removeprefix(start)
                break
        return text.strip()

    def _find_end(self, ids: array[int]) -> int | None:
        if len(self._end_ids) == 1:
            (end_id,) = self._end_ids
            return ids.index(end_id) + 1 if end_id in ids else None

        def has_end(count: int) -> bool:
            return self.form.end in self._tokenizer.decode_one(ids[:count])

        return bisect.bisect_left(range(len(ids)), True, key=has_end) if has_end(len(ids)) else None

    @property
    def _sees_end(self) -> bool:
        """Whether the end of a thought shows in the tokens as they come."""
        return len(self._end_ids) == 1 or self.form.is_harmony

    def _begins_thought(self, ids: array[int]) -> bool:
        head = self._tokenizer.decode_one(ids[:_HEAD_TOKENS], skip_special_tokens=False)
        return head.lstrip().startswith(self.form.start)

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        (ids,) = self._tokenizer.encode([text], add_special_tokens=False)
        assert not isinstance(ids, RowError)  # plain ASCII
        return ids
