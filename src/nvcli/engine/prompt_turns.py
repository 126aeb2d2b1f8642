"""PromptTurns: which steps let waiting requests enter, where steps with prompts have no drafts.

While drafts pay, requests that could enter wait until they are a small share of those that run, or for a few steps. So
most steps have drafts and the others have several prompts, and hardly any slot is idle meanwhile. Requests for which
there is no memory do not keep the running ones from drafts either.
"""

from __future__ import annotations

_RUNNING_PER_WAITING = 64
"""Requests enter when they are more than one for this many that run."""
_MOST_STEPS = 16
"""Maximum steps without a try to let requests in."""


class PromptTurns:
    """The turns of one replica's waiting requests."""

    def __init__(self) -> None:
        self._num_ended = 0
        """Requests that have ended since the last try."""
        self._num_steps = 0
        """Steps since the last try."""
        self._lacked_memory = False
        """Whether some had to wait on after the last try, although there were slots for them."""

    def ended(self) -> None:
        """Record that a running request has ended."""
        self._num_ended += 1

    def tried(self, *, lacked_memory: bool) -> None:
        """Record that a step let in as many requests as it could."""
        self._num_ended = self._num_steps = 0
        self._lacked_memory = lacked_memory

    def is_due(self, num_rows: int, num_waiting: int, *, has_drafts: bool) -> bool:
        """Whether the next step is to let requests in, rather than to have drafts. `num_waiting`: requests that wait
        and have a slot, at least 1. `has_drafts`: the last step without prompts had drafts."""
        self._num_steps += 1
        if self._num_steps > _MOST_STEPS:
            return True
        if self._lacked_memory:
            return self._num_ended * _RUNNING_PER_WAITING > num_rows
        return not has_drafts or num_waiting * _RUNNING_PER_WAITING > num_rows
