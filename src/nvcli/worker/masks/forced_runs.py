"""ForcedRuns: hands the tokens that must follow those of a step from the thread that launches steps to the one that
posts their outputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

Runs = Mapping[int, Sequence[int]]
"""The tokens that must follow the token of a step's row, by the row's index among the sampled rows."""


class ForcedRuns:
    """The runs of one step. Runs that begin with the next token are found with the masks of the next step, when this
    step's output may already have been posted; they are then left out, and the next output has the rest of them."""

    def __init__(self, known: Runs, *, wait_seconds: float = 0.0) -> None:
        """`known`: runs that follow from the step's own tokens. `wait_seconds`: how long the output may wait for the
        others."""
        self._runs = dict(known)
        self._wait_seconds = wait_seconds
        self._is_complete = threading.Event()

    def complete(self, runs: Runs) -> None:
        """Add the runs that begin with the next token, if any; the runs are then complete."""
        self._runs.update(runs)
        self._is_complete.set()

    def take(self) -> Runs:
        """Return the runs, after waiting for the missing ones as long as is allowed. Call it when the step has
        finished."""
        if self._wait_seconds:
            self._is_complete.wait(self._wait_seconds)
        return self._runs.copy()
