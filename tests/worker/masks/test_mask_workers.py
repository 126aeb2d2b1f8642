"""The processes that make masks: they cannot start, or end, and another one takes the place of one that has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from constrained_requests import load_vocabulary
from nvcli.core.grammars import grammar_of
from nvcli.core.structured import Structured
from nvcli.demo import demo_path
from nvcli.errors import RowError, WorkerError
from nvcli.job.text.grammar_maker import GrammarMaker
from nvcli.worker.masks import mask_workers
from nvcli.worker.masks.mask_messages import FollowGrammar, MaskStart, WantMask, answered
from nvcli.worker.masks.mask_patience import Patience
from nvcli.worker.masks.mask_rows import MaskRowAllocator
from nvcli.worker.masks.mask_workers import MaskWorkers

FAILING = """
import {module} as module
from nvcli.worker.masks import mask_processes
def fail(*args, **kwargs): raise {error}
module.{name} = fail
mask_processes.main()
"""


def start_two(*, num_rows: int, stays_awake: bool) -> MaskWorkers:
    return MaskWorkers(
        MaskStart(
            model_path=str(demo_path()),
            vocab_size=640,
            end_ids=[0],
            num_rows=num_rows,
            num_workers=2,
            stays_awake=stays_awake,
            finds_runs=False,
        )
    )


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("os", "fork", "BlockingIOError(11, 'Resource temporarily unavailable')"),
        ("os", "ftruncate", "MemoryError('no room')"),
        ("threading", "Thread", "RuntimeError('no more threads')"),
    ],
)
def test_what_fails_at_the_start_is_said(
    module: str, name: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = tmp_path / "stderr"
    start = subprocess.Popen

    def start_failing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        code = FAILING.format(module=module, name=name, error=error)
        with printed.open("w") as stderr:
            return start([command[0], "-P", "-c", code, *command[4:]], stderr=stderr, **options)

    monkeypatch.setattr(mask_workers.subprocess, "Popen", start_failing)
    workers = start_two(num_rows=4, stays_awake=False)

    def follow() -> None:
        """Begin as a rank does. What fails once the tokens are loaded is found when masks are waited for."""
        workers.wait_ready()
        row = np.array([workers.begin(NINES)])
        while True:
            workers.want(WantMask(int(row[0]), 1, [], is_free=False, held_back=[], opening=None, is_opened=False))
            workers.send()
            workers.wait(row, answered(np.ones(1, dtype=np.int64), has_failed=False), 1, None)
            for number in workers.ended:
                workers.replace(number)

    with pytest.raises(WorkerError, match=error.split("(")[0]):
        follow()
    assert printed.read_text() == ""


NINES = grammar_of(Structured(regex="9*"))


def begin_answers(num_rows: int) -> tuple[MaskWorkers, np.ndarray]:
    """Begin answers of nines in two processes, and wait for their first masks."""
    workers = start_two(num_rows=num_rows, stays_awake=True)
    workers.wait_ready()
    rows = np.array([workers.begin(NINES) for _ in range(num_rows)])
    for row in rows.tolist():
        workers.want(WantMask(row, 1, [], is_free=False, held_back=[], opening=None, is_opened=False))
    workers.send()
    workers.wait(rows, answered(np.ones(num_rows, dtype=np.int64), has_failed=False), num_rows, None)
    return workers, rows


@pytest.fixture(scope="module")
def nine() -> int:
    (token,) = load_vocabulary().tokenizer.greedy_tokenize("9")
    return token


def ask(workers: MaskWorkers, rows: np.ndarray, number: int, token: int) -> np.ndarray:
    """Ask for masks behind one more token. Returns what is there once they are made."""
    numbers = np.full(len(rows), number)
    workers.want_next(rows, numbers, np.full(len(rows), token))
    workers.send()
    return answered(numbers, has_failed=False)


def test_only_processes_that_are_asleep_get_a_message_for_what_is_in_the_memory(
    nine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, rows = begin_answers(4)
    written: list[int] = []
    write = workers._write

    def note_and_write(number: int, data: bytes) -> None:
        written.append(number)
        write(number, data)

    deadline = time.monotonic() + 60
    while not workers.table.is_asleep[:2].all() and time.monotonic() < deadline:
        time.sleep(0.001)
    monkeypatch.setattr(workers, "_write", note_and_write)
    for number in range(2, 200):
        wanted = ask(workers, rows, number, nine)
        workers.wait(rows, wanted, len(rows), None)
        assert (workers.table.numbers[rows] == wanted).all()
        if number == 2:
            assert sorted(written) == [0, 1]
    assert len(written) < 100


def others_of(workers: MaskWorkers) -> list[int]:
    """The process ids of all but the first process."""
    first = workers._process.pid
    return [int(pid) for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split()]


def test_a_process_that_is_killed_is_missed_by_steps_that_go_on_without_masks_and_replaced(nine: int) -> None:
    """Steps with other rows never wait for long. The other process goes on meanwhile."""
    workers, rows = begin_answers(4)
    before = others_of(workers)
    os.kill(before[0], signal.SIGKILL)
    wanted = ask(workers, rows, 2, nine)  # a message, where a process was asleep
    deadline = time.monotonic() + 60
    while not workers.ended and time.monotonic() < deadline:
        workers.wait(rows, wanted, 2 * len(rows), Patience(time.perf_counter(), 0.001))
    (number,) = workers.ended
    begun, how = workers.replace(number)
    assert how == "was killed by SIGKILL"
    assert sorted(begun) == [row for row in rows if row % 2 == number]
    for row in begun:
        workers.want(WantMask(row, 2, [nine], is_free=False, held_back=[], opening=None, is_opened=False))
    workers.send()
    workers.wait(rows, wanted, len(rows), None)
    assert (workers.table.numbers[rows] == wanted).all()
    assert len(set(others_of(workers)) - {*before}) == 1
    workers.wait(rows, ask(workers, rows, 3, nine), len(rows), None)
    assert not workers.ended


def chain(length: int) -> Structured:
    """A grammar of so many rules, each of which is the next one. To compile it takes stack for each of them."""
    rules = "".join(f"r{number}: r{number + 1}\n" for number in range(length))
    return Structured(grammar=f'start: r0\n{rules}r{length}: "9"')


def first_masks(workers: MaskWorkers, rows: list[int]) -> np.ndarray:
    """Wait for the first masks of answers as a rank does. Returns `MaskTable.numbers` of these rows."""

    def want(begun: list[int]) -> None:
        for row in begun:
            workers.want(WantMask(row, 1, [], is_free=False, held_back=[], opening=None, is_opened=False))
        workers.send()

    wanted = answered(np.ones(len(rows), dtype=np.int64), has_failed=False)
    want(rows)
    workers.wait(np.array(rows), wanted, len(rows), None)
    while workers.ended:
        begun, how = workers.replace(workers.ended[0])
        assert how == "was killed by SIGSEGV"
        want(begun)
        workers.wait(np.array(rows), wanted, len(rows), None)
    found: np.ndarray = workers.table.numbers[np.array(rows)]
    return found


def test_a_grammar_that_overflows_the_stack_fails_alone() -> None:
    """What is checked with less stack than is had here does not. Answers that begin later end no process."""
    with closing(GrammarMaker(demo_path(), vocab_size=640, end_ids=[0])) as maker:
        maker.grammar(chain(2000), name="x")
        with pytest.raises(RowError, match="killed by SIGSEGV"):
            maker.grammar(chain(7000), name="x")
    workers = start_two(num_rows=8, stays_awake=False)
    workers.wait_ready()
    fine, failed = answered(1, has_failed=False), answered(1, has_failed=True)
    deep, deadly = grammar_of(chain(7000)), grammar_of(chain(40_000))
    rows = [workers.begin(grammar) for grammar in (NINES, deep, deadly, NINES, NINES)]
    assert first_masks(workers, rows).tolist() == [fine, fine, failed, fine, fine]
    before = others_of(workers)
    later = [workers.begin(grammar) for grammar in (deadly, NINES)]
    assert first_masks(workers, later).tolist() == [failed, fine]
    assert others_of(workers) == before


def test_the_processes_have_a_limit_of_memory() -> None:
    workers, _ = begin_answers(2)
    for pid in others_of(workers):
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (limit,) = (line.split()[3] for line in limits if line.startswith("Max data size"))
        assert 1 << 30 <= int(limit) <= 6 << 30


def test_a_process_that_ends_for_no_answers_sake_again_and_again_ends_the_run() -> None:
    workers, _ = begin_answers(2)

    def kill_on() -> None:
        while True:
            os.kill(others_of(workers)[0], signal.SIGKILL)
            deadline = time.monotonic() + 60
            while not workers.ended and time.monotonic() < deadline:
                workers._check(0.1)
            (number,) = workers.ended
            workers.replace(number)
            while len(others_of(workers)) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)

    with pytest.raises(WorkerError, match="was killed by SIGKILL, 3 times in a row"):
        kill_on()


def test_the_first_process_is_not_replaced() -> None:
    workers, _ = begin_answers(2)
    others = others_of(workers)
    workers._process.kill()
    with pytest.raises(WorkerError, match="was killed or could not start"):
        workers._check(60.0)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in others) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def test_answers_fail_at_the_second_end_of_their_process() -> None:
    """And others by the same grammar only if it could not be compiled."""
    rows = MaskRowAllocator(9, 1)

    def end_at(at_work: int) -> tuple[dict[int, str | None], bool]:
        begun, was_idle = rows.begin_anew(0, at_work)
        return {follow.row: follow.grammar for follow in begun}, was_idle

    for row, grammar in enumerate(("deadly", "innocent", "slow")):
        assert rows.take(grammar) == FollowGrammar(row, grammar)
    everyone: dict[int, str | None] = {0: "deadly", 1: "innocent", 2: "slow"}
    assert end_at(0) == (everyone, True)
    assert end_at(-1) == (everyone, False)
    assert end_at(-1) == (everyone | {0: None}, False)
    assert end_at(-1)[1], "it has failed already"
    assert rows.take("deadly") == FollowGrammar(3, None)
    for _ in range(2):
        begun, was_idle = end_at(3)
    assert begun == {0: None, 1: "innocent", 2: None, 3: None}
    assert not was_idle
    assert rows.take("slow") == FollowGrammar(4, "slow")
    rows.give_back(2)
    assert rows.take("other") == FollowGrammar(2, "other")
    rows.give_back(2)
    assert end_at(3)[1], "its answer has ended since"
