"""From options to a workload: what was given counts, and what does not go together is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.errors import ConfigError
from nvcli.tools.bench.command import BenchOptions, make_workload, parse_range, parse_shared_prefix
from nvcli.tools.bench.file_workload import FileWorkload
from nvcli.tools.bench.plot import check_plot
from nvcli.tools.bench.workload import PrefixLevel, Workload


@pytest.mark.parametrize(("text", "ends"), [("100:1024", (100, 1024)), ("7", (7, 7))])
def test_ranges(text: str, ends: tuple[int, int]) -> None:
    assert parse_range("--input-len", text) == ends


@pytest.mark.parametrize("text", ["", "a", "5:3", "0:9", "-1", "1:2:3"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        parse_range("--input-len", text)


@pytest.mark.parametrize(
    ("text", "levels"),
    [("2048", [(2048, 1)]), ("2048:16", [(2048, 16)]), ("1024,1024:8", [(1024, 1), (1024, 8)]), ("0", [(0, 1)])],
)
def test_shared_prefixes(text: str, levels: list[tuple[int, int]]) -> None:
    assert [(level.num_tokens, level.num_groups) for level in parse_shared_prefix(text)] == levels


@pytest.mark.parametrize("text", ["", "a", "-1", "5:0", "5:-1", "5,", ":2", "1:2:3", "1.5"])
def test_bad_prefixes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--shared-prefix {text}: allowed"):
        parse_shared_prefix(text)


def test_more_groups_than_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="--shared-prefix 9:2,5:3: 6 groups leave some empty with only 5 requests"):
        make_workload(BenchOptions(num_requests=5, shared_prefix="9:2,5:3"))


def test_without_options_it_is_the_published_workload() -> None:
    assert make_workload(BenchOptions()) == Workload()


def test_each_option_reaches_the_workload() -> None:
    options = BenchOptions(
        num_requests=3,
        input_len="4:5",
        output_len="6",
        shared_prefix="7,5:3",
        samples=4,
        temperature=0.5,
        top_k=20,
        top_p=0.95,
        seed=8,
        repeat=2,
    )
    assert make_workload(options) == Workload(
        num_requests=3,
        input_len=(4, 5),
        output_len=(6, 6),
        shared_prefix=(PrefixLevel(num_tokens=7), PrefixLevel(num_tokens=5, num_groups=3)),
        samples=4,
        temperature=0.5,
        top_k=20,
        top_p=0.95,
        seed=8,
    )
    options = BenchOptions(input="a.jsonl", num_requests=3, output_len="6", seed=8)
    assert make_workload(options) == FileWorkload(input="a.jsonl", num_rows=3, output_len=(6, 6), seed=8)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--input-len", {"input_len": "5"}),
        ("--shared-prefix", {"shared_prefix": "0"}),
        ("--samples", {"samples": 1}),
        ("--temperature", {"temperature": 0.0}),
        ("--top-k", {"top_k": 0}),
        ("--top-p", {"top_p": 1.0}),
        ("--shape", {"shape": "qwen3-0.6b"}),
    ],
)
def test_a_file_does_not_go_with_made_up_prompts(option: str, values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=option):
        make_workload(BenchOptions(input="a.jsonl", **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "installed", "named"),
    [
        ("run.pdf", True, ".svg or .png"),
        ("no/such/folder/run.svg", True, "mkdir -p"),
        (f"{'a' * 300}/run.svg", True, "mkdir -p"),
        ("run.svg", False, "pip install"),
    ],
)
def test_a_picture_that_cannot_be_made_is_refused_first(
    name: str, installed: bool, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvcli.tools.bench.plot.find_spec", lambda name: object() if installed else None)
    with pytest.raises(ConfigError, match=named) as caught:
        check_plot(tmp_path / name)
    assert "--plot" in str(caught.value)


def test_a_picture_can_be_written_beside_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvcli.tools.bench.plot.find_spec", lambda name: object())
    check_plot(tmp_path / "run.SVG")
