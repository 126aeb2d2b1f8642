"""Progress and summary say what happened, on the stream they were given."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest

from nvcli.engine.request import EngineStats
from nvcli.pipeline.counts import Counts
from nvcli.pipeline.progress import BarProgress, PlainProgress, Progress, RunView, format_seconds, make_progress
from nvcli.pipeline.summary import Summary, format_summary


class FakeReader:
    rows_read = 400
    bytes_read = 500
    bytes_total: int | None = 1000


class FakeFeeder:
    all_read = False


def make_view(*, limit: int | None = None, all_read: bool = False, bytes_total: int | None = 1000) -> RunView:
    counts = Counts()
    counts.rows_done = 200
    counts.errors["x"] = 3
    counts.started_at = time.monotonic() - 10
    counts.engines = [EngineStats(num_blocks=100, num_used_blocks=25, generated_tokens=5000)] * 2
    reader: Any = FakeReader()
    reader.bytes_total = bytes_total
    feeder: Any = FakeFeeder()
    feeder.all_read = all_read
    return RunView(counts, reader, feeder, limit=limit, started_at=time.monotonic() - 12)


def test_the_time_left_goes_by_the_share_of_the_input() -> None:
    view = make_view()
    assert view.rows_total is None
    assert view.share_done == pytest.approx(0.25)  # 200 of about 800
    assert view.seconds_left == pytest.approx(30, rel=0.01)
    assert view.tokens_per_second == pytest.approx(1000, rel=0.01)
    assert make_view(all_read=True).share_done == 0.5
    assert make_view(limit=250).share_done == 0.8
    assert make_view(bytes_total=None).share_done is None
    assert make_view(bytes_total=None).seconds_left is None


def test_plain_says_a_line_every_ten_seconds() -> None:
    now = 0.0
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=lambda: now)
    view = make_view(all_read=True)
    for _ in range(100):
        progress.update(view)
        now += 0.25
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(
        r"nvcli: 12s: 50%, 200/400 rows \(3 failed\), (999|1,000) tokens/s, KV 25%, 10s left", lines[0]
    ), lines


def test_the_bar_shows_the_same_and_leaves_the_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = make_progress("auto", stream)
    assert isinstance(progress, BarProgress)
    progress.note("before [bold]")
    progress.update(make_view())
    progress.note("during")
    progress.close()
    progress.close()
    progress.note("after")
    text = stream.getvalue()
    for part in ("nvcli: before [bold]", "nvcli: during", "nvcli: after", "200 rows", "25%"):
        assert part in text


def test_kinds() -> None:
    stream = io.StringIO()
    assert type(make_progress("auto", stream)) is PlainProgress
    silent = make_progress("none", stream)
    assert type(silent) is Progress
    silent.update(make_view())
    assert stream.getvalue() == ""
    silent.note("shown")
    assert stream.getvalue() == "nvcli: shown\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.96, "10.0s"), (59.4, "59s"), (59.6, "1m00s"), (3600, "1h00m"), (7625, "2h07m")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_summary() -> None:
    summary = Summary(
        output="out.jsonl",
        rows=1000,
        errors={"invalid_json": 1, "prompt_too_long": 4},
        prompt_tokens=12345,
        cached_tokens=300,
        completion_tokens=50000,
        total_seconds=75.0,
        generation_seconds=50.0,
        startup={"load weights": 2.0},
        tokenizer_load_seconds=3.0,
        reading_seconds=0.5,
        num_preemptions=2,
    )
    text = format_summary(summary)
    assert text.splitlines()[0] == "995 of 1,000 rows answered in 1m15s → out.jsonl"
    for part in (
        "prompt_too_long 4, invalid_json 1",
        "prompt 12,345 (300 from the prefix cache), generated 50,000",
        "1,000 generated tokens/s, 20.0 rows/s",
        "load weights 2.0s",
        "2 preemptions",
    ):
        assert part in text
