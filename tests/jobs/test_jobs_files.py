"""Every mistake with files is a ConfigError that says what to do, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.errors import ConfigError
from nvcli.jobs.files import check_inputs, check_output, choose_output, expand_inputs


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "a.out.jsonl"),
        ("d/a.jsonl.gz", "d/a.out.jsonl"),
        ("a.jsonl.zst", "a.out.jsonl"),
        ("a.parquet", "a.out.jsonl"),
        ("a.json", "a.out.jsonl"),
        ("a.txt", "a.txt.out.jsonl"),
        (".jsonl", ".jsonl.out.jsonl"),
    ],
)
def test_the_output_stands_beside_the_input(name: str, expected: str) -> None:
    assert choose_output([name], None) == expected


@pytest.mark.parametrize(("inputs", "which"), [(["a", "b"], "several inputs"), (["-"], "standard input")])
def test_the_output_must_be_named_where_it_does_not_follow(inputs: list[str], which: str) -> None:
    with pytest.raises(ConfigError, match=f"-o.*{which}"):
        choose_output(inputs, None)
    assert choose_output(inputs, "x") == "x"


def test_inputs(tmp_path: Path) -> None:
    good = tmp_path / "a.jsonl"
    good.touch()
    check_inputs([str(good), "-"])
    for inputs, message in [
        ([str(tmp_path / "no.jsonl")], "there is no input file"),
        ([str(tmp_path)], "is a folder"),
        ([str(good), str(tmp_path / "." / "a.jsonl")], "given twice"),
        (["-", "-"], "given twice"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_inputs(inputs)


def test_outputs(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.touch()
    existing = tmp_path / "b.jsonl"
    existing.touch()
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for output, message in [
        (source, "also an input"),
        (link, "also an input"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "c.jsonl", "mkdir -p"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_output([str(source)], str(output))
    for output in ("-", "/dev/null", str(existing), str(tmp_path / "new.jsonl"), str(tmp_path / "c.jsonl.gz")):
        check_output([str(source)], output)
    assert not (tmp_path / "new.jsonl").exists()


def test_patterns_name_their_files_sorted_and_without_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "all.jsonl", "[x].jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()
    assert expand_inputs(["-", "?.jsonl", "plain"]) == ["-", "a.jsonl", "b.jsonl", "plain"]
    assert expand_inputs(["*.jsonl"], "all.jsonl") == ["[x].jsonl", "a.jsonl", "b.jsonl"]
    assert expand_inputs(["[x].jsonl"]) == ["[x].jsonl"]
    with pytest.raises(ConfigError, match=r"no\*\.jsonl matches no file"):
        expand_inputs(["no*.jsonl"])
