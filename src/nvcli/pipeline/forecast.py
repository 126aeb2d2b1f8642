"""How much work a run has before it, in tokens: for the estimate of the time that is left.

Rows differ in length, so their number says little. The unit is one generated token; a prompt token counts for a tenth
of one, because prompts are computed many tokens at a time. What a row will generate is not known before it is done:
rows that are done tell which part of `max_tokens` answers come to, and how long answers without one are. What is not
read yet is taken to be like what was read, byte for byte.
"""

from __future__ import annotations

from nvcli.pipeline.prepare import PreparedRow

PROMPT_WEIGHT = 0.1


class Workload:
    """Sums over rows that were read, or over rows that are done."""

    __slots__ = ("asked_generated", "asked_tokens", "open_generated", "open_samples", "prompt_tokens", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.prompt_tokens = 0
        self.asked_tokens = 0
        """`max_tokens` of the samples that have one."""
        self.open_samples = 0
        """Samples that have none."""
        self.asked_generated = 0
        """Tokens that samples with `max_tokens` came to; 0 for rows that are not done."""
        self.open_generated = 0

    def add(self, row: PreparedRow, completion_tokens: int = 0) -> None:
        sampling = row.sampling
        self.rows += 1
        self.prompt_tokens += row.num_prompt_tokens
        if sampling.max_tokens is None:
            self.open_samples += sampling.n
            self.open_generated += completion_tokens
        else:
            self.asked_tokens += sampling.n * row.max_tokens
            self.asked_generated += completion_tokens

    @property
    def generated_tokens(self) -> int:
        return self.asked_generated + self.open_generated


def work_done(prompt_tokens: float, generated_tokens: float) -> float:
    """In generated tokens."""
    return PROMPT_WEIGHT * prompt_tokens + generated_tokens


def expected_work(read: Workload, finished: Workload, *, share_read: float) -> float | None:
    """Work of the whole job, done and not done; None before anything can be said.

    `finished` rows are among those `read`; `share_read`: of the input, above 0 and at most 1.
    """
    if not finished.rows:
        return None
    asked_share = finished.asked_generated / finished.asked_tokens if finished.asked_tokens else 1.0
    if finished.open_samples:
        open_mean = finished.open_generated / finished.open_samples
    else:
        open_mean = finished.asked_generated / finished.rows
    generated = float(finished.generated_tokens)
    generated += asked_share * max(0, read.asked_tokens - finished.asked_tokens)
    generated += open_mean * max(0, read.open_samples - finished.open_samples)
    return work_done(read.prompt_tokens, generated) / share_read
