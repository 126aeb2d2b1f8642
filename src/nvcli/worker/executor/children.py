"""Collects answers from several child processes, each of which may die or hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from nvcli.worker.executor.child_process import ChildProcess


class ChildDied(Exception):
    """A child ended before it answered."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class NoAnswer(Exception):
    """Some children did not answer in time."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__()
        self.missing = missing


def collect_answers(
    children: Sequence[ChildProcess],
    *,
    timeout: float | None,
    is_answer: Callable[[int, Any], bool] = lambda number, message: True,
) -> list[Any]:
    """Return one answer of each child. Raises ChildDied and NoAnswer.

    `timeout` is in seconds. `is_answer` gets a child's number and message, and tells whether the message is its answer.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    answers: dict[int, Any] = {}
    while missing := [number for number in range(len(children)) if number not in answers]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([children[number].control for number in missing], left)
        if not ready:
            raise NoAnswer(missing)
        for number in missing:
            if children[number].control not in ready:
                continue
            try:
                message = children[number].control.recv()
            except (EOFError, ConnectionResetError):
                raise ChildDied(number) from None
            if is_answer(number, message):
                answers[number] = message
    return [answers[number] for number in range(len(children))]
