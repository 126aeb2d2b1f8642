"""Reads rows in nvcli's own form, and those of well-known data sets without `prompt` and `messages`: ShareGPT, Alpaca.

Raises RowError, and InvalidValue for a value that is not allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import msgspec

from nvcli.core.byte_sizes import counted
from nvcli.core.config_types import MAX_INT64
from nvcli.core.job_config import MESSAGES_KEY, PROMPT_KEY
from nvcli.core.sampling_params import SamplingParams, lay_over
from nvcli.core.validation import InvalidValue, convert, is_integer, is_utf8, show, whole_number
from nvcli.errors import RowError
from nvcli.job.job import Job, JobId, PromptTask, RowContext
from nvcli.job.rows.conversation import check_messages, conversation_options, image_parts, with_images
from nvcli.job.rows.prompt_rules import PromptKind, PromptRules
from nvcli.job.rows.raw_values import decode, decode_list, is_null

NO_IDS = "; `job.id_field: none` (--id-field none, with --overwrite) reads no ids"
"""End of a message about an id that cannot be used."""
ADAPTER_KEY = "lora"
"""The key that names a row's LoRA adapter, where adapters have names."""
_CONVERSATIONS = "conversations"
"""ShareGPT's key of a conversation."""
_INSTRUCTION, _INPUT = "instruction", "input"
"""Alpaca's keys of a task and of its input, which may be empty."""
_OUTPUT = "output"
"""Alpaca's key of the reference answer, which is copied."""

KEYS_OF_KIND = {
    PromptKind.CONVERSATIONS: frozenset((_CONVERSATIONS,)),
    PromptKind.INSTRUCTION: frozenset((_INSTRUCTION, _INPUT)),
}
"""Keys that form the prompt in well-known data sets."""
KNOWN_KEYS = frozenset().union(*KEYS_OF_KIND.values())


_NEVER_NULL = {key for key, value in msgspec.structs.asdict(SamplingParams()).items() if value is not None}
"""Keys of `sampling` that have no value null."""


class RowKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a row that mean something to nvcli; all others are passed through."""

    prompt: str | None = PROMPT_KEY
    """The key of a prompt's text; None: rows have none, because conversations stand under its usual key."""
    messages: str = MESSAGES_KEY
    prompt_token_ids: str = "prompt_token_ids"
    id: str = "id"
    sampling: str = "sampling"
    chat_template_kwargs: str = "chat_template_kwargs"
    image: str | None = None
    """The key of a row's images, besides those in its messages; None: there is none."""
    adapter: str | None = None
    """The key that names a row's LoRA adapter; None: adapters have no names, and rows do not choose one."""
    deciding: str | None = None
    """The key that wins in rows with several of `prompts`; None: such rows are errors."""

    @property
    def prompts(self) -> tuple[str, ...]:
        others = self.messages, self.prompt_token_ids
        return others if self.prompt is None else (self.prompt, *others)

    @property
    def line(self) -> str:
        """The column of a row that is a line of text."""
        return self.messages if self.prompt is None else self.prompt

    @property
    def are_defaults(self) -> bool:
        """Whether prompts have their default keys."""
        return (self.prompt, self.messages) == (PROMPT_KEY, MESSAGES_KEY)

    @property
    def names_prompt(self) -> bool:
        """Whether the job names the key of prompts."""
        return self.prompt != PROMPT_KEY

    @property
    def beside_prompt(self) -> frozenset[str]:
        others = (key for key in (self.image, self.adapter) if key is not None)
        return frozenset((self.id, self.sampling, self.chat_template_kwargs, *others))


class RowDefaults:
    """Defaults of `sampling`, and of the LoRA adapter, which a row's own keys override."""

    def __init__(self, defaults: Mapping[str, Any], *, adapter: str | None = None) -> None:
        """`adapter` is a name as rows may have it; None: there is none. Raises InvalidValue for defaults that are not
        valid as SamplingParams."""
        self.adapter = adapter
        self._values = dict(defaults)
        self._sampling = convert(self._values, SamplingParams)

    def sampling(self, own: Any, *, under: str) -> SamplingParams:
        """Return the sampling of a row, whose keys are `under` this key. Null is as good as absent where it is no value
        of its own: writers of JSONL fill the keys that other rows have with it. Raises RowError."""
        if not isinstance(own, dict):
            raise RowError("invalid_sampling", f"`{under}` is {show(own)}; expected an object with keys")
        if any(value is None for value in own.values()):  # `in` would compare arrays
            own = {key: value for key, value in own.items() if value is not None or key not in _NEVER_NULL}
        if not own:
            return self._sampling
        try:
            return convert(lay_over(self._values, own), SamplingParams, under=(under,))
        except InvalidValue as error:
            raise RowError("invalid_sampling", error.message) from None


def native_id(value: Any, key: str) -> JobId | None:
    """Return the id in a row's `key`; None if there is none."""
    if isinstance(value, bytes) and is_utf8(value):
        return value.decode()
    if value is None or isinstance(value, str):
        return value
    number = whole_number(value)
    if is_integer(number, -MAX_INT64 - 1, MAX_INT64):
        return number
    if isinstance(value, UUID):
        return str(value)
    raise RowError("invalid_id", f"`{key}` is {show(value)}; allowed: text or an integer of 64 bits{NO_IDS}")


def native_job(
    row: dict[str, Any],
    context: RowContext,
    keys: RowKeys,
    rules: PromptRules,
    columns: Mapping[str, Any],
    kind: PromptKind | None,
    sampling: SamplingParams,
    *,
    task: PromptTask | None,
    becomes_message: bool,
    image: dict[str, Any] | None = None,
) -> Job:
    """Make the job of a row. `columns` are all values of the row as they were read, for the job's template, `kind` is
    that of its prompt, `becomes_message` says whether a text of this kind becomes a conversation, and `image` is the
    part of a row that is an image itself."""
    variables = row.get(keys.chat_template_kwargs)
    prompt = None if keys.prompt is None else row.get(keys.prompt)
    images = [] if image is None else [image]
    if keys.image is not None and (given_images := row.get(keys.image)) is not None:
        images += image_parts(given_images, keys.image)
    if (
        not images
        and isinstance(prompt, str)
        and keys.messages not in row
        and keys.prompt_token_ids not in row
        and variables is None
        and not becomes_message
    ):
        return Job(context=context, prompt=prompt, sampling=sampling, task=task)  # most rows
    unplaced = iter(images)
    if rules.has_template:
        given = _fill_template(columns, keys, rules)
    else:
        given = _given_prompt(row, keys, rules, kind, unplaced)
    if (becomes_message or images) and "prompt" in given:
        given = {"messages": rules.conversation(given["prompt"])}
    if images:
        if "messages" not in given:
            raise RowError("conflicting_prompts", f"`{keys.image}` is given beside token ids; leave one of the two out")
        rest = [*unplaced]
        if 0 < len(rest) < len(images):
            raise RowError(
                "invalid_value",
                f"`{keys.image}` holds {len(images)} images, and the messages have "
                f"{counted(len(images) - len(rest), 'part')} for them; give as many, or none",
            )
        if rest:
            given["messages"] = with_images(given["messages"], rest)
    if "messages" in given:
        given["chat_template_kwargs"] = rules.variables(variables, under=(keys.chat_template_kwargs,))
        given |= conversation_options(row)
    elif variables is not None:
        raise RowError(
            "invalid_value",
            f"`{keys.chat_template_kwargs}` is given, and this prompt is not made by the chat template; leave it "
            f"out, give `{keys.messages}`, or set `job.chat: always` (--chat)",
        )
    return Job(context=context, sampling=sampling, task=task, **given)


def _given_prompt(
    row: dict[str, Any],
    keys: RowKeys,
    rules: PromptRules,
    kind: PromptKind | None,
    images: Iterator[dict[str, Any]],
) -> dict[str, Any]:
    """Return the prompt in a row. Parts of its messages that name no image take the next of `images`. Raises RowError
    and InvalidValue."""
    given = [key for key in keys.prompts if key in row]
    if kind is PromptKind.OTHER_TEXT:
        return {"prompt": row[keys.line]}
    if kind is PromptKind.INSTRUCTION:
        about = row.get(_INPUT)
        return {"prompt": f"{row[_INSTRUCTION]}\n\n{about}" if about else str(row[_INSTRUCTION])}
    if kind is PromptKind.CONVERSATIONS:
        given = [_CONVERSATIONS]
    if not given:
        *others, last = [f"`{key}`" for key in keys.prompts]
        raise RowError("missing_prompt", f"none of {', '.join(others)} and {last} is given; give one")
    if len(given) > 1:
        names = " and ".join(f"`{key}`" for key in given)
        raise RowError("conflicting_prompts", f"{names} are given; give one of them")
    (key,) = given
    if key == keys.prompt:
        if isinstance(row[key], list):
            raise InvalidValue((key,), f"`{key}` is {show(row[key])}; allowed: text{_way_of_list(row[key], keys)}")
        return {"prompt": convert(row[key], str, under=(key,))}
    if key == keys.prompt_token_ids:
        return {"prompt_token_ids": convert(row[key], list[int], under=(key,))}
    return {"messages": rules.with_system(check_messages(row[key], under=(key,), images=images))}


def _way_of_list(values: list[Any], keys: RowKeys) -> str:
    """Return the end of the message about a list in place of a prompt's text."""
    if any(isinstance(value, dict) for value in values):
        way = f"`job.messages_field: {keys.prompt}` (--messages-field {keys.prompt}) reads conversations there"
    elif any(is_integer(value) for value in values):
        way = f"token ids are `{keys.prompt_token_ids}`"
    else:
        way = "give each text a row of its own"
    return f"; {way}" if values else ""


def _fill_template(columns: Mapping[str, Any], keys: RowKeys, rules: PromptRules) -> dict[str, Any]:
    """Return the prompt that the job's template makes from a row. Raises RowError."""
    unused = [key for key in keys.prompts if key not in rules.columns and not is_null(columns.get(key))]
    if unused:
        raise RowError(
            "conflicting_prompts",
            f"`{unused[0]}` is given, and the job's template makes the prompt without it; leave one of the two out, or "
            f"name it in the template: {{{unused[0]}}}",
        )
    filled = rules.fill(columns)
    return {"prompt" if isinstance(filled, str) else "messages": filled}


def known_form(row: Mapping[str, Any]) -> PromptKind | None:
    """Return the kind of prompt in a row without `prompt` and `messages`; None if it has no known one."""
    if _CONVERSATIONS in row and _is_conversation(row[_CONVERSATIONS]):
        return PromptKind.CONVERSATIONS
    # Without its other keys, `instruction` may be one part of a prompt whose other parts nobody knows.
    if _INSTRUCTION in row and (_INPUT in row or _OUTPUT in row):
        texts = [_decoded(row.get(key)) for key in (_INSTRUCTION, _INPUT)]
        if isinstance(texts[0], str) and texts[0] and isinstance(texts[1], str | None):
            return PromptKind.INSTRUCTION
    return None


def _is_conversation(value: Any) -> bool:
    try:
        messages = decode_list(_decoded(value))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return True  # the row's error says what is the matter
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, dict) and ("from" in first or "role" in first)


def _decoded(value: Any) -> Any:
    """Return a value as an object; None for JSON that cannot be decoded."""
    if not isinstance(value, msgspec.Raw):
        return None if is_null(value) else value
    try:
        return decode(value)
    except (msgspec.DecodeError, RecursionError):
        return None
