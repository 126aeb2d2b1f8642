"""Seconds of each engine and round → medians, and ratios to the first engine, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One engine over all rounds."""

    engine: str
    version: str
    seconds: list[float]
    median_seconds: float
    tokens_per_second: float
    """Generated tokens, at the median."""
    ratios: list[float]
    """Its seconds over the first engine's of the same round."""
    median_ratio: float


def standings(seconds: Mapping[str, Sequence[float]], versions: Mapping[str, str], num_tokens: int) -> list[Standing]:
    """Return the standings in the order given; `num_tokens` are generated in each round.

    Engines without a time are not given.
    """
    baseline = next(iter(seconds.values()), [])
    result = []
    for engine, values in seconds.items():
        ratios = [value / base for value, base in zip(values, baseline, strict=True)]
        median = statistics.median(values)
        result.append(
            Standing(
                engine=engine,
                version=versions[engine],
                seconds=list(values),
                median_seconds=median,
                tokens_per_second=num_tokens / median,
                ratios=ratios,
                median_ratio=statistics.median(ratios),
            )
        )
    return result


def format_table(rows: Sequence[Standing]) -> list[str]:
    """Medians, each with its spread where there are several rounds."""
    if not rows:
        return ["no engine could run"]
    cells = [["engine", "seconds", "tokens/s", f"time against {rows[0].engine}'s"]]
    for row in rows:
        name = f"{row.engine} {row.version}".strip()
        cells.append(
            [
                name,
                _spread(row.median_seconds, row.seconds, 1),
                f"{row.tokens_per_second:,.0f}",
                "1" if row is rows[0] else _spread(row.median_ratio, row.ratios, 2),
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = []
    for name, *numbers in cells:
        shown = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *shown]))
    return lines


def _spread(median: float, values: Sequence[float], digits: int) -> str:
    text = f"{median:.{digits}f}"
    return text if len(values) < 2 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"
