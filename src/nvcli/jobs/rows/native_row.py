"""Makes a `Job` of a row in nvcli's own form. Raises RowError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.errors import RowError
from nvcli.job_config import MESSAGES_KEY, PROMPT_KEY
from nvcli.jobs.job import Job, JobId, RowContext
from nvcli.jobs.rows.conversation import check_messages
from nvcli.jobs.rows.conversation_options import conversation_options
from nvcli.jobs.rows.known_forms import CONVERSATIONS, instruction_prompt
from nvcli.jobs.rows.prompt_forms import PromptKind
from nvcli.jobs.rows.prompt_rules import PromptRules
from nvcli.jobs.rows.raw_values import is_null
from nvcli.sampling_params import MAX_INT, SamplingParams
from nvcli.validation import InvalidValue, convert, show


class RowKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys under which a row says something to nvcli; every other key is passed through."""

    prompt: str = PROMPT_KEY
    messages: str = MESSAGES_KEY
    prompt_token_ids: str = "prompt_token_ids"
    id: str = "id"
    sampling: str = "sampling"
    chat_template_kwargs: str = "chat_template_kwargs"
    deciding: str | None = None
    """The key that has the prompt of rows with several of `prompts`; None: such rows are errors."""

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.prompt, self.messages, self.prompt_token_ids

    @property
    def are_defaults(self) -> bool:
        """Whether prompts have the keys that they have where a job names no other."""
        return (self.prompt, self.messages) == (PROMPT_KEY, MESSAGES_KEY)

    @property
    def names_prompt(self) -> bool:
        """Whether the job names the key of prompts."""
        return self.prompt != PROMPT_KEY

    @property
    def beside_prompt(self) -> frozenset[str]:
        return frozenset((self.id, self.sampling, self.chat_template_kwargs))


class RowDefaults:
    """The defaults of `sampling`, over which a row's own keys go."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        """Raises InvalidValue for defaults that are not valid as SamplingParams."""
        self._values = dict(defaults)
        self._sampling = convert(self._values, SamplingParams)

    def sampling(self, own: Mapping[str, Any], *, under: str) -> SamplingParams:
        """Return the sampling of a row. `under` is where its keys stand in the row. Raises RowError."""
        if not own:
            return self._sampling
        try:
            return convert({**self._values, **own}, SamplingParams, under=(under,))
        except InvalidValue as error:
            raise RowError("invalid_sampling", error.message) from None


def native_id(row: dict[str, Any], keys: RowKeys) -> JobId | None:
    """Return the id that a row brings; None if it brings none."""
    value = row.get(keys.id)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and -MAX_INT - 1 <= value <= MAX_INT:
        return value
    raise RowError("invalid_id", f"`{keys.id}` is {show(value)}; allowed: text or an integer of 64 bits")


def native_job(
    row: dict[str, Any],
    place: RowContext,
    keys: RowKeys,
    defaults: RowDefaults,
    rules: PromptRules,
    columns: Mapping[str, Any],
    kind: PromptKind | None,
    *,
    becomes_message: bool,
) -> Job:
    """Make the job of a row. `columns` are all values of the row as they were read, for the job's template, `kind` is
    that of its prompt, and `becomes_message` says whether a text of this kind becomes a conversation."""
    own = row.get(keys.sampling, {})
    if not isinstance(own, dict):
        raise RowError("invalid_sampling", f"`{keys.sampling}` is {show(own)}; expected an object with keys")
    sampling = defaults.sampling(own, under=keys.sampling)
    variables = row.get(keys.chat_template_kwargs)
    prompt = row.get(keys.prompt)
    if (
        isinstance(prompt, str)
        and keys.messages not in row
        and keys.prompt_token_ids not in row
        and variables is None
        and not becomes_message
    ):
        return Job(place=place, prompt=prompt, sampling=sampling)  # most rows
    try:
        given = _templated(columns, keys, rules) if rules.has_template else _given_prompt(row, keys, rules, kind)
        if given.text is not None and becomes_message:
            given = _Prompt(messages=rules.conversation(given.text))
        if given.messages is None and variables is not None:
            raise RowError(
                "invalid_value",
                f"`{keys.chat_template_kwargs}` is given, and this prompt is not made by the chat template; leave it "
                f"out, or give `{keys.messages}` or --chat",
            )
        if given.messages is None:
            return Job(place=place, prompt=given.text, prompt_token_ids=given.token_ids, sampling=sampling)
        options = conversation_options(row)
        return Job(
            place=place,
            messages=given.messages,
            chat_template_kwargs=rules.variables(variables, under=(keys.chat_template_kwargs,)),
            template_arguments=options.arguments,
            tools=options.tools,
            call_rule=options.call_rule,
            sampling=sampling,
        )
    except InvalidValue as error:
        raise RowError("invalid_value", error.message) from None


class _Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in one of its three forms."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None


def _given_prompt(row: dict[str, Any], keys: RowKeys, rules: PromptRules, kind: PromptKind | None) -> _Prompt:
    """Return the prompt that a row holds. Raises RowError and InvalidValue."""
    given = [key for key in keys.prompts if key in row]
    if kind is PromptKind.INSTRUCTION:
        return _Prompt(text=instruction_prompt(row))
    if kind is PromptKind.CONVERSATIONS:
        return _Prompt(messages=rules.with_system(check_messages(row[CONVERSATIONS], under=(CONVERSATIONS,))))
    if not given:
        names = "`{}`, `{}` and `{}`".format(*keys.prompts)
        raise RowError("missing_prompt", f"none of {names} is given; give one")
    if len(given) > 1:
        names = " and ".join(f"`{key}`" for key in given)
        raise RowError("conflicting_prompts", f"{names} are given; give one of them")
    (key,) = given
    if key == keys.prompt:
        return _Prompt(text=convert(row[key], str, under=(key,)))
    if key == keys.messages:
        return _Prompt(messages=rules.with_system(check_messages(row[key], under=(key,))))
    return _Prompt(token_ids=convert(row[key], list[int], under=(key,)))


def _templated(columns: Mapping[str, Any], keys: RowKeys, rules: PromptRules) -> _Prompt:
    """Return the prompt that the job's template makes of a row. Raises RowError."""
    unused = [key for key in keys.prompts if key not in rules.columns and not is_null(columns.get(key))]
    if unused:
        raise RowError(
            "conflicting_prompts",
            f"`{unused[0]}` is given, and the job's template makes the prompt without it; leave one of the two out, or "
            f"name it in the template: {{{unused[0]}}}",
        )
    filled = rules.fill(columns)
    return _Prompt(text=filled) if isinstance(filled, str) else _Prompt(messages=filled)
