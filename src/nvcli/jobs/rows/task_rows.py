"""Makes jobs of rows that are scored or embedded. Raises RowError that names the key."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from nvcli.errors import RowError
from nvcli.jobs.job import Job, RowContext, RowForm
from nvcli.jobs.rows.nesting import decode_inner
from nvcli.jobs.rows.openai_row import check_request, job_of, prompts_of
from nvcli.jobs.rows.raw_values import as_text, decode, is_null
from nvcli.jobs.tasks import EmbedTask, ScoreTask
from nvcli.sampling_params import SamplingParams
from nvcli.task_config import EmbeddingEncoding, ScoreConfig
from nvcli.validation import InvalidValue, convert, shorten, show, suggest

PROMPT_ONLY = SamplingParams(temperature=0, max_tokens=1)
"""The sampling of a row that asks for no answer: one token ends the request, and is dropped."""
MAX_CHOICES = 1024
"""The most choices of a row."""
_EMBEDDINGS_URL = "/v1/embeddings"
_EMBEDDING_KEYS = ("input", "model", "encoding_format", "dimensions", "user")


class TaskRows(Protocol):
    """What the rows of a task are like, for `RowParser`."""

    @property
    def form(self) -> RowForm:
        """The form of rows and answers."""

    @property
    def openai_form(self) -> RowForm:
        """The form of rows of OpenAI batch files."""

    @property
    def keys(self) -> frozenset[str]:
        """The keys of a row that say something of the task."""

    def job(self, prompt: Job, own: Mapping[str, Any], row: Mapping[str, Any]) -> Job:
        """Make the job of a native row of its prompt. `own` has the decoded values of `keys` that the row has, `row`
        all values as they were read. Raises RowError."""

    def openai_job(self, row: dict[str, Any], place: RowContext) -> Job:
        """Make the job of a row of an OpenAI batch file. Raises RowError."""


class ScoreRows(msgspec.Struct, frozen=True):
    """Rows whose prompt is followed by a continuation or by choices, or is scored itself."""

    config: ScoreConfig

    @property
    def form(self) -> RowForm:
        return RowForm.SCORE

    @property
    def openai_form(self) -> RowForm:
        return RowForm.COMPLETION

    @property
    def keys(self) -> frozenset[str]:
        return frozenset((self.config.continuation_field, self.config.choices_field))

    def job(self, prompt: Job, own: Mapping[str, Any], row: Mapping[str, Any]) -> Job:
        config = self.config
        key, one, several = config.continuation_field, config.continuation_field, config.choices_field
        if one in own and several in own:
            raise RowError("invalid_value", f"`{one}` and `{several}` are given; give one of them")
        continuations: tuple[str, ...] | None = None
        try:
            if one in own:
                continuations = (convert(own[one], str, under=(one,)),)
            elif several in own:
                key = several
                continuations = tuple(convert(_listed(own[several]), list[str], under=(several,)))
                if not 1 <= len(continuations) <= MAX_CHOICES:
                    raise RowError(
                        "invalid_value", f"`{key}` holds {len(continuations)} texts; allowed: 1 to {MAX_CHOICES:,}"
                    )
        except InvalidValue as error:
            raise RowError("invalid_value", error.message) from None
        if continuations is not None and "" in continuations:
            raise RowError("invalid_value", f"`{key}` holds an empty text, which has no tokens to score")
        task = ScoreTask(
            continuations=continuations,
            key=key,
            answer=_answer(row.get(config.answer_field), config.answer_field, continuations)
            if key == several
            else None,
            normalize=config.normalize,
            token_logprobs=config.token_logprobs,
        )
        return msgspec.structs.replace(prompt, task=task, sampling=PROMPT_ONLY)

    def openai_job(self, row: dict[str, Any], place: RowContext) -> Job:
        raise RowError(
            "unsupported_url", "rows of OpenAI batch files cannot be scored; give `prompt` and `choices` or the like"
        )


class _EmbeddingRequest(msgspec.Struct, frozen=True):
    """Parameters of a request for an embedding."""

    dimensions: int | None = None
    encoding_format: EmbeddingEncoding | None = None


class EmbedRows(msgspec.Struct, frozen=True):
    """Rows of which a vector is made."""

    task: EmbedTask
    """What a row asks for that says nothing itself."""

    @property
    def form(self) -> RowForm:
        return RowForm.EMBEDDING

    @property
    def openai_form(self) -> RowForm:
        return RowForm.OPENAI_EMBEDDING

    @property
    def keys(self) -> frozenset[str]:
        return frozenset()

    def job(self, prompt: Job, own: Mapping[str, Any], row: Mapping[str, Any]) -> Job:
        return msgspec.structs.replace(prompt, task=self.task, sampling=PROMPT_ONLY)

    def openai_job(self, row: dict[str, Any], place: RowContext) -> Job:
        given = check_request(row, (_EMBEDDINGS_URL,))
        if unknown := [key for key in given if key not in _EMBEDDING_KEYS]:
            name = unknown[0]
            raise RowError(
                "unsupported_parameter", f"`body.{shorten(name)}` is not supported; {suggest(name, _EMBEDDING_KEYS)}"
            )
        try:
            prompts = prompts_of(given, "input")
            wanted = convert(given, _EmbeddingRequest, under=("body",))
        except InvalidValue as error:
            raise RowError("invalid_value", error.message) from None
        task = msgspec.structs.replace(
            self.task,
            dimensions=self.task.dimensions if wanted.dimensions is None else wanted.dimensions,
            encoding=wanted.encoding_format or self.task.encoding,
        )
        return job_of(prompts, place=place, task=task, sampling=PROMPT_ONLY)


def _listed(value: Any) -> Any:
    """Return choices that a cell of a table holds as the text of a JSON list; other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return decode_inner(value)
    except msgspec.DecodeError:
        return value


def _answer(value: Any, key: str, choices: tuple[str, ...] | None) -> int | None:
    """Return the number of the right choice: it is named by its number, by its text, or by a letter from A on.

    None: the row does not say. Raises RowError for a value that names none of the choices.
    """
    if choices is None or value is None or is_null(value):
        return None
    try:
        found = decode(value) if isinstance(value, msgspec.Raw) else value
    except msgspec.DecodeError:  # a number that we cannot hold
        found = as_text(value)
    number: int | None = None
    if isinstance(found, str) and found in choices:
        return choices.index(found)
    if isinstance(found, str) and len(found) == 1 and found in string.ascii_uppercase:
        number = string.ascii_uppercase.index(found)
    elif isinstance(found, str) and found.isascii() and found.isdigit() and len(found) < 10:
        number = int(found)
    elif isinstance(found, int) and not isinstance(found, bool):
        number = found
    if number is None or not 0 <= number < len(choices):
        raise RowError(
            "invalid_value",
            f"`{key}` is {show(found)}, which names none of the {len(choices)} choices; allowed: a number from 0 to "
            f"{len(choices) - 1}, a letter from A on, or the text of a choice. If the key holds something else, "
            "--answer-field names another one",
        )
    return number
