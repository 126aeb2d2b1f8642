"""Both configurations' greedy answers to the same prompts, and how far they agree. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from nvcli.core.config import JobConfig, RunConfig
from nvcli.engine.segment_forest import num_equal
from nvcli.llm.llm import LLM
from nvcli.tools.quality.passages import Passage


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
