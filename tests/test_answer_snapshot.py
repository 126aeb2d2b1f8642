"""The bytes of a job's output in each format, compared with a snapshot: 500 rows of all kinds and the built-in model.

There are two jobs, of native rows and of rows of an OpenAI batch file, whose tables have other columns.

`snapshots/answers.txt` has for each group of rows (`snapshot_rows.py`) the first two as they are in JSONL, a digest of
each row in JSONL, one of all of them in each other format, and the floats of all of them. A change that is meant is
written there with `pytest tests/test_answer_snapshot.py --update-snapshots`, and read in the diff.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from fake_command import ENVIRON
from nvcli.cli.main import app
from output_jobs import plain_bytes
from snapshot_rows import JOBS, TEMPLATE, rows_of_groups
from warm_process import run_warm

SNAPSHOT = Path(__file__).parent / "snapshots" / "answers.txt"
SETTINGS = [
    *("-m", "demo", "--temperature", "0", "--order", "input", "--text-field", "answer", "--progress", "none"),
    # A prefix that an earlier row had shows in `cached_tokens`, and which row is earlier is a matter of time.
    *("--set", "device=cpu", "--set", "dtype=float32", "--set", "enable_prefix_caching=false"),
    *("--set", "sampling.max_tokens=40", "--chat-template", "template.jinja"),
]
FORMATS = ("csv", "tsv", "parquet")
COMPRESSED = [(kind, suffix) for kind in ("jsonl", "csv", "tsv") for suffix in ("gz", "zst")]
VOLATILE = (
    (re.compile(r"(created(?:_at)?\W{1,6})\d{10}\b"), r"\g<1>0"),  # the time when the job began
    (re.compile(r"(not valid JSON: )[^\"\\]+"), r"\g<1>…"),  # in the words of the JSON library
)
"""The parts of an output that another run, or another version of a library, may write otherwise."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?e-\d+|-?\d+\.\d+")
"""Floats, which differ in their last digits from CPU to CPU: log-probabilities and scores."""
TOLERANCE = 0.004


def normalised(text: str) -> str:
    for pattern, replacement in VOLATILE:
        text = pattern.sub(replacement, text)
    return text


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


def digest(text: str, length: int) -> str:
    """Return the digest of a text without the values of its floats."""
    return sha256(NUMBER.sub("~", text).encode()).hexdigest()[:length]


def rounded(text: str) -> str:
    return NUMBER.sub(lambda number: f"{float(number[0]) + 0.0:.3f}".replace("-0.000", "0.000"), text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of the jobs in each format: each job is answered as its only shard, which is joined into each."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "template.jinja").write_text(TEMPLATE)
    for job, groups in JOBS.items():
        (folder / f"{job}.jsonl").write_text("".join(line + "\n" for _, line in rows_of_groups(groups)))
    command = [sys.executable, "-P", "-m", "nvcli", "generate", *(f"{job}.jsonl" for job in JOBS)]
    command += ["-o", "shards/", "--shard", "0/1", *SETTINGS]
    done = run_warm(command, cwd=folder, env=ENVIRON, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr  # some rows are bad
    for job in JOBS:
        for kind in ("jsonl", *FORMATS, *(f"{kind}.{suffix}" for kind, suffix in COMPRESSED if job == "native")):
            arguments = ["merge", str(shard_of(folder, job)), "-o", str(folder / f"{job}.out.{kind}")]
            joined = CliRunner().invoke(app, arguments)
            assert joined.exit_code == 1, joined.output
    return folder


def shard_of(folder: Path, job: str) -> Path:
    return folder / "shards" / f"{job}.shard-0-of-1.out.jsonl"


def json_lines(path: Path) -> list[str]:
    return plain_bytes(path).decode().split("\n")[:-1]


def records(path: Path) -> list[str]:
    """Return the records of a CSV or TSV file with the bytes that they have; the first one names the columns."""
    found, parts = [], ""
    for line in plain_bytes(path).decode().split("\n")[:-1]:
        parts += line
        if parts.count('"') % 2 == 0:
            found.append(parts)
            parts = ""
        else:
            parts += "\n"
    assert not parts
    return found


def table_rows(path: Path) -> list[str]:
    """Return the columns of a Parquet file with their types, and each row as JSON."""
    table = pyarrow.parquet.read_table(path)
    columns = [f"{field.name}: {field.type}".replace("element: ", "").replace("item: ", "") for field in table.schema]
    rows = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
    return ["; ".join(columns), *rows]


def describe(folder: Path, job: str) -> Iterator[str]:
    """Yield the lines of the snapshot that are about one job."""
    rows = {kind: records(folder / f"{job}.out.{kind}") for kind in ("csv", "tsv")}
    rows["parquet"] = table_rows(folder / f"{job}.out.parquet")
    for kind in FORMATS:
        yield f"{job} {kind}: {rows[kind].pop(0)}"
    rows["jsonl"] = json_lines(folder / f"{job}.out.jsonl")
    groups = [group for group, _ in rows_of_groups(JOBS[job])]
    assert {kind: len(found) for kind, found in rows.items()} == dict.fromkeys(rows, len(groups))
    texts = {kind: list(map(normalised, found)) for kind, found in rows.items()}
    for group, members in itertools.groupby(range(len(groups)), key=lambda index: groups[index]):
        indices = list(members)
        yield f"\n{group}: rows {indices[0]} to {indices[-1]}"
        yield from (rounded(texts["jsonl"][index]) for index in indices[:2])
        for part in batched(indices, 10):
            yield f"rows from {part[0]}: " + " ".join(digest(texts["jsonl"][index], 6) for index in part)
        joined = {kind: "\n".join(texts[kind][index] for index in indices) for kind in texts}
        yield ", ".join(f"{kind} {digest(joined[kind], 12)}" for kind in FORMATS)
        for part in batched(numbers_in(joined["jsonl"]), 20):
            yield "floats: " + " ".join(rounded(f"{number:.6f}") for number in part)


def batched(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + count] for start in range(0, len(items), count))


def settled(now: Sequence[str], then: Sequence[str]) -> Iterator[str]:
    """Yield the lines that were found, and for those that differ from one of the snapshot by little in their floats
    alone, that one."""
    known = defaultdict(list)
    for line in then:
        known[NUMBER.sub("~", line)].append(line)
    for line in now:
        numbers = pytest.approx(numbers_in(line), abs=TOLERANCE, rel=1e-4)
        yield next((old for old in known[NUMBER.sub("~", line)] if numbers_in(old) == numbers), line)


def changed_rows(lines: Sequence[str], then: Sequence[str]) -> Iterator[str]:
    """Yield the rows of an output whose digest is in no line of the snapshot."""
    known = {word for line in then if line.startswith("rows from ") for word in line.split()[3:]}
    return (rounded(text) for text in map(normalised, lines) if digest(text, 6) not in known)


def test_the_output_of_a_job_is_what_it_was(folder: Path, snapshot: Callable[[str, Iterable[str]], None]) -> None:
    then = SNAPSHOT.read_text(encoding="utf-8").splitlines() if SNAPSHOT.exists() else []
    now = "\n\n".join("\n".join(describe(folder, job)) for job in JOBS).split("\n")
    failure = ""
    try:
        snapshot(SNAPSHOT.name, settled(now, then))
    except pytest.fail.Exception as difference:
        failure = str(difference)
    if failure:
        lines = [line for job in JOBS for line in json_lines(folder / f"{job}.out.jsonl")]
        changed = "\n".join(itertools.islice(changed_rows(lines, then), 20))
        pytest.fail(f"{failure}\n\nrows that have changed (20 at most):\n{changed}", pytrace=False)


@pytest.mark.parametrize("job", JOBS)
def test_formats_hold_the_same_floats(folder: Path, job: str) -> None:
    lines = json_lines(folder / f"{job}.out.jsonl")
    for kind in ("csv", "tsv"):
        assert list(map(numbers_in, records(folder / f"{job}.out.{kind}")[1:])) == list(map(numbers_in, lines))
    for row, line in zip(table_rows(folder / f"{job}.out.parquet")[1:], lines, strict=True):
        assert numbers_in(row) == pytest.approx(numbers_in(line), rel=1e-6, abs=1e-12), line


@pytest.mark.parametrize("job", JOBS)
def test_joining_copies_rows_byte_for_byte(folder: Path, job: str) -> None:
    assert (folder / f"{job}.out.jsonl").read_bytes() == shard_of(folder, job).read_bytes()


@pytest.mark.parametrize(("kind", "suffix"), COMPRESSED)
def test_a_compressed_output_unpacks_to_the_same_bytes(folder: Path, kind: str, suffix: str) -> None:
    assert plain_bytes(folder / f"native.out.{kind}.{suffix}") == (folder / f"native.out.{kind}").read_bytes()
