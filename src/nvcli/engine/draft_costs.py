"""DraftCosts: the time of steps with drafts relative to steps without, measured where possible and otherwise estimated
from the measurements.

The time of a step grows with the rows' contexts, but the time that drafts add hardly does, because a row's keys are
read once for all of its tokens. So the seconds that drafts add are kept, and compared with the latest steps without
drafts. Once those are some steps ago, their time is assumed to have changed as that of steps with drafts has.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nvcli.kernels.whole_numbers import round_up

_GUESSED_COST = 0.02
"""Assumed cost of one more token per row before any was measured, as a share of a step without drafts."""
_FURTHER_COST = 0.25
"""Assumed cost of one more draft, as a share of the measured cost per draft. Rows with drafts may use another attention
kernel, whose extra time does not depend on the number of drafts."""
_PASSES = 0.7
"""The share of a step's extra time that grows with the number of a head's drafts. In the rest the head takes in the
step."""
_CAPTURE_SECONDS = 0.005
"""A step for which the device waited longer than this, and than the step takes, may have captured a graph."""
_STEPS_SEEN = 8
"""Each new measurement weighs at least 1 / `_STEPS_SEEN` in a running mean."""


class Form(NamedTuple):
    """The tokens of a step's decode rows."""

    mean: float
    """Tokens of a row, on average."""
    is_even: bool = True
    """Whether all rows have as many tokens."""

    def num_tokens(self, num_rows: int) -> int:
        """Return the tokens of all rows."""
        return int(self.mean * num_rows)


class DraftCosts:
    """Step times of one replica, for steps without prompts. A *size* is a padded number of rows (`size_of`)."""

    def __init__(self, *, has_head: bool = False) -> None:
        """`has_head`: a head makes the drafts."""
        self._has_head = has_head
        self._plain: dict[int, tuple[float, int]] = {}
        """Mean seconds of steps without drafts, and the number of measurements (at most `_STEPS_SEEN`), by size."""
        self._begun: set[tuple[int, Form]] = set()
        """(size, form) of each shape with drafts that has run at least once."""
        self._extras: dict[tuple[int, Form], tuple[float, int]] = {}
        """Mean seconds of steps with drafts beyond those without, and the number of measurements, by (size, form)."""

    def learn(self, size: int, form: Form, seconds: float, idle_seconds: float) -> None:
        """Record a step's time plus the time that the device was idle before it, up to the step's own time. Not counted
        are the first step of a shape with drafts, because it captures the shape's graph and runs it for the first time,
        and later ones that capture another."""
        if form.mean > 1 and (size, form) in self._begun and idle_seconds > max(seconds, _CAPTURE_SECONDS):
            return
        seconds += min(seconds, idle_seconds)
        if form.mean == 1:
            self._plain[size] = _mean(self._plain.get(size), seconds)
            for key in self._extras:
                if key[0] == size:
                    self._extras[key] = self._extras[key][0], min(self._extras[key][1], _STEPS_SEEN // 2)
        elif (key := (size, form)) not in self._begun:
            self._begun.add(key)
        elif size in self._plain:
            plain, count = self._plain[size]
            extra = self._extras.get(key, (0.0, 0))
            if extra[1] < _STEPS_SEEN:
                self._extras[key] = _mean(extra, seconds - plain)
            else:
                self._plain[size] = plain + (seconds - plain - extra[0]) / _STEPS_SEEN, min(count, 1)

    def plain(self, size: int) -> float | None:
        """Return the mean seconds of a step without drafts; None if none was measured."""
        mean = self._plain.get(size)
        return None if mean is None else mean[0]

    def is_known(self, size: int, form: Form) -> bool:
        """Whether a step of this size and form was measured."""
        return (size, form) in self._extras

    def has_graph(self, size: int, form: Form) -> bool:
        """Whether a step of this size and form has run."""
        return (size, form) in self._begun

    @property
    def num_uneven(self) -> int:
        """The number of shapes that have run whose rows have different numbers of tokens."""
        return sum(not form.is_even for _, form in self._begun)

    def knows_from(self, size: int) -> bool:
        """Whether a step with drafts of at least this size was measured."""
        return any(rows >= size for rows, _ in self._extras)

    def ratio(self, size: int, form: Form) -> float:
        """Return the time of a step with drafts relative to one without. At a size that was not measured, drafts are
        assumed to take the same share of a step as at the nearest measured size or, with fewer rows, as many seconds
        per row. The size must have a measured time without drafts."""
        mean, plain = self._extras.get((size, form)), self._plain[size][0]
        if mean is not None:
            return 1 + max(0.0, mean[0]) / plain
        measured = {rows for rows, known in self._extras if self._is_guide(known)}
        if not measured:
            return 1 + _GUESSED_COST * (form.mean - 1)
        rows = min(measured, key=lambda rows: abs(math.log(rows / size)))
        extra = self._extra(rows, form.mean)
        return 1 + (extra / self._plain[rows][0] if rows < size else extra / rows * size / plain)

    def _is_guide(self, form: Form) -> bool:
        """Whether the time of a form says what others take: with a head, uneven ones have the passes of the longest
        rows."""
        return form.is_even or not self._has_head

    def _extra(self, rows: int, width: float) -> float:
        """Return the extra seconds of a step with drafts, at a size that was measured: on the line through the two
        nearest measured widths. If there is only one, the line begins with `_PASSES` less than all of its extra time at
        a single token per row for a head; otherwise it begins there with none, and goes on at `_FURTHER_COST` of its
        slope."""
        points = {
            known.mean: extra
            for (size, known), (extra, _) in self._extras.items()
            if size == rows and self._is_guide(known)
        }
        first, *others = sorted(points.items(), key=lambda point: (abs(point[0] - width), point))
        if self._has_head:
            others = others or [(1, (1 - _PASSES) * first[1])]
        else:
            others += [(1, 0.0)] if width < first[0] or not others else []
        second = min(others, key=lambda point: (abs(point[0] - width), point))
        slope = (first[1] - second[1]) / (first[0] - second[0])
        if second[0] == 1 and width > first[0] and not self._has_head:
            slope *= _FURTHER_COST
        return max(0.0, first[1] + max(0.0, slope) * (width - first[0]))


def size_of(num_rows: int) -> int:
    """Return roughly the number of rows that a step is padded to (`nvcli.sizing.graph_sizes.decode_sizes`)."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << ((num_rows - 1).bit_length() - 3))
    return round_up(num_rows, step)


def _mean(before: tuple[float, int] | None, value: float) -> tuple[float, int]:
    mean, count = before or (0.0, 0)
    count = min(count + 1, _STEPS_SEEN)
    return mean + (value - mean) / count, count
