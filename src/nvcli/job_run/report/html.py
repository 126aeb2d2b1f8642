"""The report as a page: one HTML file that needs nothing else. Every text of a row is escaped by the template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jinja2

from nvcli.byte_sizes import format_bytes
from nvcli.job_run.progress.display import format_seconds
from nvcli.job_run.report import charts
from nvcli.job_run.report.charts import Chart
from nvcli.job_run.report.data import Report
from nvcli.job_run.report.timeline import TimePoint, merge_points
from nvcli.job_run.settings import DEFAULT, is_telling
from nvcli.validation import show

_MAX_POINTS = 120
"""A chart is this many pixels wide on a phone, or a few times as many; more points would only be noise."""


def render_html(report: Report) -> str:
    """Return the page of a report."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nvcli.job_run.report", package_path=""),
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
        sampling=[setting for setting in report.sampling if is_telling(setting)],
        default_sampling=[setting for setting in report.sampling if not is_telling(setting)],
        cached_share=report.tokens.cached / max(1, report.tokens.prompt),
        width=charts.WIDTH,
        height=charts.HEIGHT,
        left=charts.LEFT,
        right=charts.WIDTH - charts.RIGHT,
        top=charts.TOP,
        bottom=charts.HEIGHT - charts.BOTTOM,
    )


def _value(value: Any) -> str:
    """Return the value of a setting as a text."""
    return value if isinstance(value, str) and value else show(value, 400)


def _length_charts(report: Report) -> Iterator[Chart]:
    if report.prompt_lengths.count:
        yield charts.histogram("prompts", "Lengths of prompts", report.prompt_lengths, noun="prompts")
    if report.answer_lengths.count:
        yield charts.histogram("answers", "Lengths of answers", report.answer_lengths, noun="answers")


def _time_charts(timeline: list[TimePoint]) -> Iterator[Chart]:
    points = merge_points(timeline, _MAX_POINTS)
    if len(points) < 2:
        return
    seconds = [point.seconds for point in points]
    yield charts.over_time(
        "generated",
        "Generated tokens",
        seconds,
        [("generated", _rates(points, "generated_tokens"))],
        unit="tokens/s",
        form=charts.count,
    )
    computed = [
        prompt - cached
        for prompt, cached in zip(_rates(points, "prompt_tokens"), _rates(points, "cached_tokens"), strict=True)
    ]
    yield charts.over_time(
        "prompt",
        "Prompt tokens",
        seconds,
        [("computed", [max(0.0, rate) for rate in computed]), ("cached", _rates(points, "cached_tokens"))],
        unit="tokens/s",
        form=charts.count,
    )
    yield charts.over_time(
        "kv", "KV cache in use", seconds, [("in use", [point.kv_use for point in points])],
        unit="share", form=charts.percent, top=1.0,
    )  # fmt: skip
    yield charts.over_time(
        "requests", "Running requests", seconds, [("running", [point.running for point in points])],
        unit="requests", form=charts.count,
    )  # fmt: skip


def _rates(points: list[TimePoint], name: str) -> list[float]:
    """Return the growth of a count by the second, over the stretch before each point."""
    rates, before, counted = [], 0.0, 0
    for point in points:
        value = getattr(point, name)
        rates.append(max(0, value - counted) / max(1e-3, point.seconds - before))
        before, counted = point.seconds, value
    return rates
