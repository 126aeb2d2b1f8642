"""ForcedRuns: tokens that must follow those of a step, from the thread that launches steps to the one that posts their
outputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

Runs = Mapping[int, Sequence[int]]
"""The tokens that must follow the token of a step's row, by the number of the row among the sampled ones."""


class ForcedRuns:
    """The runs of one step. Those that begin with the next token are found with the masks of the next step, while this
    one's output may already be on its way; they are then left out, and the next output has what remains of them."""

    def __init__(self, known: Runs, *, wait_seconds: float = 0.0) -> None:
        """`known`: runs that the step's own tokens begin. `wait_seconds`: how long the output may wait for others."""
        self._runs = dict(known)
        self._wait_seconds = wait_seconds
        self._is_complete = threading.Event()

    def complete(self, runs: Runs) -> None:
        """Add the runs that begin with the next token, if any. Nothing follows."""
        self._runs.update(runs)
        self._is_complete.set()

    def take(self) -> Runs:
        """Return the runs, once the step has finished, after waiting for them as long as is allowed."""
        if self._wait_seconds:
            self._is_complete.wait(self._wait_seconds)
        return self._runs.copy()
