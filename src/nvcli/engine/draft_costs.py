"""DraftCosts: how much longer a step takes with drafts, as measured and as guessed from what was measured."""

from __future__ import annotations

import math

_GUESSED_COST = 0.02
"""The assumed cost of another token per row, as a share of a step without drafts, before any was measured."""
_FURTHER_COST = 0.25
"""The assumed cost of another draft, as a share of those measured. Attention of rows with drafts may be another kernel,
which then takes long whatever the number of drafts."""
_STEPS_SEEN = 8
"""Steps that weigh as much in a measurement as all before them."""


class DraftCosts:
    """The costs of one replica's steps without prompts. A *size* is `size_of` the number of their rows."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, int]] = {}
        """Mean seconds of steps without drafts, and how many were seen, by size."""
        self._begun: set[tuple[int, int]] = set()
        """Sizes and widths of steps with drafts of which the first was seen."""
        self._ratios: dict[tuple[int, int], tuple[float, int]] = {}
        """Mean time of steps with drafts as a multiple of those without, and how many were seen, by size and width."""

    def learn(self, size: int, width: int, seconds: float, idle_seconds: float) -> None:
        """Take in the time of a step, and that for which the device waited before it, but for no longer than the step
        took. The first step of a shape with drafts does not count: its graph is captured, and is new to the device."""
        seconds += min(seconds, idle_seconds)
        if width == 1:
            self._plain[size] = _mean(self._plain.get(size), seconds)
        elif (key := (size, width)) not in self._begun:
            self._begun.add(key)
        elif size in self._plain:
            self._ratios[key] = _mean(self._ratios.get(key), seconds / self._plain[size][0])

    def plain(self, size: int) -> float | None:
        """Return the seconds of a step without drafts; None if none was seen."""
        mean = self._plain.get(size)
        return None if mean is None else mean[0]

    def is_known(self, size: int, width: int) -> bool:
        """Whether a step of this size and width was measured."""
        return (size, width) in self._ratios

    def has_graph(self, size: int, width: int) -> bool:
        """Whether a step of this size and width has run."""
        return (size, width) in self._begun

    def knows_from(self, size: int) -> bool:
        """Whether a step with drafts was measured that had as many rows, or more."""
        return any(rows >= size for rows, _ in self._ratios)

    def ratio(self, size: int, width: int) -> float:
        """Return the time of a step with drafts as a multiple of one without. In one that was not seen
        yet the drafts of a row cost as many seconds as in the nearest size that was. The size must have a time without
        drafts."""
        mean = self._ratios.get((size, width))
        if mean is not None:
            return mean[0]
        if not self._ratios:
            return 1 + _GUESSED_COST * (width - 1)
        rows = min((rows for rows, _ in self._ratios), key=lambda rows: abs(math.log(rows / size)))
        scale = self._plain[rows][0] / rows * size / self._plain[size][0]
        return 1 + scale * self._extra(rows, width)

    def _extra(self, rows: int, width: int) -> float:
        """Return how much longer a step of a size takes with drafts, as a multiple of one without: on the line through
        the two nearest widths that were seen, or with `_FURTHER_COST` behind the only one."""
        points = [(known, ratio - 1) for (size, known), (ratio, _) in self._ratios.items() if size == rows]
        first, *others = sorted(points, key=lambda point: (abs(point[0] - width), point))
        others += [(1, 0.0)] if width < first[0] or not others else []
        second = min(others, key=lambda point: (abs(point[0] - width), point))
        slope = (first[1] - second[1]) / (first[0] - second[0])
        if second[0] == 1 and width > first[0]:
            slope *= _FURTHER_COST
        return max(0.0, first[1] + max(0.0, slope) * (width - first[0]))


def size_of(num_rows: int) -> int:
    """Return the rows to which a step is padded (`nvcli.sizing.graph_sizes.decode_sizes`), roughly."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << ((num_rows - 1).bit_length() - 3))
    return -(-num_rows // step) * step


def _mean(before: tuple[float, int] | None, value: float) -> tuple[float, int]:
    mean, count = before or (0.0, 0)
    count = min(count + 1, _STEPS_SEEN)
    return mean + (value - mean) / count, count
