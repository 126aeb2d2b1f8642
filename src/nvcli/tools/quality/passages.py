"""Passages: the tokens that both models read, from a file of rows or of plain text; and both configurations' greedy
answers to the same prompts, with how far these agree. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.messages import unpack
from nvcli.engine.segment_forest import num_equal
from nvcli.errors import ConfigError
from nvcli.job.run.resolve import ResolvedModel
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.llm.llm import LLM
from nvcli.tools.bench.file_workload import answerable_rows

TEXT_SUFFIXES = (".txt", ".md")
"""Suffixes of text files; all other files hold rows."""
_LEAST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that both models read, and the prompt that both answer."""

    prompt: array[int]
    max_answer_tokens: int
    rest: array[int]
    """The text after the prompt; empty for a row, where A's answer follows."""


def read_passages(
    model: ResolvedModel,
    input_file: str,
    *,
    limit: int,
    context: int,
    max_answer_tokens: int,
    say: Callable[[str], None],
) -> list[Passage]:
    """Read the first `limit` rows of a file as `generate` prepares them, or the first pieces of a text.

    A text is split into pieces of `context` tokens; the first half of each is its prompt. Answers have at most
    `max_answer_tokens`. Raises ConfigError if nothing is left to compare, and LoadError.
    """
    if not input_file.endswith(TEXT_SUFFIXES):
        way_out = "; give a text file (*.txt, *.md) instead"
        rows = answerable_rows(model, input_file, limit=limit, say=say, way_out=way_out)
        return [Passage(unpack(row.prompt_ids), min(max_answer_tokens, row.max_tokens), array("i")) for row in rows]
    max_model_len = model.config.max_model_len
    pieces = _pieces(model.load_tokenizer(), input_file, min(context, max_model_len))
    passages = []
    for piece in islice(pieces, limit):
        half = max(1, len(piece) // 2)
        room = min(max_answer_tokens, max_model_len - half)
        passages.append(Passage(prompt=piece[:half], max_answer_tokens=room, rest=piece[half:]))
    if not passages:
        raise ConfigError(f"{input_file} has fewer than {_LEAST_TOKENS} tokens, so there is nothing to compare")
    return passages


def _pieces(tokenizer: Tokenizer, input_file: str, size: int) -> list[array[int]]:
    """Split a text into pieces of `size` tokens. A last piece of one token is left out."""
    try:
        text = Path(input_file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{input_file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{input_file}: is not UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from None
    (ids,) = tokenizer.encode([text], add_special_tokens=True)
    if isinstance(ids, Exception):
        raise ConfigError(f"{input_file}: {ids}")
    pieces = [array("i", ids[start : start + size]) for start in range(0, len(ids), size)]
    return [piece for piece in pieces if len(piece) >= _LEAST_TOKENS]


class AnswerAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """The agreement of A's and B's answers."""

    rows: int
    """Rows that both answered."""
    failed: int
    """Rows that at least one of them did not answer."""
    equal: float
    """The share of rows with identical answers."""
    mean_common_prefix: float
    """The mean number of leading tokens that both answers share."""
    mean_tokens: float
    """The mean length of A's answers, in tokens."""


def greedy_answers(run: RunConfig, passages: Sequence[Passage], say: Callable[[str], None]) -> list[array[int] | None]:
    """Answer every prompt greedily, with engines like those of `generate`. Returns each answer's tokens, or None for a
    failed row. Raises what the engines raise."""
    # The prompts are tokens, and sampling set by the checkpoint or the job would make the answers less than greedy.
    plain = msgspec.structs.replace(run, job=JobConfig(), sampling={"temperature": 0}, generation_config="none")
    rows = (
        {
            "prompt_token_ids": passage.prompt.tolist(),
            "sampling": {"max_tokens": max(1, passage.max_answer_tokens), "return_token_ids": True},
        }
        for passage in passages
    )
    with LLM.from_config(plain, note=say, num_requests=len(passages)) as llm:
        return [
            None if answer.error is not None else array("i", answer["choices"][0]["token_ids"])
            for answer in llm.generate(rows, order="input")
        ]


def agreement(a: Sequence[array[int] | None], b: Sequence[array[int] | None]) -> AnswerAgreement:
    """Compare the answers, row by row."""
    both = [(one, other) for one, other in zip(a, b, strict=True) if one is not None and other is not None]
    count = max(1, len(both))
    return AnswerAgreement(
        rows=len(both),
        failed=len(a) - len(both),
        equal=sum(one == other for one, other in both) / count,
        mean_common_prefix=sum(num_equal(one, other) for one, other in both) / count,
        mean_tokens=sum(len(one) for one, _ in both) / count,
    )
