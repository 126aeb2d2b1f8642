"""A stage of Ray Data on a real cluster of this machine, with the built-in model on the CPU."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli.errors import ConfigError

pytest.importorskip("ray")

import ray
import ray.data

from nvcli.ray import generate

NUM_ROWS = 80
NUM_PROMPTS = 20
LAST = NUM_ROWS - 1
"""A row with a long answer, so that the actor still works when the first rows have come here."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", os.urandom(32).hex())  # else Ray writes one into the home folder
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            configure_logging=False,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


def processes(pid: int) -> list[tuple[int, str]]:
    """The process and all that it has started, with their command lines."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        tasks = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []  # it has ended
    return [(pid, command), *(each for task in tasks for child in task.split() for each in processes(int(child)))]


def actors() -> list[int]:
    return [pid for pid, command in processes(os.getpid()) if command.startswith("ray::MapWorker")]


def row(number: int) -> dict[str, Any]:
    if number == LAST:
        sampling = {"temperature": 1.0, "max_tokens": 1000, "ignore_eos": True}
        return {"number": number, "prompt": "What is 1 + 1?\n", "sampling": sampling}
    first = number % NUM_PROMPTS
    prompt = f"Count from {first} to {first + 12}.\n" if number else None
    return {"number": number, "prompt": prompt, "sampling": {"temperature": 1.0, "max_tokens": 40}}


def answer_and_kill() -> tuple[list[dict[str, Any]], list[int]]:
    """Answer all rows, and kill the actor when the first one has come. Return the rows, and the actors there were."""
    dataset = ray.data.from_items([row(number) for number in range(NUM_ROWS)], override_num_blocks=8)
    answered = generate(dataset, "demo", device="cpu", batch_size=10, max_num_seqs=16)
    rows: list[dict[str, Any]] = []
    killed: list[int] = []
    for each in answered.iter_rows():
        if not rows:
            killed = actors()
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        rows.append(each)
    return rows, killed


@pytest.mark.filterwarnings("ignore")  # those of Ray
@pytest.mark.usefixtures("cluster")
def test_no_row_is_lost_or_doubled_when_an_actor_is_killed() -> None:
    rows: list[dict[str, Any]] = []
    killed: list[int] = []
    for _ in range(5):  # on a busy machine the first row may come here when all are answered
        if not killed:
            rows, killed = answer_and_kill()
    assert len(killed) == 1
    assert sorted(each["number"] for each in rows) == list(range(NUM_ROWS))
    assert [each["number"] for each in rows if each["error"]] == [0]
    assert list(rows[0]) == ["number", "prompt", "sampling", "choices", "usage", "error"]
    # Equal rows were answered in different batches, before the kill and after it.
    equal = [each for each in rows if each["number"] not in (0, LAST)]
    assert len({(each["prompt"], each["choices"][0]["text"]) for each in equal}) == NUM_PROMPTS
    assert min(Counter(each["prompt"] for each in equal).values()) == NUM_ROWS // NUM_PROMPTS - 1
    deadline = time.monotonic() + 20
    while left := [command for _, command in processes(os.getpid())[1:] if "nvcli." in command]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": "auto"}, 'tp="auto": give a number'),
        ({"dp": 2}, "`dp` cannot be combined with"),
        ({"concurrency": 0}, "concurrency=0: allowed: an integer of at least 1"),
        ({"concurrency": (3, 2)}, "the minimum is larger than the maximum"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"max_num_seq": 3}, "max_num_seq"),
        ({"sampling": {"temprature": 0}}, "temprature"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generate(None, "demo", **options)  # type: ignore[arg-type]
