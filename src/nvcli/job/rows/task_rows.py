"""Makes jobs from rows that are scored, embedded or classified. Raises RowError or InvalidValue that names the key."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from nvcli.core.sampling_params import SamplingParams
from nvcli.core.task_config import Classifier, EmbeddingEncoding, ScoreConfig
from nvcli.core.validation import convert, is_integer, show, whole_number
from nvcli.errors import RowError
from nvcli.job.job import EmbedTask, Job, PromptTask, RowContext, RowForm, ScoreTask
from nvcli.job.rows.openai_row import IGNORED, check_request, job_of, prompts_of
from nvcli.job.rows.openai_structured import unsupported_key, unsupported_value
from nvcli.job.rows.raw_values import as_text, decode, decode_nested, is_null

PROMPT_ONLY = SamplingParams(temperature=0, max_tokens=1)
"""Sampling for rows without an answer: the request ends with one token, which is dropped."""
MAX_CHOICES = 1024
"""Maximum number of choices in a row."""
_EMBEDDINGS_URL = "/v1/embeddings"
_NORMALIZE = ("normalize", "use_activation")
"""vLLM's names, the later one last, for whether an embedding is scaled to length 1."""
_EMBEDDING_KEYS = ("input", "model", "encoding_format", "dimensions", "user", *_NORMALIZE)
_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "endianness": ("native", "little"),
    "embed_dtype": ("float32",),
}
"""Parameters of vLLM that are allowed only with values that change nothing."""


class ScoreRows(msgspec.Struct, frozen=True):
    """Rows with a continuation or choices to score, or a prompt that is scored itself."""

    config: ScoreConfig
    form: ClassVar = RowForm.SCORE
    openai_form: ClassVar = RowForm.COMPLETION

    @property
    def keys(self) -> frozenset[str]:
        """The keys of a row that belong to the task."""
        return frozenset((self.config.continuation_field, self.config.choices_field))

    def task_of(self, own: Mapping[str, Any], row: Mapping[str, Any]) -> PromptTask:
        """Return what a native row asks for. `own` has the decoded values of `keys` that the row has, `row` all values
        as they were read."""
        config = self.config
        key, one, several = config.continuation_field, config.continuation_field, config.choices_field
        if one in own and several in own:
            raise RowError("invalid_value", f"`{one}` and `{several}` are given; give one of them")
        continuations: tuple[str, ...] | None = None
        labels: list[str] = []
        answer = None
        if one in own:
            continuations = (convert(own[one], str, under=(one,)),)
        elif several in own:
            key = several
            listed = _listed(own[several])
            if isinstance(listed, dict) and listed.keys() == {"text", "label"}:
                labels = convert(listed["label"], list[str], under=(several, "label"))
                listed = listed["text"]
            continuations = tuple(convert(listed, list[str], under=(several,)))
            if not 1 <= len(continuations) <= MAX_CHOICES:
                raise RowError(
                    "invalid_value", f"`{key}` holds {len(continuations)} texts; allowed: 1 to {MAX_CHOICES:,}"
                )
        if continuations is not None:
            if "" in continuations:
                raise RowError("invalid_value", f"`{key}` holds an empty text, which has no tokens to score")
            if key == several:
                answer = _answer(row.get(config.answer_field), config.answer_field, continuations, labels)
        return ScoreTask(
            continuations=continuations,
            key=key,
            answer=answer,
            normalize=config.normalize,
            token_logprobs=config.token_logprobs,
        )

    def openai_job(self, row: dict[str, Any], context: RowContext) -> Job:
        """Make the job of a row of an OpenAI batch file."""
        raise RowError(
            "unsupported_url", "rows of OpenAI batch files cannot be scored; give `prompt` and `choices` or the like"
        )


class _EmbeddingRequest(msgspec.Struct, frozen=True):
    """Parameters of a request for an embedding."""

    dimensions: int | None = None
    encoding_format: EmbeddingEncoding | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class EmbedRows(msgspec.Struct, frozen=True):
    """Rows of which a vector is made."""

    task: EmbedTask
    """The default task."""
    form: ClassVar = RowForm.EMBEDDING
    openai_form: ClassVar = RowForm.OPENAI_EMBEDDING
    keys: ClassVar = frozenset[str]()

    def task_of(self, own: Mapping[str, Any], row: Mapping[str, Any]) -> PromptTask:
        """Return the task of a native row."""
        return self.task

    def openai_job(self, row: dict[str, Any], context: RowContext) -> Job:
        """Make the job of a row of an OpenAI batch file."""
        given = check_request(row, (_EMBEDDINGS_URL,))
        for key, value in given.items():
            if key in _HARMLESS_VALUES and value not in _HARMLESS_VALUES[key]:
                raise unsupported_value(key, value)
            if not (key in _EMBEDDING_KEYS or key in IGNORED or key in _HARMLESS_VALUES):
                raise unsupported_key(key, _EMBEDDING_KEYS)
        prompts = prompts_of(given, "input")
        wanted = convert(given, _EmbeddingRequest, under=("body",))
        task = msgspec.structs.replace(
            self.task,
            dimensions=self.task.dimensions if wanted.dimensions is None else wanted.dimensions,
            encoding=wanted.encoding_format or self.task.encoding,
            normalize=next((given[key] for key in _NORMALIZE if key in given), self.task.normalize),
        )
        return job_of(prompts, context=context, task=task, sampling=PROMPT_ONLY)


class ClassifyRows(msgspec.Struct, frozen=True):
    """Rows that are classified."""

    task: Classifier
    form: ClassVar = RowForm.CLASSES
    openai_form: ClassVar = RowForm.COMPLETION
    keys: ClassVar = frozenset[str]()

    def task_of(self, own: Mapping[str, Any], row: Mapping[str, Any]) -> PromptTask:
        """Return the task of a native row."""
        return self.task

    def openai_job(self, row: dict[str, Any], context: RowContext) -> Job:
        """Make the job of a row of an OpenAI batch file."""
        raise RowError(
            "unsupported_url", "rows of OpenAI batch files cannot be classified; give `prompt` or `messages` instead"
        )


TaskRows = ScoreRows | EmbedRows | ClassifyRows
"""The rows of a task, for `RowParser`."""


def _listed(value: Any) -> Any:
    """Return choices, decoded if a cell of a table holds them as JSON text."""
    try:
        return decode_nested(value)
    except msgspec.DecodeError:
        return value


def _answer(value: Any, key: str, choices: tuple[str, ...], labels: Sequence[str]) -> int | None:
    """Return the number of the right choice, which a row names by its label, where choices have these, or by number,
    text, or letter (A is the first).

    None: the row does not say, also by an empty text or -1, as in data sets that keep their answers to themselves.
    Raises RowError for a value that names none of the choices.
    """
    if is_null(value):
        return None
    try:
        found = whole_number(decode(value) if isinstance(value, msgspec.Raw) else value)
    except msgspec.DecodeError:  # a number that we cannot hold
        found = as_text(value)
    number: int | None = None
    if isinstance(found, str | int) and str(found) in labels[: len(choices)]:
        return labels.index(str(found))
    if isinstance(found, str) and found in choices:
        return choices.index(found)
    if isinstance(found, str | int) and found in ("", "-1", -1):
        return None
    if isinstance(found, str) and len(found) == 1 and found in string.ascii_letters:
        number = string.ascii_uppercase.index(found.upper())
    elif isinstance(found, str) and found.isascii() and found.isdigit() and len(found) < 10:
        number = int(found)
    elif is_integer(found):
        number = found
    if number is None or not 0 <= number < len(choices):
        raise RowError(
            "invalid_value",
            f"`{key}` is {show(found)}, which names none of the {len(choices)} choices; allowed: a number from 0 to "
            f"{len(choices) - 1}, a letter from A on, or the text of a choice. If the key holds something else, "
            "`score.answer_field` (--answer-field) names another one",
        )
    return number
