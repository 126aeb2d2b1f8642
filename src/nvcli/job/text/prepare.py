"""Prepares jobs for a replica: token ids that fit the model, and the maximum length of the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from nvcli.core.chat_template import unknown_variables
from nvcli.core.messages import pack, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint
from nvcli.core.task_config import Classifier
from nvcli.engine.request import ThoughtLimit
from nvcli.errors import RowError, unexpected
from nvcli.job.images.image_parts import images_of_row, without_images
from nvcli.job.images.pixel_memory import Pixels
from nvcli.job.images.row_images import PromptImages, RowImages
from nvcli.job.job import EmbedTask, Job, JobResult, PromptTask, RowContext, RowForm, ScoreTask, failed
from nvcli.job.rows.conversation import ARGUMENTS, CONTINUE_FINAL_MESSAGE, TOOLS
from nvcli.job.text.answer_reader import AnswerFormat, AnswerReader
from nvcli.job.text.call_grammars import call_grammar
from nvcli.job.text.chat_renderer import Conversation
from nvcli.job.text.grammar_maker import Grammar, GrammarMaker
from nvcli.job.text.model_limits import ModelLimits, check_vocabulary, encode_long, end_ids, fit_prompt, is_long
from nvcli.job.text.prompt_tasks import (
    Continuations,
    PreparedTask,
    RowPrompt,
    ScoredText,
    check_dimensions,
    fit_whole,
    scored_continuations,
    scored_prompt,
    without_padding,
)
from nvcli.job.text.reasoning import unknown_marks
from nvcli.job.text.sampling_rules import SamplingRules, TokenRules, constraint_of, sampling_rules, structured_name
from nvcli.job.text.special_tokens import special_token_rule
from nvcli.job.text.tokenizer import Tokenizer

_ROW_BYTES = 1000
"""Approximate overhead of a prepared row, besides its prompt and passed-through values."""
_PIXELS_PER_BYTE = 8
"""Bytes of pixels that count as one where rows that wait or run are limited: an engine must get as many rows as it can
run, and 512 images of 1,024 x 768 take 1.2 GB."""
_CALLS_NAME = f"a rule for the calls of `{TOOLS}`"
"""Name of the constraint of tool calls in messages."""

Render = Callable[[Sequence[Conversation]], list[str | RowError]]


class PreparedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row ready for the engine, with at least one prompt token and room for `max_tokens` more."""

    context: RowContext
    prompt_ids: bytes
    """The prompt's token ids, packed by `messages.pack`."""
    num_prompt_tokens: int
    max_tokens: int
    stop_ids: list[int]
    sampling: SamplingParams
    constraint: Constraint | None = None
    """The grammar of the sampling's `structured`, or of tool calls; None: the answer may be anything."""
    rules: TokenRules | None = None
    """Biases and bad words of `sampling`, by token ids."""
    echo: str = ""
    """Text to put before the answer."""
    reading: AnswerFormat | None = None
    """How to parse answers; None: they are plain texts."""
    thought_limit: ThoughtLimit | None = None
    """The limit of the answer's thought; None: there is none."""
    answer_key: bytes | None = None
    """A key that is equal for rows whose answers are equal.

    Such rows are greedy or have a seed of their own, and have the same token ids and sampling. None where the answer
    also depends on the row's place in the file, and where its text is wanted as it comes, which a known answer is not.
    """
    adapter: int = 0
    """See `Job.adapter`."""
    num_bytes: int = 0
    """Approximate bytes in memory while the row waits; of pixels, which lie in memory of their own, a part."""
    images: PromptImages | None = None
    """The images of the prompt; None: it has none."""
    task: PreparedTask | None = None
    """The task computed instead of an answer; `sampling.n` is then the number of its requests."""

    @property
    def model_ids(self) -> Sequence[int]:
        """The prompt's token ids as the model knows them."""
        ids = unpack(self.prompt_ids)
        if self.images is None:
            return ids
        return [self.images.token_id if token < 0 else token for token in ids]


class Preparer:
    """Tokenizes rows for one model. Used by one thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        render: Render,
        grammars: GrammarMaker | None = None,
        images: RowImages | None = None,
    ) -> None:
        """`render` turns conversations into prompt texts, or into errors (`ChatRenderer.render`). Without `grammars`,
        rows that ask for structured answers are refused, and without `images`, rows with images."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._render = render
        self._grammars = grammars
        self._images = images
        self._rule = special_token_rule(limits.special_tokens, tokenizer)
        self._eos_ids = end_ids(tokenizer, limits)
        self._wholes = Continuations(self._rule, tokenizer, self._eos_ids)
        self._ids_fit = tokenizer.vocab_size is not None and tokenizer.vocab_size <= limits.vocab_size
        """Whether every id of the tokenizer is one of the model's."""
        self._kept: SamplingRules | None = None
        """The rules of the last row's sampling, because most rows have the same."""
        self._counted_grammar: Grammar | None = None
        """The last grammar whose memory was counted, once, with the row that brought it."""
        self._reader = AnswerReader(tokenizer, reasoning_parser=limits.reasoning_parser, tool_parser=limits.tool_parser)

    def prepare(self, rows: Sequence[Job | JobResult]) -> list[PreparedRow | JobResult]:
        """Return an entry for each row, in order. Results of rows that already failed are passed on.

        Raises LoadError and WorkerError where no process can be started for chat templates or grammars.
        """
        try:
            return self._prepare(rows)
        except BaseException as error:
            fault = unexpected(error, "preparing the prompt")
        if len(rows) > 1:  # one of them is at fault
            return [prepared for row in rows for prepared in self.prepare([row])]
        return [failed(row.context, fault) if isinstance(row, Job) else row for row in rows]

    def _prepare(self, rows: Sequence[Job | JobResult]) -> list[PreparedRow | JobResult]:
        prompts = [self._begin(row) for row in rows if isinstance(row, Job)]
        self._render_chats([prompt for prompt in prompts if prompt.is_rendered and prompt.error is None])
        self._wholes.encode(prompts)
        for is_rendered in (False, True):
            self._encode(prompts, is_rendered=is_rendered)
        prepared = map(self._prepare_row, prompts)
        return [next(prepared) if isinstance(row, Job) else row for row in rows]

    def _begin(self, job: Job) -> RowPrompt:
        """Return the prompt of a row as it is given, or an error if it is not allowed."""
        text = job.prompt or ""
        if job.prompt is not None and isinstance(job.task, EmbedTask):
            text = job.task.prefix + text
        prompt = RowPrompt(job, job.messages is not None, text, job.prompt_token_ids)
        if job.prompt is not None:
            prompt.error = self._rule.check(job.prompt, "prompt")
        elif job.messages is not None:
            prompt.error = self._check_conversation(job, job.messages)
        return prompt

    def _render_chats(self, prompts: Sequence[RowPrompt]) -> None:
        """Read the images of conversations, and write their texts."""
        self._read_images(prompts)
        prompts = [prompt for prompt in prompts if prompt.error is None]
        texts = self._render([self._conversation(prompt.job) for prompt in prompts])
        for prompt, text in zip(prompts, texts, strict=True):
            if self._images is not None and prompt.pixels and isinstance(text, str):
                text = self._images.write(text, prompt.pixels)
            if isinstance(text, RowError):
                prompt.error = text
            else:
                prompt.text = text

    def _read_images(self, prompts: Sequence[RowPrompt]) -> None:
        having = [(prompt, images) for prompt in prompts if (images := images_of_row(prompt.job))]
        if self._images is None:
            for prompt, _ in having:
                prompt.error = RowError("unsupported_content", f"the row has images, and {self._limits.why_no_images}")
        elif having:
            for (prompt, _), found in zip(having, self._images.read([images for _, images in having]), strict=True):
                if isinstance(found, RowError):
                    prompt.error = found
                else:
                    prompt.pixels = found

    def _encode(self, prompts: Sequence[RowPrompt], *, is_rendered: bool) -> None:
        """Tokenize texts: those of conversations, or those of the others."""
        whole = []
        for prompt in prompts:
            if prompt.error is None and prompt.ids is None and prompt.is_rendered == is_rendered:
                if self._is_cut(prompt):
                    prompt.take_ids(self._encode_long(prompt))
                else:
                    whole.append(prompt)
        encoded = self._rule.encode([prompt.text for prompt in whole], is_rendered=is_rendered) if whole else ()
        for prompt, ids in zip(whole, encoded, strict=True):
            prompt.take_ids(ids)

    def _prepare_row(self, prompt: RowPrompt) -> PreparedRow | JobResult:
        job = prompt.job
        if prompt.error is not None:  # not raised: its traceback would hold the row, and the row's frame it
            return failed(job.context, prompt.error)
        assert prompt.ids is not None
        try:
            if job.task is None:
                return self._prepare_answer(job, prompt.ids, prompt.pixels)
            return self._prepare_task(job, job.task, prompt.ids, prompt.wholes, prompt.pixels)
        except RowError as error:
            return failed(job.context, error)

    def _prepare_task(
        self, job: Job, task: PromptTask, prompt: list[int], wholes: list[list[int]], pixels: Sequence[Pixels]
    ) -> PreparedRow:
        """Prepare a row that is scored, embedded or classified. Raises RowError."""
        limits = self._limits
        self._check_prompt(job, prompt, "`prompt_token_ids`")
        if isinstance(task, Classifier):
            prompt = without_padding(prompt, task.pad_id)
        texts: tuple[ScoredText, ...] = ()
        images = None
        if self._images is not None and pixels:
            prompt, images = self._images.expand(prompt, pixels)
            wholes = [self._images.expand(ids, pixels)[0] for ids in wholes]
        num_tokens = len(prompt)
        if isinstance(task, ScoreTask) and task.continuations is not None:
            prompt, texts = scored_continuations(
                task,
                prompt,
                wholes,
                lead=self._wholes.lead,
                num_after=self._wholes.around[1] if job.prompt is not None else 0,
                max_model_len=limits.max_model_len,
                on_too_long=limits.on_too_long,
            )
        if not prompt:
            raise RowError("empty_prompt", "the prompt has no tokens, and the model no token to begin with")
        if isinstance(task, EmbedTask):
            check_dimensions(task, limits.embedding_size)
        elif isinstance(task, ScoreTask) and not texts and images is not None:
            raise RowError(
                "unsupported_content", "the row has images, whose tokens have no probabilities; give a continuation"
            )
        if not texts:
            fitting = fit_whole(
                prompt, max_model_len=limits.max_model_len, on_too_long=limits.on_too_long, around=self._around(job)
            )
            text, prompt = job.prompt if fitting is prompt else None, fitting
            if isinstance(task, ScoreTask):
                prompt, texts = scored_prompt(prompt, text)
        prompt_ids, prepared = _packed(prompt, images, num_tokens), PreparedTask(task=task, texts=texts)
        return PreparedRow(
            context=job.context,
            prompt_ids=prompt_ids,
            num_prompt_tokens=len(prompt) + prepared.num_tokens,
            max_tokens=1,
            stop_ids=[],
            sampling=msgspec.structs.replace(job.sampling, n=max(1, len(texts))),
            answer_key=prepared.answer_key(prompt_ids, job.adapter),
            adapter=job.adapter,
            num_bytes=_num_bytes(job, prompt_ids, images) + 8 * prepared.num_tokens,
            images=images,
            task=prepared,
        )

    def _around(self, job: Job) -> tuple[int, int]:
        """Return how many special tokens the tokenizer puts before and after the text of a row that may be cut."""
        may_be_cut = self._limits.on_too_long != "error" or job.sampling.truncate_prompt_tokens is not None
        return self._wholes.around if may_be_cut and job.prompt is not None else (0, 0)

    def _check_conversation(self, job: Job, messages: list[dict[str, Any]]) -> RowError | None:
        """Return an error if the input of the chat template is not allowed."""
        rule, variables = self._rule, job.chat_template_kwargs
        refusal = rule.check(messages, "messages")
        if refusal is None and variables:
            refusal = rule.check(variables, "chat_template_kwargs")
        if refusal is None and job.template_arguments:
            refusal = self._check_arguments(job, job.template_arguments)
        return refusal

    def _conversation(self, job: Job) -> Conversation:
        """Return the input of the chat template for a row. Where it is classified, no answer begins."""
        variables = {**job.chat_template_kwargs, **(job.template_arguments or {})}
        if isinstance(job.task, Classifier):
            variables = {"add_generation_prompt": False, **variables}
        return Conversation(
            self._rule.to_template(without_images(job.messages or ())), self._rule.to_template(variables)
        )

    def _check_arguments(self, job: Job, arguments: Mapping[str, Any]) -> RowError | None:
        """Return an error if a row's template arguments would have no effect or are not allowed."""
        unknown = self._unknown_arguments.intersection(arguments)
        under = "" if job.context.form is RowForm.NATIVE else "body."
        if unknown:
            return RowError(
                "unsupported_parameter",
                f"`{under}{min(unknown)}` would have no effect: the model's chat template does not know it; leave it "
                "out, or name one that does as `job.chat_template` (--chat-template)",
            )
        refusals = (self._rule.check(value, under + name) for name, value in arguments.items())
        return next((refusal for refusal in refusals if refusal is not None), None)

    @functools.cached_property
    def _unknown_arguments(self) -> frozenset[str]:
        """Template arguments that the chat template does not know."""
        template = self._tokenizer.chat_template
        return frozenset(unknown_variables(template, ARGUMENTS) if template else ())

    def _prepare_answer(self, job: Job, prompt: list[int], pixels: Sequence[Pixels]) -> PreparedRow:
        """Prepare a row that asks for answers. Raises RowError."""
        is_native = job.context.form is RowForm.NATIVE
        under = "sampling" if is_native else "body"
        if not prompt:
            raise RowError("empty_prompt", "the prompt has no tokens")
        self._check_prompt(job, prompt, "`prompt_token_ids`" if is_native else "`body.prompt`")
        sampling = job.sampling
        rules = self._rules_of(sampling, under)
        images = None
        if self._images is not None and pixels:
            if sampling.prompt_logprobs is not None:
                raise RowError(
                    "unsupported_parameter",
                    f"`{under}.prompt_logprobs` is given beside images; leave one of the two out",
                )
            prompt, images = self._images.expand(prompt, pixels)
        ids, max_tokens = fit_prompt(prompt, sampling, self._limits, under, self._around(job))
        prompt_ids = _packed(ids, images, len(prompt))
        echo = self._echo(job, ids, is_whole=len(ids) == len(prompt)) if sampling.echo else ""
        reading = None
        if job.messages is not None:
            reading = self._reader.reading(ids, job.tools, _last_message(job))
        constraint, called = rules.constraint, None
        must_call = job.call_rule is not None and job.call_rule.is_required
        if job.call_rule is not None:
            called = call_grammar(job, job.call_rule, self._tokenizer, self._reader.call_format, self._grammars)
            if called is not None:
                constraint = constraint_of(called, self._eos_ids, _CALLS_NAME)
        if constraint is not None and reading is not None:
            constraint = self._after_thought(constraint, reading, sampling, under, must_call=must_call)
        thought_limit = None
        if sampling.thinking_budget is not None:
            thought_limit = self._thought_limit(job, ids, sampling.thinking_budget, under, must_call=must_call)
        answer_key = None
        if rules.answers_follow_from is not None:
            read_as = echo.encode() + (reading.digest if reading else b"") + (called.text.encode() if called else b"")
            answer_key = _answer_key(job, rules.answers_follow_from, max_tokens, prompt_ids, read_as)
        num_bytes = _num_bytes(job, prompt_ids, images) + self._bytes_once(called)
        if rules.grammar is not None and rules.grammar.wanted is not sampling.structured:
            sampling = msgspec.structs.replace(sampling, structured=rules.grammar.wanted)  # an earlier row's equal one
        else:
            num_bytes += self._bytes_once(rules.grammar)
        return PreparedRow(
            context=job.context,
            prompt_ids=prompt_ids,
            num_prompt_tokens=len(ids),
            max_tokens=max_tokens,
            stop_ids=rules.stop_ids,
            sampling=sampling,
            constraint=constraint,
            rules=rules.rules,
            echo=echo,
            reading=reading,
            thought_limit=thought_limit,
            answer_key=answer_key,
            adapter=job.adapter,
            num_bytes=num_bytes,
            images=images,
        )

    def _bytes_once(self, grammar: Grammar | None) -> int:
        """Return the bytes of a grammar, or 0 if an earlier row has brought it."""
        if grammar is None or grammar is self._counted_grammar:
            return 0
        self._counted_grammar = grammar
        return grammar.num_bytes

    def _check_prompt(self, job: Job, ids: list[int], name: str) -> None:
        """Raise RowError if a token of a prompt is not one of the model. `name` is the key of its ids in the row."""
        if job.prompt_token_ids is not None or not self._ids_fit:
            check_vocabulary(name if job.prompt_token_ids is not None else "the tokenized prompt", ids, self._limits)

    def _rules_of(self, sampling: SamplingParams, under: str) -> SamplingRules:
        """Return the rules of a row's sampling, whose keys are `under` this key in the row. Raises RowError."""
        if self._kept is None or self._kept.sampling is not sampling:
            self._kept = sampling_rules(
                sampling, self._tokenizer, self._limits, self._eos_ids, self._grammars, under=under
            )
        return self._kept

    def _after_thought(
        self, constraint: Constraint, reading: AnswerFormat, sampling: SamplingParams, under: str, *, must_call: bool
    ) -> Constraint:
        """Return the constraint of a conversation's answer with its thought left free. Raises RowError."""
        parser, wanted = self._reader.reasoning, sampling.structured
        if parser is None or (wanted is None and parser.form.is_harmony):  # the grammar of calls has its thoughts
            return constraint
        name = _CALLS_NAME if wanted is None else structured_name(wanted, under)
        constraint = parser.after_thought(constraint, reading.state, name)
        # Where the answer may call a tool in place of what is wanted, some models do so in their thought.
        return msgspec.structs.replace(constraint, must_begin=must_call or not reading.tools)

    def _echo(self, job: Job, ids: list[int], *, is_whole: bool) -> str:
        """Return the text of the prompt, now `ids`, or of the message that the answer continues.

        Raises RowError for a conversation whose answer begins a message, or whose row wants log-probabilities too.
        """
        if job.messages is not None:
            content = _last_message(job)
            if content is None:
                raise RowError(
                    "invalid_sampling",
                    "`echo` is true, and the answer to a conversation does not continue a text of it; leave it out, or "
                    f"give `{CONTINUE_FINAL_MESSAGE}`: true",
                )
            if job.sampling.logprobs is not None:
                raise RowError(
                    "invalid_sampling",
                    "`echo` is true beside `logprobs`, and the message that the answer continues is only a part of "
                    "the prompt's tokens; leave `echo` out, or ask for `prompt_logprobs` beside `logprobs`",
                )
            return content
        if job.prompt is not None and is_whole:
            return job.prompt
        return self._tokenizer.decode_one(ids, skip_special_tokens=job.sampling.skip_special_tokens)

    def _thought_limit(
        self, job: Job, ids: list[int], budget: int, under: str, *, must_call: bool
    ) -> ThoughtLimit | None:
        """Return the limit of an answer's thought; None: it cannot have one. Raises RowError."""
        parser, name = self._reader.reasoning, f"{under}.thinking_budget"
        if parser is None:
            raise unknown_marks(name)
        return parser.limit(budget, parser.state_of(ids, _last_message(job)), name, must_call=must_call)

    def _is_cut(self, prompt: RowPrompt) -> bool:
        """Tell whether to tokenize only a part of a text. Prompts with continuations are tokenized completely."""
        may_be_cut = not prompt.wholes or self._limits.on_too_long == "error"
        return may_be_cut and is_long(prompt.text, self._limits.max_model_len)

    def _encode_long(self, prompt: RowPrompt) -> list[int] | RowError:
        """Tokenize the part of a long prompt that may be needed."""
        is_truncated = prompt.job.sampling.truncate_prompt_tokens is not None
        return encode_long(
            prompt.text,
            lambda piece: self._rule.encode([piece], is_rendered=prompt.is_rendered)[0],
            max_model_len=self._limits.max_model_len,
            on_too_long="truncate-left" if is_truncated else self._limits.on_too_long,
        )


def _answer_key(job: Job, follows_from: bytes, max_tokens: int, prompt_ids: bytes, read_as: bytes) -> bytes | None:
    """Return `PreparedRow.answer_key`. `follows_from`: `SamplingRules.answers_follow_from`; `read_as`: what else an
    answer depends on."""
    if job.context.caller is not None and job.context.caller.streams:
        return None
    if job.context.part is not None and not job.sampling.is_greedy:
        read_as += b"prompt %d" % job.context.part.number  # which has random numbers of its own
    if job.adapter:
        read_as += b"adapter %d" % job.adapter
    # 128 bits: two different rows do not meet in practice.
    return blake2b(b"%b%d:%b%b" % (follows_from, max_tokens, prompt_ids, read_as), digest_size=16).digest()


def _last_message(job: Job) -> str | None:
    """Return the text of the message that the answer continues; None: it begins a new one."""
    if job.messages is None:
        return None
    goes_on = job.chat_template_kwargs.get(CONTINUE_FINAL_MESSAGE)
    if job.template_arguments is not None:
        goes_on = job.template_arguments.get(CONTINUE_FINAL_MESSAGE, goes_on)
    content = job.messages[-1].get("content")
    return content if goes_on and isinstance(content, str) else None


def _num_bytes(job: Job, prompt_ids: bytes, images: PromptImages | None) -> int:
    """Estimate the memory of a row. Objects of a Python program count little, as they exist anyway."""
    image_bytes = 0 if images is None else images.num_bytes
    extra = [len(memoryview(value)) if isinstance(value, msgspec.Raw) else 0 for value in job.context.extra.values()]
    return _ROW_BYTES + len(prompt_ids) + 200 * len(extra) + sum(extra) + image_bytes // _PIXELS_PER_BYTE


def _packed(ids: Sequence[int], images: PromptImages | None, num_tokens: int) -> bytes:
    """Return a prompt as `Request.prompt_ids` has it. Raises RowError if it has images, and is not all of its
    `num_tokens` tokens."""
    if images is None:
        return pack(ids)
    if len(ids) < num_tokens:
        raise RowError("prompt_too_long", f"the prompt has {num_tokens:,} tokens with its images, and is not cut")
    return images.packed(ids)
