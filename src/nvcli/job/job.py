"""`Job`, one row of the input, and `JobResult`, its answer. Plain values: no file, no token, no engine.

Every row that is not blank becomes exactly one `JobResult`. A row that cannot be answered has an `error` whose `type`
is one of these, or a type that the engine gave:

    invalid_json, not_an_object, invalid_id, duplicate_id,     the line itself
    line_too_long, invalid_utf8, invalid_csv, ragged_row
    missing_prompt, conflicting_prompts, invalid_value,        its keys and values
    missing_column, invalid_sampling, invalid_structured, structured_timeout,
    unsupported_url, unsupported_parameter, unsupported_content, invalid_image,
    image_unavailable
    empty_prompt, prompt_too_long, max_tokens_too_large,       against the model
    token_out_of_vocabulary, special_token, no_chat_template,
    chat_template_error, tokenizer_error
    internal_error                                             an exception that nobody foresaw
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from nvcli.core.sampling_params import SamplingParams
from nvcli.core.task_config import Classifier, EmbeddingEncoding, Normalization, Position
from nvcli.errors import INTERNAL_ERROR, RowError

JobId = str | int

RETRYABLE_ERRORS = frozenset(
    {"kv_cache_too_small", "non_finite_logits", "structured_timeout", "image_unavailable", "aborted", INTERNAL_ERROR}
)
"""Error types that may be gone when the same row is tried again: with more memory, in another batch, on a machine that
is less busy, with a bug fixed. All others come from the row itself, the model or the configuration."""


class RowForm(Enum):
    """The form of a row, which its answer shares."""

    NATIVE = 1
    CHAT = 2
    """A row of an OpenAI batch file for /v1/chat/completions."""
    COMPLETION = 3
    """A row of an OpenAI batch file for /v1/completions."""
    SCORE = 4
    """A row of nvcli's own form that is scored."""
    EMBEDDING = 5
    """A row of nvcli's own form of which a vector is made."""
    OPENAI_EMBEDDING = 6
    """A row of an OpenAI batch file for /v1/embeddings."""
    RESPONSE = 7
    """A row of an OpenAI batch file for /v1/responses."""
    CLASSES = 8
    """A row of nvcli's own form that is classified."""

    @property
    def is_openai(self) -> bool:
        """Whether it is a form of OpenAI's."""
        return self in (RowForm.CHAT, RowForm.COMPLETION, RowForm.OPENAI_EMBEDDING, RowForm.RESPONSE)


class Caller(Protocol):
    """The receiver of some rows' answers, where the rows of a run come from several callers."""

    seed: int | None
    """The seed for these rows in place of the run's; None: the run's."""

    keeps_order: bool
    """Whether answers are delivered in the order of the rows, so that those of later rows wait."""

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for the rows any more, so that they need not be computed."""

    @property
    def streams(self) -> bool:
        """Whether the text of a row's first answer is streamed."""

    def take_text(self, text: str) -> None:
        """Take the next piece of the text of a row's first answer."""

    def take(self, result: JobResult) -> None:
        """Take the result of a row."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a row that has several."""

    number: int
    """From 0."""
    count: int
    """The prompts of the row."""
    whole: RowContext
    """The context of the whole row."""


class RowContext(msgspec.Struct, kw_only=True):
    """A row's id, its place in the input, and what its output row copies. Only the parser changes it."""

    id: JobId
    """The row's own id, or a generated name: `row-7` for the row with index 7."""
    is_named: bool = False
    """Whether the id is a generated name, because the row has none of its own."""
    index: int
    """The number of the row over all inputs, from 0; blank lines are not rows."""
    line: str
    """The place as messages name it: `line 7`, in a table `row 7`, in a JSON array `item 7`; `line 7 of b.jsonl` where
    there are several inputs."""
    extra: dict[str, Any] = {}
    """Keys that are copied, with their values as JSON (`msgspec.Raw`), or as the objects that a Python program gave;
    they go into the output row as they came."""
    form: RowForm = RowForm.NATIVE
    model: str | None = None
    """The model that a row of an OpenAI form names, which its answer repeats."""
    caller: Caller | None = None
    """The receiver of the answer; None where all rows belong to one job."""
    part: Part | None = None
    """The prompt of a row with several that this stands for; None: a whole row."""


Prompt = str | list[int] | list[dict[str, Any]]
"""A prompt as a text, as token ids, or as a conversation."""


class CallRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule for the tool calls in an answer, beside `tools`."""

    is_required: bool = False
    """Whether the answer must be one or more calls; else it may also be text."""
    function: str | None = None
    """The only function that may be called; None: any of the tools."""
    is_single: bool = False
    """Whether there may be at most one call."""


class ScoreTask(msgspec.Struct, frozen=True, kw_only=True):
    """A row that asks how likely texts are."""

    continuations: tuple[str, ...] | None = None
    """The texts that may follow the prompt; None: the prompt itself is scored."""
    key: str = ""
    """The key of the row that holds them."""
    answer: int | None = None
    """Number of the right one; None: not given."""
    normalize: Normalization = "none"
    """Divisor of log-probabilities before they are compared."""
    token_logprobs: bool = False
    """Whether the log-probability of each token is wanted."""


class EmbedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A row that asks for the vector of its prompt."""

    position: Position = "last"
    """The token whose hidden state becomes the vector, or all, for their mean."""
    gets_mean: bool = False
    """Whether ranks give what is made of the mean itself; otherwise they give sums for parts of the prompt."""
    normalize: bool = True
    """Whether the vector is scaled to length 1."""
    prefix: str = ""
    """Text that goes before that of the prompt."""
    dimensions: int | None = None
    """Number of leading values to keep; None: all."""
    encoding: EmbeddingEncoding = "float"


PromptTask = ScoreTask | EmbedTask | Classifier


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is well formed: exactly one of prompt, messages, prompt_token_ids and prompts is set."""

    context: RowContext
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, beside the messages."""
    template_arguments: dict[str, Any] | None = None
    """Arguments of the chat template that the row gives under keys of their own, such as `tools`. They go over the
    variables; None: none."""
    tools: Sequence[dict[str, Any]] = ()
    """The tools that the answer may call; empty: tool calls are not looked for."""
    call_rule: CallRule | None = None
    """The rule that constrains tool calls while the answer is generated; None: none."""
    prompt_token_ids: list[int] | None = None
    prompts: Sequence[Prompt] = ()
    """Several prompts in any of these forms, each computed as a job of its own (`job.run.several_prompts`)."""
    sampling: SamplingParams
    adapter: int = 0
    """The number of its LoRA adapter among those of the run, from 1; 0: it has none of its own."""
    task: PromptTask | None = None
    """The task that the row asks for instead of a generated answer; None: an answer."""

    @property
    def says_what_follows(self) -> bool:
        """Whether it says how its conversation goes on (`continue_final_message`, `add_generation_prompt`)."""
        given = self.template_arguments or {}
        return "continue_final_message" in given or "add_generation_prompt" in given

    @property
    def wants_grammar(self) -> bool:
        """Whether its answer is constrained by a grammar."""
        return self.sampling.structured is not None or self.call_rule is not None


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the field of a Job that holds a prompt, by name."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    is_conversation = bool(prompt) and isinstance(prompt[0], dict)
    return {"messages" if is_conversation else "prompt_token_ids": prompt}


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of the tokens of an answer, of a prompt or of both, as OpenAI's completions API spells them.

    Those of a prompt's first token, before which there is nothing, are None.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The log-probabilities of each token's alternatives, by their text."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function that an answer calls."""

    name: str
    arguments: str
    """Arguments as JSON text."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an answer, in OpenAI's form."""

    id: str
    type: str = "function"
    function: FunctionCall


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a row; a row with `n` samples has `n`."""

    index: int
    text: str
    """The answer, without its thought and tool calls where these are separated."""
    finish_reason: str
    """stop: the model ended it or a stop string or stop token was met; length: `max_tokens` were generated;
    repetition: it had become a loop; tool_calls: it calls tools, and stopped."""
    reasoning_content: str | None = None
    """The thought before the answer; None: there is none, or it is part of the text."""
    tool_calls: list[ToolCall] | None = None
    """The tools that the answer calls; None: none."""
    tool_call_error: str | None = None
    """Why a text that looks like a tool call was not read as one; None: there is no such text."""
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    score: float | None = None
    """The score by which `best_of` orders answers: the mean or the sum of the log-probabilities of its tokens."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        total = 200 + 2 * (len(self.text) + len(self.reasoning_content or "")) + 40 * len(self.token_ids or ())
        return total if self.logprobs is None else total + _num_top_bytes(self.logprobs.top_logprobs)


class ScoredChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text that was scored."""

    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    """The text of a continuation. A prompt that is scored itself is not repeated."""
    logprob: float
    """The log-probability of the whole text: the sum over its tokens, natural logarithm."""
    num_tokens: int
    num_bytes: int | None
    """The bytes of the text as UTF-8; None for a prompt of token ids."""
    score: float | None
    """The normalised log-probability, by which choices are compared; None where it cannot be normalised."""
    perplexity: float
    """exp(-logprob / num_tokens)"""
    is_greedy: bool
    """Whether greedy decoding would give these tokens."""
    tokens: list[str] | msgspec.UnsetType = msgspec.UNSET
    token_logprobs: list[float] | msgspec.UnsetType = msgspec.UNSET


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of a row."""

    choices: list[ScoredChoice]
    best: int
    """Number of the choice with the highest score; the first of equal ones."""
    correct: bool | None = None
    """Whether `best` is the right choice; None: the row does not name the right one."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return sum(500 + 100 * len(choice.tokens or ()) for choice in self.choices)


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a row: float32 numbers, or base64 of them."""

    embedding: list[float] | str

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return 500 + (32 if isinstance(self.embedding, list) else 1) * len(self.embedding)


class EmbedAnswers(msgspec.Struct, frozen=True):
    """The vectors of a row with several prompts, in their order."""

    vectors: list[EmbedAnswer]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return sum(vector.num_bytes for vector in self.vectors)


class FoundClass(msgspec.Struct, frozen=True, kw_only=True):
    """One of a model's classes, and what the model gives a row for it."""

    label: str
    logit: float
    """The number that the head gives."""
    probability: float | None
    """None: the model's numbers are no probabilities."""


class ClassifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The classes of a row, in the order of the model's head."""

    label: str
    """The class with the highest logit; the first of equal ones."""
    score: float
    """Its probability; its logit if there is none, or no other class."""
    classes: list[FoundClass]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory."""
        return 500 + 150 * len(self.classes)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a row; completion tokens are those of all its answers together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were served from the prefix cache."""
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Completion tokens of thoughts; unset: thoughts are not separated."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Why a row has no answer."""

    type: str
    message: str


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one row, or its error."""

    context: RowContext
    choices: list[Choice] = []
    usage: Usage = Usage()
    error: ErrorInfo | None = None
    answer: ScoreAnswer | EmbedAnswer | EmbedAnswers | ClassifyAnswer | None = None
    """The answer of a row that is scored, embedded or classified; it has no `choices` then."""
    prompt_logprobs: Logprobs | None = None
    """The log-probabilities of the prompt's tokens, where the row asks for them."""
    traceback: str = ""
    """Traceback of an `internal_error`, which goes to a file and not into the output; empty otherwise."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory, without the values that the row passes through."""
        total = 500 + sum(choice.num_bytes for choice in self.choices)
        if self.answer is not None:
            total += self.answer.num_bytes
        return total if self.prompt_logprobs is None else total + _num_top_bytes(self.prompt_logprobs.top_logprobs)


def _num_top_bytes(top_logprobs: Sequence[Mapping[str, float] | None]) -> int:
    return sum(200 + 150 * len(top or ()) for top in top_logprobs)


def failed(context: RowContext, error: RowError) -> JobResult:
    """Return the result of a row that cannot be answered; its message names the row's place."""
    info = ErrorInfo(type=error.type, message=f"{context.line}: {error.message}")
    return JobResult(context=context, error=info, traceback=error.traceback)
