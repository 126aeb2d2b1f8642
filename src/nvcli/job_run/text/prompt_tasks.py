"""Tokens of rows that are scored or embedded: what follows a prompt is told apart from it as lm-eval does.

The prompt is tokenized alone, and together with each continuation; the tokens of the continuation are those of the
whole behind as many as the prompt has. Spaces at the end of the prompt count as the beginning of the continuation,
because tokens of most models begin with their space (EleutherAI/lm-evaluation-harness, `TemplateLM._encode_pair`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from nvcli.config_types import OnTooLong
from nvcli.errors import RowError
from nvcli.jobs.tasks import EmbedTask, PromptTask, ScoreTask
from nvcli.messages import pack, unpack


class ScoredText(msgspec.Struct, frozen=True, kw_only=True):
    """A text to be scored behind the prompt of its row."""

    ids: bytes
    """Its token ids, packed by `messages.pack`, at least one."""
    text: str | None
    """None: the prompt itself is scored."""
    num_bytes: int | None
    """Its bytes as UTF-8; None for token ids."""


class PreparedTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a row asks for, in tokens."""

    task: PromptTask
    texts: tuple[ScoredText, ...] = ()
    """What is scored; empty for a row that is embedded."""

    @property
    def num_tokens(self) -> int:
        """The tokens of all texts together."""
        return sum(len(text.ids) for text in self.texts) // 4

    def answer_key(self, prompt_ids: bytes) -> bytes:
        """Return a key that is equal for rows with equal answers."""
        parts = (self.task, prompt_ids, [text.ids for text in self.texts])
        return blake2b(msgspec.msgpack.encode((type(self.task).__name__, *parts)), digest_size=16).digest()


def split_spaces(prompt: str, continuations: Sequence[str]) -> tuple[str, list[str]]:
    """Move the spaces at the end of a prompt to the beginning of what follows it."""
    stripped = prompt.rstrip()
    spaces = prompt[len(stripped) :]
    return stripped, [spaces + continuation for continuation in continuations]


def scored_continuations(
    task: ScoreTask,
    prompt: list[int],
    wholes: Sequence[list[int]],
    *,
    lead: list[int],
    num_behind: int,
    max_model_len: int,
    on_too_long: OnTooLong,
) -> tuple[list[int], tuple[ScoredText, ...]]:
    """Return the tokens of the prompt, and the continuations of a row in tokens.

    wholes: the tokens of the prompt with each continuation. lead: what stands for a prompt without tokens. num_behind:
    how many special tokens the tokenizer puts behind a text. Where a row does not fit `max_model_len`, the beginning of
    its prompt is cut off, unless `on_too_long` makes it an error. Raises RowError.
    """
    assert task.continuations is not None
    prompt = prompt[: len(prompt) - num_behind]
    if not prompt:
        prompt, wholes = lead, [lead + whole for whole in wholes]
    texts = []
    for number, (text, whole) in enumerate(zip(task.continuations, wholes, strict=True)):
        ids = whole[len(prompt) : len(whole) - num_behind]
        if not ids:
            where = task.key if len(task.continuations) == 1 else f"{task.key}[{number}]"
            raise RowError(
                "invalid_value",
                f"`{where}` has no tokens of its own behind this prompt; leave it out, or let the prompt end earlier",
            )
        texts.append(ScoredText(ids=pack(ids), text=text, num_bytes=len(text.encode())))
    longest = max(len(text.ids) // 4 for text in texts)
    if len(prompt) + longest > max_model_len:
        if on_too_long == "error" or longest >= max_model_len:
            raise RowError(
                "prompt_too_long",
                f"the prompt and `{task.key}` have {len(prompt) + longest} tokens together, and `max_model_len` is "
                f"{max_model_len}; shorten them, or let `job.on_too_long` cut the beginning of the prompt",
            )
        prompt = prompt[len(prompt) + longest - max_model_len :]
    return prompt, tuple(texts)


def scored_prompt(
    ids: list[int], text: str | None, *, max_model_len: int, on_too_long: OnTooLong
) -> tuple[list[int], tuple[ScoredText, ...]]:
    """Return the first token of a prompt that is scored itself, and the rest of it. `text` is the prompt's; None: it is
    given in token ids. Raises RowError."""
    if len(ids) > max_model_len:
        if on_too_long == "error":
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, and `max_model_len` is {max_model_len}; shorten it, or set "
                "`job.on_too_long` to cut it",
            )
        ids = ids[-max_model_len:] if on_too_long == "truncate-left" else ids[:max_model_len]
        text = None
    if len(ids) < 2:
        raise RowError("empty_prompt", "the prompt has one token, and nothing stands before it that could predict it")
    num_bytes = None if text is None else len(text.encode())
    return ids[:1], (ScoredText(ids=pack(ids[1:]), text=None, num_bytes=num_bytes),)


def check_dimensions(task: EmbedTask, hidden_size: int) -> None:
    """Raise RowError where a row, which is one of an OpenAI file, asks for more numbers than a vector has."""
    if task.dimensions is not None and not 1 <= task.dimensions <= hidden_size:
        raise RowError("invalid_value", f"`body.dimensions` is {task.dimensions}; allowed: 1 to {hidden_size}")


def request_tokens(prompt_ids: bytes, text: ScoredText) -> tuple[bytes, int, int]:
    """Return what a request is to compute for a text that is scored: the packed tokens before its last one, the
    position of its first one, and its last one."""
    last = unpack(text.ids)[-1]
    return prompt_ids + text.ids[:-4], len(prompt_ids) // 4, last
