"""The report of a run: bounded data, one page that needs nothing else, and the same as JSON."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvcli.engine.request import DraftFigures, EngineStats, SpeculationFigures
from nvcli.errors import ConfigError
from nvcli.job.report import page
from nvcli.job.report.build import ReportFile
from nvcli.job.report.data import (
    MAX_BARS,
    SAMPLE_SECONDS,
    Engine,
    Outcome,
    OutputRows,
    Rates,
    Report,
    RunRows,
    Timeline,
    Tokens,
    describe_lengths,
)
from nvcli.job.report.page import render_html
from nvcli.job.run.counts import Counts, Example, bin_of, bin_start
from nvcli.job.run.settings import Setting

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b"


def timeline(seconds: float, *, max_points: int = 600) -> Timeline:
    """A run of so many seconds that generates 100 tokens each second."""
    now = 0.0
    counts = Counts()
    made = Timeline(counts, started_at=0.0, clock=lambda: now, max_points=max_points)
    while now < seconds:
        counts.replicas = [EngineStats(generated_tokens=int(100 * now), num_running=5, num_blocks=4, num_used_blocks=1)]
        made.sample()
        now += 0.1
    return made


@pytest.mark.parametrize("seconds", [3.0, 60.0, 1000.0])
def test_a_timeline_stays_small_and_keeps_the_sums(seconds: float) -> None:
    points = timeline(seconds, max_points=60).points
    assert len(points) <= 60
    assert len(points) >= min(30, seconds / SAMPLE_SECONDS / 1.3)
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)
    assert points[-1].seconds == pytest.approx(seconds, abs=0.7)
    for point in points:
        assert point.generated_tokens == pytest.approx(100 * point.seconds, abs=11)
        assert (point.running, point.kv_use) == (5, 0.25)


@pytest.mark.parametrize("longest", [1, 31, 500, 130_000])
def test_a_histogram_counts_every_length_once(longest: int) -> None:
    chosen = random.Random(longest)
    lengths = [chosen.randint(1, longest) for _ in range(3000)]
    cut = Counter({bin_of(lengths[0]): 1})
    described = describe_lengths(Counter(map(bin_of, lengths)), cut=cut, total=sum(lengths))
    assert len(described.bars) <= MAX_BARS
    assert sum(bar.count for bar in described.bars) == described.count == 3000
    assert sum(bar.cut for bar in described.bars) == 1
    assert described.bars[0].start <= min(lengths)
    assert described.bars[-1].stop > max(lengths)
    for bar, following in zip(described.bars, described.bars[1:], strict=False):
        assert bar.stop == following.start
        assert bar.count == sum(bar.start <= length < bar.stop for length in lengths)
    assert described.mean == pytest.approx(sum(lengths) / 3000, abs=0.1)
    assert described.p50 == pytest.approx(sorted(lengths)[1500], rel=0.07)
    assert described.longest == pytest.approx(max(lengths), rel=0.07)


def test_the_start_of_a_bin_is_its_smallest_length() -> None:
    for length in [*range(1, 200), 5000, 123_456]:
        assert bin_start(bin_of(length)) <= length < bin_start(bin_of(length) + 1)


def make_report(**fields: Any) -> Report:
    lengths = Counter({bin_of(length): 3 for length in (1, 5, 80, 700)})
    example = Example(id=EVIL, index=3, text=EVIL)
    given: dict[str, Any] = {
        "state": "done",
        "message": None,
        "command": f"nvcli generate {EVIL}",
        "model": EVIL,
        "inputs": [EVIL],
        "output": EVIL,
        "started_at": "2026-11-22T07:00:00.000+00:00",
        "ended_at": "2026-11-22T07:02:00.000+00:00",
        "seconds": 120.0,
        "generating_seconds": 100.0,
        "gpu_hours": 0.13,
        "was_complete": False,
        "whole_output": OutputRows(rows=20, answered=17, failed=3, errors={"invalid_json": 3}, num_bytes=12345),
        "rows": RunRows(done=15, failed=1, deduplicated=2, resumed=5),
        "tokens": Tokens(prompt=3000, cached=1000, generated=9000, deduplicated=70),
        "rates": Rates(generated_tokens_per_second=90.0, prompt_tokens_per_second=30.0, rows_per_second=0.15),
        "finish_reasons": [Outcome(kind="stop", count=14, examples=[example])],
        "errors": [Outcome(kind="invalid_json", count=1, examples=[example])],
        "prompt_lengths": describe_lengths(lengths, total=3000),
        "answer_lengths": describe_lengths(lengths, total=9000, cut=Counter({bin_of(80): 2})),
        "timeline": timeline(120).points,
        "sampling": [Setting(key="sampling.stop", value=[EVIL], origin="--stop")],
        "own_sampling": {"temperature": 2},
        "config": [
            Setting(key="job.system", value=EVIL, origin=f"{EVIL}.yaml:3"),
            Setting(key="dtype", value="auto", origin="default"),
        ],
        "engine": Engine(
            device="cuda",
            dtype="bfloat16",
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            data_parallel_size=2,
            gpus=["NVIDIA H200"] * 4,
            why="",
            attention_backend="triton",
            kv_cache_tokens=1 << 20,
            kv_cache_bytes=1 << 36,
            weight_bytes=1 << 33,
            startup_seconds={"load weights": 2.0},
            preemptions=3,
            lost_replicas=1,
            speculation=SpeculationFigures(
                drafted_tokens=400,
                accepted_tokens=300,
                tokens_per_step=1.5,
                by_source={"lookup": DraftFigures(drafted_tokens=400, accepted_tokens=300)},
            ),
        ),
        "versions": {"nvcli": "1", "triton": None},
        "warnings": [EVIL],
    }
    return Report(**{**given, **fields})


class Page(HTMLParser):
    """The elements, texts and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.names: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.names.update(name for name, _ in attributes)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_needs_nothing_else_and_runs_nothing_that_a_row_holds() -> None:
    html = render_html(make_report())
    page = Page(html)
    assert page.tags["script"] == page.tags["img"] == page.tags["link"] == page.tags["iframe"] == 0
    assert page.names.isdisjoint({"src", "href", "onerror", "onload", "onclick"})
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert page.text.count("<script>alert(1)</script>") >= 9  # shown, as text
    assert "prefers-color-scheme: dark" in html


def test_charts_have_axes_units_and_words_for_those_who_cannot_see_them() -> None:
    html = render_html(make_report())
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(pictures) == 6  # two of lengths, four over time
    for picture in pictures:
        root = ET.fromstring(picture)
        labels = root.attrib["aria-labelledby"].split()
        named = {element.attrib["id"]: element.text for element in root if "id" in element.attrib}
        assert set(labels) == named.keys()
        assert all(named.values())
        texts = [element.text or "" for element in root.iter("text")]
        assert texts[-1] in ("tokens →", "time →")
        assert len(texts) >= 6
        for element in root.iter():
            for name in ("x", "y", "x1", "x2", "y1", "y2"):
                assert 0 <= float(element.attrib.get(name, 0)) <= page.WIDTH
            for point in element.attrib.get("points", "").split():
                x, y = map(float, point.split(","))
                assert page.LEFT <= x <= page.WIDTH - page.RIGHT
                assert page.TOP <= y <= page.HEIGHT - page.BOTTOM
    assert "90 %" in Page(html).text
    assert "300 of 400 drafted tokens were right" in Page(html).text
    assert "1 to" in html or ": 3 prompts" in html


def test_a_page_of_a_run_that_did_nothing() -> None:
    nothing = describe_lengths(Counter(), total=0)
    report = make_report(
        state="failed",
        message="rank 0 died",
        prompt_lengths=nothing,
        answer_lengths=nothing,
        timeline=[],
        finish_reasons=[],
        errors=[],
        engine=None,
        gpu_hours=None,
        whole_output=OutputRows(rows=0, answered=0, failed=0, errors={}, num_bytes=None),
        rows=RunRows(done=0, failed=0, deduplicated=0, resumed=0),
        tokens=Tokens(prompt=0, cached=0, generated=0, deduplicated=0),
    )
    page = Page(render_html(report))
    assert "rank 0 died" in page.text
    assert page.tags["svg"] == 0
    assert "was complete" not in page.text
    assert "was complete" in Page(render_html(msgspec.structs.replace(report, was_complete=True))).text


def test_the_file_holds_the_same_as_a_page_or_as_json(tmp_path: Path) -> None:
    report = make_report()
    warnings: list[str] = []
    for name in ("report.json", "report.HTML"):
        (tmp_path / name).write_text("old")
        ReportFile(tmp_path / name).write(report, warnings.append)
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == report
    assert (tmp_path / "report.HTML").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.HTML", "report.json"]
    assert warnings == []
    folder = tmp_path / "folder"
    folder.mkdir()
    file = ReportFile(folder / "report.json")
    folder.rmdir()
    file.write(report, warnings.append)
    assert warnings == [f"warning: --report {folder / 'report.json'} cannot be written: No such file or directory"]


def test_names_that_a_report_cannot_have(tmp_path: Path) -> None:
    for name, message in (
        ("report.pdf", "allowed: a name that ends in .html or .json"),
        ("report", "allowed: a name"),
        ("no/report.html", "is not a folder"),
        ("in.json", "in.json is a file of the job itself"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"--report {tmp_path / name}") + ".*" + re.escape(message)):
            ReportFile(tmp_path / name, taken=[str(tmp_path / "in.json")])
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        ReportFile(tmp_path / "folder.html")


@pytest.mark.parametrize(
    ("end", "texts"),
    [
        (0.05, ["0s"]),
        (7.0, ["0s", "2s", "4s", "6s"]),
        (95.0, ["0s", "30s", "1m", "1m30s"]),
        (9000.0, ["0s", "30m", "1h", "1h30m", "2h", "2h30m"]),
        (1e7, ["0s", "576h", "1152h", "1728h", "2304h"]),
    ],
)
def test_times_along_an_axis_are_round(end: float, texts: list[str]) -> None:
    chart = page.over_time("x", "X", [end / 2, end], [("x", [0.0, 3.0])], unit="u", form=page.count)
    assert [tick.text for tick in chart.x_ticks] == texts
    assert [tick.text for tick in chart.y_ticks] == ["0", "1", "2", "3"]
