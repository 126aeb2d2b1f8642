"""Progress and summary say what happened, on the stream they were given."""

from __future__ import annotations

import datetime
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from nvcli.core.messages import pack
from nvcli.engine.request import EngineStats
from nvcli.errors import ConfigError, WorkerError
from nvcli.job.job import ErrorInfo, JobResult, Usage
from nvcli.job.progress.display import BarProgress, PlainProgress, Progress, format_range, format_seconds, make_progress
from nvcli.job.progress.run_status import RunView
from nvcli.job.progress.status_file import SideFile, StatusFile
from nvcli.job.run.counts import Counts, ReadTotals
from prepared_rows import prepared_row


class FakeReader:
    rows_read = rows_of_shard = 40
    rows_passed_over = 0
    bytes_read = 500
    bytes_total: int | None = 1000


class FakeFeeder:
    all_read = False

    def __init__(self) -> None:
        self.read = ReadTotals()


class Clock:
    """Seconds since the run was started; the first request was sent at 2."""

    def __init__(self, now: float = 12.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def finish(counts: Counts, index: int, *, max_tokens: int | None = 100, generated: int = 50) -> None:
    row = prepared_row(index, [1] * 10, max_tokens=max_tokens)
    usage = Usage(prompt_tokens=10, completion_tokens=generated)
    counts.lengths.add(row, generated, is_cut=False)
    counts.add(row, JobResult(context=row.context, usage=usage))


def make_view(
    *,
    limit: int | None = None,
    all_read: bool = False,
    bytes_total: int | None = 1000,
    rows_resumed: int = 0,
    is_idle: bool = False,
    generates: bool = True,
    clock: Clock | None = None,
) -> RunView:
    """40 rows of 10 and 100 tokens were read, half of the input; 20 are done with 10 and 50 tokens, 2 have failed, and
    6 run with 20 tokens each.

    `rows_resumed`: others that came before them. `is_idle`: nothing runs, and nothing waits. `generates`: rows are
    answered, and not classified.
    """
    counts = Counts(generates=generates)
    counts.rows_resumed = rows_resumed
    for index in range(20):
        finish(counts, index)
    error = ErrorInfo(type="invalid_json", message="line 1: …")
    counts.add(None, JobResult(context=prepared_row(20, [1]).context, error=error))
    counts.add(None, JobResult(context=prepared_row(21, [1]).context, error=error))
    counts.started_at = 2.0
    counts.num_planned = 7
    stats = EngineStats(
        num_blocks=100,
        num_used_blocks=25,
        generated_tokens=560,
        prompt_tokens=150,
        cached_tokens=60,
        num_running=3,
        num_waiting=1,
        running_lengths=pack([20, 100, 10] * 3),
    )
    counts.replicas = [stats] * 2
    if is_idle:
        counts.num_planned, counts.replicas = 0, []
    reader: Any = FakeReader()
    reader.bytes_total = bytes_total
    reader.rows_read += rows_resumed
    reader.rows_of_shard += rows_resumed
    reader.rows_passed_over = rows_resumed
    feeder: Any = FakeFeeder()
    feeder.all_read = all_read
    for index in range(40):
        feeder.read.add(prepared_row(index, [1] * 10, max_tokens=100))
    return RunView(counts, reader, feeder, limit=limit, started_at=0.0, output="out.jsonl", clock=clock or Clock(12.0))


def eta_of(**options: Any) -> float:
    status = make_view(**options).status()
    assert status.eta_seconds is not None
    assert status.eta_low_seconds is not None
    assert status.eta_high_seconds is not None
    assert status.eta_low_seconds <= status.eta_seconds <= status.eta_high_seconds
    return status.eta_seconds


def test_the_time_left_goes_by_tokens() -> None:
    # 1,120 tokens took 10 seconds. 6 rows have about 30 tokens left, 14 wait, and as many again are not read yet.
    status = make_view().status()
    eta = eta_of()
    assert eta == pytest.approx(10 * (6 * 30 + 54 * 50) / 1120, rel=0.35)
    assert status.share_done == pytest.approx(10 / (10 + eta), rel=0.01)
    assert eta_of(all_read=True) == pytest.approx(10 * (6 * 30 + 14 * 50) / 1120, rel=0.35)
    assert (make_view(all_read=True).status().rows.total, make_view(all_read=True).status().rows.left) == (40, 18)
    assert eta_of(all_read=True) < eta_of(limit=50) < eta
    unknown = make_view(bytes_total=None).status()
    assert (unknown.share_done, unknown.eta_seconds, unknown.rows.total) == (None, None, None)


def test_the_time_left_of_a_job_that_is_continued() -> None:
    # 400 rows were read, half of the input, and 360 of them were answered before: 400 of the 440 are unread.
    assert eta_of(rows_resumed=360) == pytest.approx(10 * 414 * 50 / 1120, rel=0.35)
    assert eta_of(rows_resumed=360, limit=480) == pytest.approx(10 * 94 * 50 / 1120, rel=0.35)


def test_where_nothing_is_computed_reading_decides() -> None:
    """All other rows may be equal to these: the bar stood still, and no time was left."""
    status = make_view(is_idle=True).status()
    assert status.share_done is not None
    assert status.share_done >= 0.5
    assert eta_of(is_idle=True) >= 10.0  # as long as the first half took


def test_rates_are_of_the_last_minute() -> None:
    clock = Clock(2.0)
    counts = Counts()
    counts.started_at = 2.0
    reader: Any = FakeReader()
    feeder: Any = FakeFeeder()
    view = RunView(counts, reader, feeder, limit=None, started_at=0.0, clock=clock)
    index = 0
    for second in range(300):
        clock.now = 2.0 + second
        for _ in range(1 if second < 150 else 5):
            finish(counts, index, generated=10)
            index += 1
        status = view.status()
        if second == 100:
            assert status.rates.generated_tokens_per_second == pytest.approx(10, rel=0.05)
    assert status.rates.generated_tokens_per_second == pytest.approx(50, rel=0.05)
    assert status.rates.prompt_tokens_per_second == pytest.approx(50, rel=0.05)
    assert status.rates.rows_per_second == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize("generates", [True, False])
def test_plain_says_a_line_every_ten_seconds(generates: bool) -> None:
    now = 0.0
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=lambda: now)
    view = make_view(all_read=True, generates=generates)
    for _ in range(100):
        progress.update(view)
        now += 0.25
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(
        r"nvcli: 12s: \d\d%, 22/40 rows \(2 failed\), \d\.\ds left, "
        rf"tokens/s 30 in{' 112 out' if generates else ''}, 6 running 9 waiting, KV 25%, prefix hits 40%",
        lines[0],
    )


def read_status(path: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(path.read_text())
    return status


def test_the_progress_file_tells_programs_the_same(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    clock = Clock()
    with Progress(io.StringIO(), status_file=StatusFile(SideFile("--progress-file", path), clock=clock)) as progress:
        assert (read_status(path)["state"], read_status(path)["output"]) == ("starting", None)
        progress.update(make_view(clock=clock))
        status = read_status(path)
        assert (status["state"], status["output"], status["pid"]) == ("running", "out.jsonl", os.getpid())
        assert status["rows"] == {
            "total": None,
            "done": 22,
            "failed": 2,
            "left": None,
            "resumed": 0,
            "deduplicated": 0,
            "errors": {"invalid_json": 2},
        }
        assert status["tokens"] == {"prompt": 300, "cached": 120, "generated": 1120}
        assert (status["kv_use"], status["prefix_hit_rate"], status["running"], status["waiting"]) == (0.25, 0.4, 6, 9)
        assert status["eta_seconds"] > 0
        written = path.stat().st_ino
        progress.update(make_view(clock=clock))
        assert path.stat().st_ino == written  # not a second yet
        clock.now += 1.0
        progress.update(make_view(all_read=True, clock=clock))
        assert path.stat().st_ino != written  # another file: replaced, never written over
        assert read_status(path)["rows"]["left"] == 18
    status = read_status(path)
    assert (status["state"], status["share_done"], status["eta_seconds"]) == ("done", 1.0, 0.0)
    assert datetime.datetime.fromisoformat(status["started_at"]) <= datetime.datetime.fromisoformat(
        status["updated_at"]
    )
    assert os.listdir(tmp_path) == ["progress.json"]


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (WorkerError("rank 0 died"), "failed", "rank 0 died"),
        (ConfigError("no file \udcff.jsonl"), "failed", "no file \\udcff.jsonl"),
        (ZeroDivisionError("oops"), "failed", "ZeroDivisionError('oops')"),
        (KeyboardInterrupt(), "interrupted", None),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_the_progress_file_says_how_a_run_ended(
    tmp_path: Path, error: BaseException, state: str, message: str | None, seen: bool
) -> None:
    path = tmp_path / "progress.json"

    def run() -> None:
        with Progress(io.StringIO(), status_file=StatusFile(SideFile("--progress-file", path))) as progress:
            if seen:
                progress.update(make_view())
            raise error

    with pytest.raises(type(error)):
        run()
    status = read_status(path)
    assert (status["state"], status["message"]) == (state, message)
    assert status["rows"]["done"] == (22 if seen else 0)


def test_a_progress_file_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "progress.json"):
        with pytest.raises(ConfigError, match="--progress-file"):
            SideFile("--progress-file", path)
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which must not become a regular file
    with pytest.raises(ConfigError, match="not a regular file"):
        SideFile("--progress-file", tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"/\.a+\.json\.new is a longer name than"):
        SideFile("--progress-file", tmp_path / f"{'a' * 247}.json")
    file = SideFile("--progress-file", tmp_path / "linked.json")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".linked.json.new").symlink_to("precious")
    file.replace(b"{}")
    assert ((tmp_path / "precious").read_text(), file.path.read_bytes()) == ("precious", b"{}")
    folder = tmp_path / "folder"
    folder.mkdir()
    stream = io.StringIO()
    clock = Clock()
    file = StatusFile(SideFile("--progress-file", folder / "progress.json"), clock=clock)
    with Progress(stream, status_file=file) as progress:
        (folder / "progress.json").unlink()
        folder.rmdir()
        for _ in range(3):
            progress.update(make_view(clock=clock))
            clock.now += 2
    assert len(stream.getvalue().splitlines()) == 1
    assert "the run continues" in stream.getvalue()


def test_the_bar_shows_the_same_and_leaves_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

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
    for part in ("nvcli: before [bold]", "nvcli: during", "nvcli: after", "22 rows", "%", " s left"):
        assert part in text


@pytest.mark.parametrize(("term", "kind"), [("xterm", BarProgress), ("dumb", PlainProgress), ("", BarProgress)])
def test_a_terminal_without_a_cursor_gets_lines(term: str, kind: type[Progress]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert type(make_progress("auto", Terminal(), environ={"TERM": term})) is kind


def test_quiet_shows_warnings_alone_and_verbose_shows_details_too() -> None:
    shown = {}
    for verbosity in ("quiet", "normal", "verbose"):
        stream = io.StringIO()
        progress = make_progress("auto", stream, verbosity=verbosity)
        progress.note("note")
        progress.warn("warning: w")
        progress.detail("detail")
        progress.update(make_view())
        progress.close()
        shown[verbosity] = stream.getvalue().splitlines()
    assert shown == {
        "quiet": ["nvcli: warning: w"],
        "normal": ["nvcli: note", "nvcli: warning: w"],
        "verbose": ["nvcli: note", "nvcli: warning: w", "nvcli: detail"],
    }


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


@pytest.mark.parametrize(
    ("low", "middle", "high", "text"),
    [
        (100, 120, 149, "2m00s"),
        (120, 200, 300, "2 to 5 min"),
        (20, 30, 45, "20 to 45 s"),
        (20, 60, 300, "20 s to 5 min"),
        (0.2, 2, 9, "2.0s"),
        (0, 5, 12, "1 to 12 s"),
        (3000, 5000, 20_000, "50 min to 6 h"),
    ],
)
def test_a_time_that_is_not_sure_is_a_range(low: float, middle: float, high: float, text: str) -> None:
    assert format_range(low, middle, high) == text
