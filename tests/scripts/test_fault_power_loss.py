"""A power loss at any system call of a job loses and doubles nothing, and the simulation of it would notice."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from combinations import full
from crash_states import CallRecorder, crash_states
from fault_power_loss import ACTIONS, Findings, lose_power_everywhere
from nvcli.core.config_types import Order
from nvcli.job.output import manifest


def lose_power(tmp_path: Path, name: str, order: Order, *, num_random: int) -> Findings:
    findings = Findings()
    rng = random.Random(name + order)
    lose_power_everywhere(rng, findings, work=tmp_path, names=[name], orders=[order], num_random=num_random)
    assert set(findings.by_action) == set(ACTIONS)
    return findings


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("out.jsonl", "completion"),
        ("out.jsonl.gz", "input"),
        full(("out.jsonl.zst", "completion"), in_parts=True),
        ("out.csv", "input"),
        full(("out.parquet", "completion"), in_parts=True),  # the same steps, by another writer of tables
    ],
)
def test_a_power_loss_at_any_call_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, order: Order
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # the recorder takes it for one; nobody has to wait for the disk
    findings = lose_power(tmp_path, name, order, num_random=1)
    assert findings.failures == []
    assert findings.num_states > 100
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_synced_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New files, whoever writes them, are synced in `manifest`, and so are their folders."""

    class Unsynced:
        """`os`, but for syncing."""

        def __getattr__(self, name: str) -> object:
            return (lambda fd: None) if name == "fsync" else getattr(os, name)

    monkeypatch.setattr(manifest, "os", Unsynced())
    assert lose_power(tmp_path, "out.jsonl.gz", "input", num_random=2).failures


def test_states_of_a_file_that_is_written_and_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with CallRecorder(tmp_path) as recorder:
        fd = os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"new")
        os.fsync(fd)
        os.write(fd, b"er")
        os.close(fd)
        os.replace(tmp_path / "b", tmp_path / "a")
        folder = os.open(tmp_path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    assert [point.call for point in recorder.points] == ["open", "write", "fsync", "write", "replace", "fsync"]
    states = [list(crash_states(point, random.Random(1), num_random=50)) for point in recorder.points]
    assert all(state["a"] == b"old" for before in states[:4] for state in before)
    assert {state.get("b") for state in states[1]} >= {None, b"", b"n", b"ne", b"new", bytes(3)}
    assert all(state.get("b", b"new").startswith(b"new") for state in states[3] if state.get("b"))
    renamed = states[4]
    assert {tuple(sorted(state)) for state in renamed} == {("a",), ("a", "b")}
    assert {state["a"] for state in renamed} >= {b"old", b"new", b"newer"}
    assert all(state["a"].startswith((b"old", b"new")) for state in renamed)
    assert {tuple(state) for state in states[5]} == {("a",)}
    assert all(state["a"].startswith(b"new") for state in states[5])
