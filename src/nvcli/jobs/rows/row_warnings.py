"""Warnings about what rows hold without effect, each said once, with a count at the end.

A key such as `temperature` beside the prompt may be a setting in the wrong place or a column of data, and a row does
not say which. It is copied as any other key; the user is told.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from nvcli.jobs.rows.conversation_options import CONVERSATION_KEYS, REASONING_EFFORT
from nvcli.jobs.rows.openai_structured import STRUCTURED_KEYS
from nvcli.sampling_params import SamplingParams
from nvcli.validation import shorten

_IN_SAMPLING = (*SamplingParams.__struct_fields__, "max_new_tokens", "max_completion_tokens")
_ELSEWHERE = {
    **dict.fromkeys(_IN_SAMPLING, "put it into `sampling`"),
    "system": 'give a message of the role "system" in `messages`, or --system for all rows',
    "system_prompt": 'give a message of the role "system" in `messages`, or --system for all rows',
    "chat_template": "a row cannot bring one: give --chat-template for all rows",
    **dict.fromkeys(CONVERSATION_KEYS, "it belongs beside `messages`"),
    **dict.fromkeys(("enable_thinking", REASONING_EFFORT), "put it into `chat_template_kwargs`"),
    **dict.fromkeys(STRUCTURED_KEYS, "put what it asks for into `sampling.structured`"),
}
"""Keys that people put at the top level of a native row, and what to do with them."""
_KEYS = frozenset(_ELSEWHERE)


class RowWarnings:
    """The warnings of one job. A row is added by one thread, and warnings are taken by another."""

    def __init__(self, columns: Iterable[str] = ()) -> None:
        """`columns` are keys that a template of the job names: they are where they belong."""
        self._keys = _KEYS.difference(columns)
        self._new: deque[str] = deque()
        self._without_conversation = 0
        self._with_nonfinite = 0
        self._answered = 0
        self._counts: Counter[str] = Counter()

    def add_keys(self, keys: Iterable[str], where: str) -> None:
        """Take note of the keys that a row passes through."""
        for key in self._keys.intersection(keys):
            self._counts[key] += 1
            if self._counts[key] == 1:
                self._new.append(
                    f"warning: {where} has `{key}` at its top level, where it is copied and has no effect; "
                    f"if it is a setting, {_ELSEWHERE[key]}"
                )

    def add_prompt(self, where: str) -> None:
        """Take note of a row that is no conversation, where the job says something to conversations."""
        self._without_conversation += 1
        if self._without_conversation == 1:
            self._new.append(
                f"warning: {where} is no conversation, so neither --system nor --chat-template-kwargs has an effect on "
                "it; give `messages`, or make conversations of prompts with --chat"
            )

    def add_nonfinite(self, where: str) -> None:
        """Take note of a row that passes NaN or Infinity through."""
        self._with_nonfinite += 1
        if self._with_nonfinite == 1:
            self._new.append(
                f"warning: {where} has NaN or Infinity in what is copied, which JSON does not have; null stands for it"
            )

    def add_answered(self, where: str) -> None:
        """Take note of a conversation whose last message is the assistant's, and that does not say what follows."""
        self._answered += 1
        if self._answered == 1:
            self._new.append(
                f"warning: {where} ends with a message of the assistant, behind which the model writes another one; "
                "leave that message out to have it answered anew, or give `continue_final_message`: true"
            )

    def add_empty(self, name: str) -> None:
        """Take note of an input that has no rows."""
        self._new.append(f"warning: {name} holds no rows")

    def add_unknown_variables(self, names: Sequence[str]) -> None:
        """Take note of variables of the job that its chat template does not know."""
        if names:
            shown = ", ".join(f"`{shorten(name)}`" for name in names)
            self._new.append(f"warning: the chat template does not know {shown}, which has no effect")

    def take_new(self) -> list[str]:
        """Return the warnings that were not taken yet."""
        return [self._new.popleft() for _ in range(len(self._new))]

    def totals(self) -> list[str]:
        """Return a line for each warning with the number of its rows."""
        lines = [
            f"`{key}` stood at the top level of {_rows(count)} and had no effect there"
            for key, count in self._counts.most_common()
        ]
        if self._without_conversation:
            lines.append(
                f"{_rows(self._without_conversation)} without a conversation, and so without the job's system "
                "message and chat template variables"
            )
        if self._with_nonfinite:
            lines.append(f"NaN or Infinity became null in {_rows(self._with_nonfinite)}")
        if self._answered:
            lines.append(f"{_rows(self._answered)} with a conversation that ends with a message of the assistant")
        return lines


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
