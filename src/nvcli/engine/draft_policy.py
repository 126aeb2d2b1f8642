"""DraftPolicy: how many tokens to draft for each decode row of the next step.

An accepted draft saves its row a step, but every draft makes the step longer. The policy learns from the steps that
ran: how often the first, the second, … draft of a row is accepted, and how long steps of each size take. It chooses the
width with the most tokens per second, or no drafts if none gains. Unknown costs are guessed low, so that they are
tried; a try that does not pay is not repeated for a while, twice as long each time. So wrong guesses cost a bounded
part of the run.

All of it is arithmetic on the host, on numbers that come with the outputs of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from nvcli.core.config_types import DraftPolicyName
from nvcli.core.messages import DRAFT_SOURCES, StepInput, StepOutput, unpack

_FIRST_SURVIVAL = 0.5
"""The assumed acceptance rate of first drafts, before any was seen."""
_ROWS_SEEN = 32
"""Rows whose steps weigh as much in the acceptance rates as all before them."""
_LEAST_GAIN = 1.03
"""Minimum gain at which a step has drafts if the one before had none."""
_GUESSED_COST = 0.02
"""The assumed cost of another token per row, as a share of a step without drafts, before it was measured."""
_SECONDS_SEEN = 4
"""Steps that weigh as much in the measured times as all before them."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128
"""Steps without drafts before the next try: at first, and at most."""
_TRIED_SHARE = 0.005
"""Maximum share of the time that tries may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The limits of drafts."""

    widths: tuple[int, ...]
    """Numbers of tokens that rows with drafts may have, at least one, ascending."""
    policy: DraftPolicyName = "auto"
    """auto: as many as make the run faster; always: as many as possible."""
    max_step_tokens: int = 1 << 30
    """Maximum tokens of a step's decode rows together, if they have drafts."""


class DraftPolicy:
    """The widths of one replica's steps."""

    def __init__(self, drafting: Drafting | None) -> None:
        """None: decode rows have no drafts."""
        self._drafting = drafting
        self.num_drafted = [0] * len(DRAFT_SOURCES)
        """Drafted tokens from each of `DRAFT_SOURCES`."""
        self.num_accepted = [0] * len(DRAFT_SOURCES)
        self._survival = [_FIRST_SURVIVAL**place for place in range(1, drafting.widths[-1] if drafting else 1)]
        """Share of rows whose first, second, … draft is accepted, as seen so far."""
        self._seconds: dict[tuple[int, int], float] = {}
        """Seconds of a step without prompts, by size of the batch (`_size`) and width."""
        self._width = 1
        self._pause = _FIRST_PAUSE
        self._steps_to_try = 0
        """Steps without drafts left before the next try."""

    def width(self, num_rows: int, max_tokens: int, *, has_prompts: bool) -> int:
        """Return the number of tokens for each of a step's `num_rows` decode rows, up to `max_tokens` in all.
        `has_prompts`: the step may compute prompts too."""
        if self._drafting is None or num_rows == 0:
            return 1
        most = min(max_tokens, self._drafting.max_step_tokens) // num_rows
        widths = [width for width in self._drafting.widths if width <= most]
        if not widths:
            return 1
        if self._drafting.policy == "always":
            return widths[-1]
        if has_prompts:
            return 1
        self._width = self._choose(_size(num_rows), widths)
        return self._width

    def learn(self, step: StepInput, output: StepOutput) -> None:
        """Take in a step's output and how long it took."""
        if self._drafting is None:
            return
        num_rows = step.num_decodes
        width = unpack(step.num_tokens[:4])[0] if step.row_limits else 1
        if num_rows and num_rows == step.num_rows and output.seconds > 0:
            key = _size(num_rows), width
            before = self._seconds.get(key, output.seconds)
            self._seconds[key] = before + (output.seconds - before) / _SECONDS_SEEN
        if width == 1:
            return
        counts = unpack(output.counts)[:num_rows] if output.counts else [width] * num_rows
        drafted = unpack(output.drafted) if output.drafted else [width - 1] * num_rows
        sources = unpack(output.draft_sources) if output.draft_sources else [0] * num_rows
        for source, num_drafted, count in zip(sources, drafted, counts, strict=True):
            self.num_drafted[source] += num_drafted
            self.num_accepted[source] += max(0, count - 1)
        weight = min(0.5, num_rows / _ROWS_SEEN)
        for place in range(1, width):
            num_accepted = sum(count > place for count in counts)
            before = self._survival[place - 1]
            self._survival[place - 1] = before + weight * (num_accepted / num_rows - before)

    def _choose(self, size: int, widths: list[int]) -> int:
        """Return the best width for steps of a size, 1 or one of `widths`."""
        if (size, 1) not in self._seconds:
            return 1  # nothing to compare with
        costs = [self._cost(size, width) for width in widths]
        shares = [*accumulate(self._survival, min)]  # a later draft is accepted no more often than an earlier one
        gains = [(1 + sum(shares[: width - 1])) / cost for width, cost in zip(widths, costs, strict=True)]
        best = max(gains)
        if best > (1.0 if self._width > 1 else _LEAST_GAIN):
            self._pause = self._steps_to_try = _FIRST_PAUSE
            return widths[gains.index(best)]
        if self._steps_to_try > 0:
            self._steps_to_try -= 1
            return 1
        for width, cost in zip(widths, costs, strict=True):
            if width > _LEAST_GAIN * cost:  # it would pay if all drafts were right
                self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
                self._steps_to_try = max(self._pause, int((cost - 1) / _TRIED_SHARE))
                return width
        return 1

    def _cost(self, size: int, width: int) -> float:
        """Return the time of a step with drafts as a multiple of one without. One that was not seen yet takes as long
        as smaller ones that were, or a little longer than one without drafts."""
        seen = self._seconds.get((size, width))
        if seen is not None:
            return seen / self._seconds[size, 1]
        smaller = (
            seconds / self._seconds[key_size, 1]
            for (key_size, key_width), seconds in self._seconds.items()
            if key_size <= size and key_width <= width and (key_size, 1) in self._seconds
        )
        return max(1 + _GUESSED_COST * (width - 1), *smaller)


def _size(num_rows: int) -> int:
    """Return the size class of a batch: all sizes between two powers of two share one."""
    return (num_rows - 1).bit_length()
