"""Tokens of rows that are scored, embedded or classified: continuations are separated from prompts as in lm-eval.
RowPrompt: the prompt of any row on its way from text or messages to tokens.

The prompt is tokenized alone, and together with each continuation; the tokens of the continuation are those of the
whole after as many as the prompt has. Spaces at the end of the prompt count as the beginning of the continuation,
because tokens of most models begin with their space (EleutherAI/lm-evaluation-harness, `TemplateLM._encode_pair`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import msgspec

from nvcli.core.config_types import OnTooLong
from nvcli.core.messages import TOKEN_BYTES, pack, unpack
from nvcli.errors import RowError
from nvcli.job.images.pixel_memory import Pixels
from nvcli.job.job import EmbedTask, Job, PromptTask, ScoreTask
from nvcli.job.text.model_limits import cut
from nvcli.job.text.special_tokens import SpecialTokenRule, frame
from nvcli.job.text.tokenizer import Tokenizer


@dataclass(slots=True)
class RowPrompt:
    """A prompt as far as it is known. Once there is an `error`, the rest does not matter."""

    job: Job
    is_rendered: bool
    """Whether it is a conversation, whose text the chat template writes."""
    text: str
    """The text to tokenize; empty where it is not rendered yet, and where the row gives token ids."""
    ids: list[int] | None
    """The token ids; None: not tokenized yet."""
    pixels: Sequence[Pixels] = ()
    """The pixels of its images."""
    wholes: list[list[int]] = field(default_factory=list)
    """The token ids of the prompt with each continuation to score."""
    error: RowError | None = None

    def take_ids(self, ids: list[int] | RowError) -> None:
        """Take the token ids of the text, or its error."""
        if isinstance(ids, RowError):
            self.error = ids
        else:
            self.ids = ids


class ScoredText(msgspec.Struct, frozen=True, kw_only=True):
    """A text to score after the prompt of its row."""

    ids: bytes
    """Its token ids, packed by `messages.pack`, at least one."""
    text: str | None
    """None: the prompt itself is scored."""
    num_bytes: int | None
    """Its bytes as UTF-8; None for token ids."""


class PreparedTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a row, in tokens."""

    task: PromptTask
    texts: tuple[ScoredText, ...] = ()
    """The texts to score; empty for a row to embed or classify."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(len(text.ids) for text in self.texts) // TOKEN_BYTES

    def answer_key(self, prompt_ids: bytes, adapter: int) -> bytes:
        """Return a key that is equal for rows with equal answers, under an adapter (`Job.adapter`)."""
        parts = (self.task, prompt_ids, [text.ids for text in self.texts], adapter)
        return blake2b(msgspec.msgpack.encode((type(self.task).__name__, *parts)), digest_size=16).digest()


def split_spaces(prompt: str, continuations: Sequence[str]) -> tuple[str, list[str]]:
    """Move trailing spaces of a prompt to the beginning of its continuations."""
    stripped = prompt.rstrip()
    spaces = prompt[len(stripped) :]
    return stripped, [spaces + continuation for continuation in continuations]


def scored_continuations(
    task: ScoreTask,
    prompt: list[int],
    wholes: Sequence[list[int]],
    *,
    lead: list[int],
    num_after: int,
    max_model_len: int,
    on_too_long: OnTooLong,
) -> tuple[list[int], tuple[ScoredText, ...]]:
    """Return the tokens of the prompt and of the continuations of a row.

    wholes: the tokens of the prompt with each continuation. lead: what stands for a prompt without tokens. num_after:
    how many special tokens the tokenizer puts after a text. Where a row does not fit `max_model_len`, the beginning of
    its prompt is cut off, unless `on_too_long` makes it an error. Raises RowError.
    """
    assert task.continuations is not None
    prompt = prompt[: len(prompt) - num_after]
    if not prompt:
        prompt, wholes = lead, [lead + whole for whole in wholes]
    texts = []
    for number, (text, whole) in enumerate(zip(task.continuations, wholes, strict=True)):
        ids = whole[len(prompt) : len(whole) - num_after]
        if not ids:
            where = task.key if len(task.continuations) == 1 else f"{task.key}[{number}]"
            raise RowError(
                "invalid_value",
                f"`{where}` has no tokens of its own after this prompt; leave it out, or let the prompt end earlier",
            )
        texts.append(ScoredText(ids=pack(ids), text=text, num_bytes=len(text.encode())))
    longest = max(len(text.ids) // TOKEN_BYTES for text in texts)
    if len(prompt) + longest > max_model_len:
        if on_too_long == "error" or longest >= max_model_len:
            raise RowError(
                "prompt_too_long",
                f"the prompt and `{task.key}` have {len(prompt) + longest} tokens together, and `max_model_len` is "
                f"{max_model_len}; shorten them, or let `job.on_too_long` cut the beginning of the prompt",
            )
        prompt = prompt[len(prompt) + longest - max_model_len :]
    return prompt, tuple(texts)


def fit_whole(
    ids: list[int], *, max_model_len: int, on_too_long: OnTooLong, around: tuple[int, int] = (0, 0)
) -> list[int]:
    """Return a prompt that may fill `max_model_len`, because nothing follows it, cut if needed. `around` as in `cut`.
    Raises RowError."""
    if len(ids) <= max_model_len:
        return ids
    if on_too_long == "error":
        raise RowError(
            "prompt_too_long",
            f"the prompt has {len(ids)} tokens, and `max_model_len` is {max_model_len}; shorten it, or set "
            "`job.on_too_long` to cut it",
        )
    return cut(ids, max_model_len, on_too_long, around)


def scored_prompt(ids: list[int], text: str | None) -> tuple[list[int], tuple[ScoredText, ...]]:
    """Return the first token of a prompt that is scored itself, and the rest.

    `text` is that of the prompt; None: it was given as token ids, or cut. Raises RowError.
    """
    if len(ids) < 2:
        raise RowError("empty_prompt", "the prompt has one token, so there is nothing to predict it from")
    num_bytes = None if text is None else len(text.encode())
    return ids[:1], (ScoredText(ids=pack(ids[1:]), text=None, num_bytes=num_bytes),)


def without_padding(ids: list[int], pad_id: int | None) -> list[int]:
    """Return a prompt up to the last token that is no padding, whose hidden state transformers classifies by."""
    end = next((end for end in range(len(ids), 1, -1) if ids[end - 1] != pad_id), 1)
    return ids[:end]


def check_dimensions(task: EmbedTask, embedding_size: int) -> None:
    """Raise RowError if a row of an OpenAI file asks for more numbers than a vector has."""
    if task.dimensions is not None and not 1 <= task.dimensions <= embedding_size:
        raise RowError("invalid_value", f"`body.dimensions` is {task.dimensions}; allowed: 1 to {embedding_size}")


def request_tokens(prompt_ids: bytes, text: ScoredText) -> tuple[bytes, int, int]:
    """Return a request's tokens for a text to score, packed: all but the last one; the position of the first, and the
    last one."""
    last = unpack(text.ids)[-1]
    return prompt_ids + text.ids[:-TOKEN_BYTES], len(prompt_ids) // TOKEN_BYTES, last


class Continuations:
    """Tokenizes continuations by the job's rule for special tokens."""

    def __init__(self, rule: SpecialTokenRule, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        """`eos_ids` are the model's end-of-sequence ids."""
        self._rule, self._tokenizer, self._eos_ids = rule, tokenizer, eos_ids

    @cached_property
    def lead(self) -> list[int]:
        """Tokens instead of an empty prompt, as in lm-eval: the one that begins a text, or one that ends it."""
        bos_id = self._tokenizer.bos_token_id
        return [bos_id] if bos_id is not None else list(self._eos_ids[:1])

    @cached_property
    def around(self) -> tuple[int, int]:
        """Number of special tokens that the tokenizer puts before a text and after it."""
        (framed,), (bare,) = (self._rule.encode(["a"], is_rendered=is_rendered) for is_rendered in (False, True))
        if isinstance(framed, RowError) or isinstance(bare, RowError):
            return 0, 0
        found = frame(framed, bare)
        return (0, len(framed) - len(bare)) if found is None else (len(found[0]), len(found[1]))

    def encode(self, prompts: Sequence[RowPrompt]) -> None:
        """Tokenize the prompts of rows with continuations together with each of these.

        Spaces at the end of a prompt are moved to its continuations; those of a conversation are the
        template's. A row whose continuations are refused gets its error.
        """
        texts: dict[bool, list[tuple[RowPrompt, str]]] = {False: [], True: []}
        for prompt in prompts:
            task = prompt.job.task
            if prompt.error is not None or not isinstance(task, ScoreTask) or task.continuations is None:
                continue
            continuations = list(task.continuations)
            prompt.error = self._rule.check(continuations, task.key)
            if prompt.is_rendered:
                continuations = [self._rule.to_template({"text": text})["text"] for text in continuations]
            elif prompt.ids is None:
                prompt.text, continuations = split_spaces(prompt.text, continuations)
            if prompt.error is None:
                framed = prompt.is_rendered or prompt.ids is not None
                texts[framed] += [(prompt, prompt.text + text) for text in continuations]
        for is_rendered, of_prompts in texts.items():
            encoded = self._rule.encode([text for _, text in of_prompts], is_rendered=is_rendered) if of_prompts else ()
            for (prompt, _), ids in zip(of_prompts, encoded, strict=True):
                if isinstance(ids, RowError):
                    prompt.error = prompt.error or ids
                else:
                    prompt.wholes.append([*(prompt.ids or ()), *ids])
