"""Warnings about keys and values of rows that have no effect, each given once, with a count at the end.

A key such as `temperature` beside the prompt may be a setting in the wrong place or a column of data, and a row does
not say which. It is copied as any other key; the user is told.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from enum import Enum

from nvcli.core.byte_sizes import counted
from nvcli.core.chat_template import unknown_variables
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.validation import shorten
from nvcli.job.rows.conversation import CONVERSATION_KEYS, REASONING_EFFORT
from nvcli.job.rows.native_row import ADAPTER_KEY
from nvcli.job.rows.openai_structured import STRUCTURED_KEYS

_IN_SAMPLING = (
    *SamplingParams.__struct_fields__,
    "max_new_tokens",
    "max_completion_tokens",
    "n_predict",
    "stop_sequences",
)
_ELSEWHERE = {
    **dict.fromkeys(_IN_SAMPLING, "put it into `sampling`"),
    "sampling_params": "call it `sampling`",
    **dict.fromkeys(("parameters", "generation_config"), "put its keys into `sampling`"),
    "system": 'give a message of the role "system" in `messages`, or set `job.system` (--system) for all rows',
    "system_prompt": 'give a message of the role "system" in `messages`, or set `job.system` (--system) for all rows',
    "chat_template": "a row cannot have its own; set `job.chat_template` (--chat-template) for all rows",
    **dict.fromkeys(CONVERSATION_KEYS, "put it next to `messages`"),
    "functions": "give `tools` next to `messages`",
    **dict.fromkeys(("enable_thinking", REASONING_EFFORT), "put it into `chat_template_kwargs`"),
    **dict.fromkeys(STRUCTURED_KEYS, "put what it asks for into `sampling.structured`"),
    ADAPTER_KEY: "name the adapters that rows choose from in `lora` (--lora NAME=PATH)",
    **{key: f"`job.image_field: {key}` (--image-field {key}) reads images there" for key in ("image", "images")},
    "multi_modal_data": "put images into `messages`, or under the key that `job.image_field` names",
}
"""Keys that people wrongly put at the top level of a native row → what to do with them."""
_BESIDE_BODY = {
    **_ELSEWHERE,
    **dict.fromkeys((*_IN_SAMPLING, *CONVERSATION_KEYS, *STRUCTURED_KEYS, REASONING_EFFORT), "put it into `body`"),
    "chat_template_kwargs": "put it into `body`",
    "enable_thinking": "put it into `body.chat_template_kwargs`",
    **dict.fromkeys(("sampling", "sampling_params", "parameters", "generation_config"), "put its keys into `body`"),
    **dict.fromkeys(("image", "images", "multi_modal_data"), "put images into `body.messages`"),
    ADAPTER_KEY: "name the adapter as `body.model`",
}
"""Keys that people wrongly put beside the body of a row of a batch file → what to do with them."""
_MAX_VARIABLES = 100
"""Variables of chat templates that are looked up in them."""


class RowRemark(Enum):
    """A remark about rows: the message for the first such row, and the one with their number at the end."""

    NO_CONVERSATION = (
        "{} is not a conversation, so neither `job.system` nor `job.chat_template_kwargs` affects it; give "
        "`messages`, or make conversations of prompts with `job.chat: always` (--chat)",
        "{} without a conversation, and so without the job's system message and chat template variables",
    )
    """A row is not a conversation, although the job has settings for conversations."""
    NONFINITE = (
        "{} has NaN or Infinity, which JSON does not have; null is read instead",
        "NaN or Infinity became null in {}",
    )
    ANSWERED = (
        "{} ends with a message of the assistant, after which the model writes another one; leave that message out "
        "to have it answered again, or give `continue_final_message`: true",
        "{} with a conversation that ends with a message of the assistant",
    )
    """A conversation ends with a message of the assistant, and the row does not say what follows."""
    STARTS_TWICE = (
        "{} begins with the special token that the tokenizer puts before every prompt, so the model sees it twice; "
        "take it out of the text, or give `messages`",
        "{} with a prompt that begins with the tokenizer's first token twice",
    )
    """A prompt that was rendered before begins with what the tokenizer adds."""
    NO_IMAGE = (
        "{} has nothing under the key of `job.image_field`, and is sent without an image",
        "{} without an image, though `job.image_field` names a key",
    )


class RowWarnings:
    """The warnings of one job. One thread adds rows, another takes warnings."""

    def __init__(self, columns: Collection[str] = ()) -> None:
        """`columns` are keys that a template of the job uses, which are not warned about."""
        self._elsewhere = {key: hint for key, hint in _ELSEWHERE.items() if key not in columns}
        self._new: deque[str] = deque()
        self._remarks = dict.fromkeys(RowRemark, 0)
        self._counts: Counter[str] = Counter()
        self.start = ""
        """The tokens that the tokenizer puts before every prompt, spelled out; empty if there are none."""
        self._template = ""
        self._variables: set[str] = set()
        """The variables of the chat template that were given so far."""

    def add_keys(self, keys: Iterable[str], where: str, *, is_native: bool) -> None:
        """Record the keys that a row passes through."""
        elsewhere = self._elsewhere if is_native else _BESIDE_BODY
        for key in elsewhere.keys() & keys:
            self._counts[key] += 1
            if self._counts[key] == 1:
                self._new.append(
                    f"warning: {where} has `{key}` at its top level, where it is copied and has no effect; "
                    f"if it is a setting, {elsewhere[key]}"
                )

    def add(self, remark: RowRemark, where: str) -> None:
        """Record a row to which a remark applies."""
        self._remarks[remark] += 1
        if self._remarks[remark] == 1:
            self._new.append(f"warning: {remark.value[0].format(where)}")

    def add_input(self, problem: str) -> None:
        """Record an input with a problem, such as one that could only be read in part."""
        self._new.append(f"warning: {problem}")

    def add_tokenizer(self, template: str, variables: Iterable[str], start: str) -> None:
        """Record the chat template that is to know the variables, beginning with those of the job, and `start`."""
        self._template, self.start = template, start
        self.add_variables(variables)

    def add_variables(self, names: Iterable[str], where: str | None = None) -> None:
        """Record variables of a chat template: those of the row `where`; None: of the job."""
        new = [name for name in names if name not in self._variables]
        if not new or not self._template or len(self._variables) >= _MAX_VARIABLES:
            return
        self._variables.update(new)
        if unknown := unknown_variables(self._template, new):
            shown = ", ".join(f"`{shorten(name)}`" for name in unknown)
            whose = f" of {where}" if where else ""
            self._new.append(f"warning: the chat template does not know {shown}{whose}, which has no effect")

    def take_new(self) -> list[str]:
        """Return the warnings since the last call."""
        return [self._new.popleft() for _ in range(len(self._new))]

    def totals(self) -> list[str]:
        """Return a line with the number of rows for each warning."""
        keys = [
            f"`{key}` stood at the top level of {counted(count, 'row')} and had no effect there"
            for key, count in self._counts.most_common()
        ]
        remarks = [remark.value[1].format(counted(count, "row")) for remark, count in self._remarks.items() if count]
        return keys + remarks
