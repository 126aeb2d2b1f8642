"""PromptTurns: which steps let waiting requests enter, where steps with prompts have no drafts.

While drafts pay, requests that could enter wait until they are a small share of those that run, or for a few steps. So
most steps have drafts and the others have several prompts, and hardly any slot is idle meanwhile. Requests for which
there is no memory do not keep the running ones from drafts either.
"""

from __future__ import annotations

from nvcli.engine.running_requests import RunningRequests

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
        """Whether some had to go on waiting after the last try, although there were slots for them."""

    def ended(self) -> None:
        """Record that a running request has ended."""
        self._num_ended += 1

    def tried(self, *, lacked_memory: bool) -> None:
        """Record that a step let in as many requests as it could."""
        self._num_ended = self._num_steps = 0
        self._lacked_memory = lacked_memory

    def has_prompts(self, running: RunningRequests, num_waiting: int, *, has_drafts: bool) -> bool:
        """Whether the next step is for prompts too: those under way, or of some of the `num_waiting` requests, for
        which it is to have no drafts. `has_drafts`: the latest steps without prompts had drafts."""
        num_entering = min(num_waiting, running.homes.num_free_slots)
        if running.prefilling or not num_entering:
            return bool(running.prefilling)
        self._num_steps += 1
        if self._num_steps > _MOST_STEPS:
            return True
        if self._lacked_memory:
            return self._num_ended * _RUNNING_PER_WAITING > len(running)
        return not has_drafts or num_entering * _RUNNING_PER_WAITING > len(running)
