"""The report as a page: one HTML file that needs nothing else. The template escapes every text of a row.

Charts are worked out here, and drawn by the template as SVG: x to the right, y down, `WIDTH` times `HEIGHT`. A chart is
about as wide as a phone, and wide screens show several side by side, so that its texts are legible everywhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.validation import show
from nvcli.job.progress.display import format_seconds
from nvcli.job.report.data import Lengths, Report, TimePoint, merge_points
from nvcli.job.run.settings import DEFAULT, is_worth_showing

_MAX_POINTS = 120
"""Maximum number of points in a chart. On a phone it is about as many pixels wide, so more would be noise."""


def render_html(report: Report) -> str:
    """Return the page of a report."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nvcli.job.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": lambda value: f"{value:,.0f}",
        "percent": lambda value: "<1%" if 0 < value < 0.005 else f"{value:.0%}",
        "seconds": format_seconds,
        "bytes": format_bytes,
        "value": _value,
    }
    return environment.get_template("report.html.jinja").render(
        report=report,
        length_charts=list(_length_charts(report)),
        time_charts=list(_time_charts(report.timeline)),
        set_config=[setting for setting in report.config if setting.origin != DEFAULT],
        default_config=[setting for setting in report.config if setting.origin == DEFAULT],
        sampling=[setting for setting in report.sampling if is_worth_showing(setting)],
        default_sampling=[setting for setting in report.sampling if not is_worth_showing(setting)],
        cached_share=report.tokens.cached / max(1, report.tokens.prompt),
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        bottom=HEIGHT - BOTTOM,
    )


def _value(value: Any) -> str:
    """Return the value of a setting as a text."""
    return value if isinstance(value, str) and value else show(value, 400)


def _length_charts(report: Report) -> Iterator[Chart]:
    if report.prompt_lengths.count:
        yield histogram("prompts", "Lengths of prompts", report.prompt_lengths, noun="prompts")
    if report.answer_lengths.count:
        yield histogram("answers", "Lengths of answers", report.answer_lengths, noun="answers")


def _time_charts(timeline: list[TimePoint]) -> Iterator[Chart]:
    points = merge_points(timeline, _MAX_POINTS)
    if len(points) < 2:
        return
    seconds = [point.seconds for point in points]
    cached = _rates(points, "cached_tokens")
    computed = [max(0.0, all - found) for all, found in zip(_rates(points, "prompt_tokens"), cached, strict=True)]
    generated = [("generated", _rates(points, "generated_tokens"))]
    yield over_time("generated", "Generated tokens", seconds, generated, unit="tokens/s", form=count)
    prompts = [("computed", computed), ("cached", cached)]
    yield over_time("prompt", "Prompt tokens", seconds, prompts, unit="tokens/s", form=count)
    in_use = [("in use", [point.kv_use for point in points])]
    yield over_time("kv", "KV cache in use", seconds, in_use, unit="share", form=percent, top=1.0)
    running = [("running", [point.running for point in points])]
    yield over_time("requests", "Running requests", seconds, running, unit="requests", form=count)


def _rates(points: list[TimePoint], name: str) -> list[float]:
    """Return the growth of a count per second, over the stretch before each point."""
    rates, before, counted = [], 0.0, 0
    for point in points:
        value = getattr(point, name)
        rates.append(max(0, value - counted) / max(1e-3, point.seconds - before))
        before, counted = point.seconds, value
    return rates


WIDTH = 360
HEIGHT = 190
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 34
"""The margins around the plot."""

_TIME_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MAX_TIME_TICKS = 5
_MAX_BAR_TICKS = 6
_BAR_GAP = 0.12


class Tick(NamedTuple):
    """A mark on an axis: its position and text."""

    at: float
    text: str


class Bar(NamedTuple):
    """A bar, or a part of one that stands on another part."""

    x: float
    y: float
    width: float
    height: float
    series: int
    """Number of its series, from 0."""
    text: str


class Chart(NamedTuple):
    """One chart with its axes."""

    id: str
    title: str
    unit: str
    """The unit of the y axis."""
    x_unit: str
    description: str
    """The chart in words, for people who cannot see it."""
    legend: tuple[str, ...]
    """The names of the series; empty for a single one."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    bars: list[Bar]
    lines: list[str]
    """The `x,y` pairs of each series, as the attribute `points` has them."""


def histogram(id: str, title: str, lengths: Lengths, *, noun: str) -> Chart:
    """Draw lengths as bars, with cut answers as a second series. `noun` is what is counted."""
    bars = lengths.bars
    y_ticks, to_y = _y_axis(max((bar.count for bar in bars), default=1), count)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(bars))
    drawn = []
    for number, bar in enumerate(bars):
        x = LEFT + step * (number + _BAR_GAP / 2)
        name = f"{bar.start:,}" if bar.stop == bar.start + 1 else f"{bar.start:,} to {bar.stop - 1:,}"
        base = float(HEIGHT - BOTTOM)
        for series, part in enumerate((bar.count - bar.cut, bar.cut)):
            if part:
                height = HEIGHT - BOTTOM - to_y(part)
                base -= height
                what = f"{noun}, cut at their limit" if series else noun
                drawn.append(
                    Bar(
                        x=_round(x), y=_round(base), width=_round(step * (1 - _BAR_GAP)), height=_round(height),
                        series=series, text=f"{name} tokens: {part:,} {what}",
                    )
                )  # fmt: skip
    every = max(1, math.ceil(len(bars) / _MAX_BAR_TICKS))
    return Chart(
        id=id,
        title=title,
        unit=noun,
        x_unit="tokens",
        description=(
            f"{lengths.count:,} {noun}: mean {lengths.mean:,.0f} tokens, median {lengths.p50:,.0f}, "
            f"90 % up to {lengths.p90:,.0f}, longest {lengths.longest:,.0f}"
        ),
        legend=("ended", "cut at their limit") if any(bar.cut for bar in bars) else (),
        x_ticks=[
            Tick(at=_round(LEFT + step * number), text=count(bar.start))
            for number, bar in enumerate(bars)
            if number % every == 0
        ],
        y_ticks=y_ticks,
        bars=drawn,
        lines=[],
    )


def over_time(
    id: str,
    title: str,
    seconds: Sequence[float],
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    unit: str,
    form: Callable[[float], str],
    top: float | None = None,
) -> Chart:
    """Draw values over time as lines. `seconds` are the times since the start of the run; each series has its name and
    a value for each time. `form` makes texts of values, and `top` is the end of the y axis; None: it follows from them.
    """
    highest = max((value for _, values in series for value in values), default=0.0)
    y_ticks, to_y = _y_axis(highest if top is None else top, form, is_exact=top is not None)
    end = max(seconds, default=1.0) or 1.0
    width = WIDTH - LEFT - RIGHT

    def to_x(at: float) -> float:
        return LEFT + width * at / end

    stretches = [at - before for before, at in zip([0.0, *seconds], seconds, strict=False)]
    parts = []
    for name, values in series:
        mean = sum(map(operator.mul, values, stretches)) / end
        parts.append(f"{name} {form(mean)} on average, {form(max(values, default=0.0))} at most")
    return Chart(
        id=id,
        title=title,
        unit=unit,
        x_unit="time",
        description=f"{'; '.join(parts)}, over {duration(end)}",
        legend=tuple(name for name, _ in series) if len(series) > 1 else (),
        x_ticks=[Tick(at=_round(to_x(at)), text=duration(at)) for at in _time_ticks(end)],
        y_ticks=y_ticks,
        bars=[],
        lines=[
            " ".join(f"{_round(to_x(at))},{_round(to_y(value))}" for at, value in zip(seconds, values, strict=True))
            for _, values in series
        ],
    )


def count(value: float) -> str:
    """Return a number as a short text, such as `950`, `12k` or `1.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Return a share as a text, such as `25%`."""
    return f"{100 * value:.3g}%"


def duration(seconds: float) -> str:
    """Return a time as a short text, such as `1.5s`, `20m` or `2h30m`."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    return format_seconds(seconds).removesuffix("00s").removesuffix("00m")


def _y_axis(
    highest: float, form: Callable[[float], str], *, is_exact: bool = False
) -> tuple[list[Tick], Callable[[float], float]]:
    """Return the marks of an axis from 0 to at least `highest`, and the function that places a value on it."""
    highest = highest or 1.0
    step = 10 ** math.floor(math.log10(highest / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if highest / (step * factor) <= 5)
    top = highest if is_exact else step * math.ceil(highest / step)

    def to_y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(value, top) / top

    marks = [step * number for number in range(int(top / step + 1e-9) + 1)]
    return [Tick(at=_round(to_y(mark)), text=form(mark)) for mark in marks], to_y


def _time_ticks(end: float) -> list[float]:
    step = next((each for each in _TIME_STEPS if end / each <= _MAX_TIME_TICKS), 86400 * math.ceil(end / 86400 / 5))
    return [step * number for number in range(int(end / step) + 1)]


def _round(value: float) -> float:
    return round(value, 1)
