"""The first prompts of a job as the model will see them: text and special tokens told apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from nvcli.job.job import JobId
from nvcli.job.text.prepare import PreparedRow
from nvcli.job.text.tokenizer import Tokenizer

_HEAD_TOKENS = 300
_TAIL_TOKENS = 100
"""Tokens shown of the beginning and of the end of a longer prompt."""
_MOST_ALIKE = 3
"""With more special tokens of one kind in a row, such as those of an image, their number is shown."""


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a prompt: text, a special token, or omitted tokens."""

    text: str = ""
    special: bool = False
    left_out: int = 0
    """Number of tokens omitted here."""


class ShownPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in pieces."""

    id: JobId
    index: int
    place: str
    """The row's position in the input, such as `line 7`."""
    tokens: int
    max_answer_tokens: int
    pieces: list[Piece]


def show_prompt(row: PreparedRow, tokenizer: Tokenizer) -> ShownPrompt:
    """Split a prompt into pieces."""
    ids = row.model_ids
    left_out = len(ids) - _HEAD_TOKENS - _TAIL_TOKENS
    if left_out > 0:
        pieces = _pieces(ids[:_HEAD_TOKENS], tokenizer)
        pieces += [Piece(left_out=left_out), *_pieces(ids[-_TAIL_TOKENS:], tokenizer)]
    else:
        pieces = _pieces(ids, tokenizer)
    context = row.context
    return ShownPrompt(
        id=context.id,
        index=context.index,
        place=context.line,
        tokens=len(ids),
        max_answer_tokens=row.max_tokens if row.task is None else 0,
        pieces=pieces,
    )


def _pieces(ids: Sequence[int], tokenizer: Tokenizer) -> list[Piece]:
    special = frozenset(tokenizer.control_tokens)
    pieces = []
    for is_special, group in groupby(ids, lambda token_id: tokenizer.token_text(token_id) in special):
        run = list(group)
        if is_special:
            for token_id, same in groupby(run):
                text, count = tokenizer.token_text(token_id), len(list(same))
                shown = [f"{text} × {count:,}"] if count > _MOST_ALIKE else [text] * count
                pieces += [Piece(text=each, special=True) for each in shown]
        else:
            pieces.append(Piece(text=tokenizer.decode_one(run)))
    return pieces
