"""GrammarCopies: compiled grammars, as many of each as answers need that follow it side by side.

A compiled grammar remembers the states that answers came through, and all answers that begin with it share that memory:
while llguidance makes the mask of one of them, the others wait. So a grammar is compiled once for each answer that
follows it at a time, unless it takes long to compile. Compiled grammars are kept for the answers to come, whose masks
are made faster where the states are known.

The memory has a limit (`grammars.Vocabulary`). An answer that meets it with a grammar that others have followed before
goes on with one that is compiled for it alone, so that no answer fails because of other answers.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvcli.grammars import GrammarError, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_SECONDS = 0.5
"""The processor time that all copies of one grammar may take to compile."""
_LEAST_COPIES = 4
"""A grammar may be compiled so often however long that takes."""
_MOST_SERVED = 64
"""Answers after which a copy is compiled anew, so that its memory does not grow for as long as the run lasts."""
_MAX_KEPT = 256
"""Copies that are kept beside those of running answers."""


@dataclass(slots=True, eq=False)
class GrammarCopy:
    """A grammar that is compiled once, by the first thread that asks for it."""

    grammar: str
    num_answers: int = 0
    """The running answers that follow it."""
    num_served: int = 0
    """All answers that have followed it."""
    is_spent: bool = False
    """Whether no more answers are to follow it, because its memory is full."""
    seconds: float = 0.0
    """The processor time that compiling it took; 0 before."""
    error: str = ""
    """Why it cannot be compiled; empty: it can, or nobody has tried."""
    _beginning: LLMatcher | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, vocabulary: Vocabulary) -> None:
        """Compile it, unless that was done or tried. Any thread may call this."""
        with self._lock:
            if self._beginning is None and not self.error:
                started = time.thread_time()
                try:
                    self._beginning = vocabulary.matcher(self.grammar)
                except GrammarError as error:
                    self.error = str(error)
                self.seconds = time.thread_time() - started

    def begin(self, vocabulary: Vocabulary) -> LLMatcher:
        """Make what follows one answer from its beginning. Any thread may call this. Raises GrammarError."""
        self.compile(vocabulary)
        if self._beginning is None:
            raise GrammarError(self.error)
        return self._beginning.deep_copy()


@dataclass(slots=True)
class _Copies:
    """The copies of one grammar."""

    all: dict[GrammarCopy, None] = field(default_factory=dict)
    idle: list[GrammarCopy] = field(default_factory=list)
    """Those that no answer follows."""
    seconds: float = 0.0
    """The time that compiling one took, as far as that is known of copies that were given back."""

    @property
    def may_grow(self) -> bool:
        first = next(iter(self.all), None)
        if first is None:
            return True
        seconds = len(self.all) * max(self.seconds, first.seconds)
        return not first.error and (len(self.all) < _LEAST_COPIES or seconds < _MOST_SECONDS)


class GrammarCopies:
    """The copies of the grammars that are in use or were used last. It belongs to one thread."""

    def __init__(self, *, max_answers: int) -> None:
        """`max_answers` is the most answers that run at a time."""
        self._max_copies = _MAX_KEPT + max_answers
        self._copies: OrderedDict[str, _Copies] = OrderedDict()
        """By grammar, the one that was used last at the end."""
        self._num_copies = 0

    def first(self, grammar: str) -> GrammarCopy | None:
        """Return the first copy of a grammar that is new, which must be compiled before `take`; None: it is known."""
        if grammar in self._copies:
            return None
        self._copies[grammar] = _Copies()
        return self._add(grammar)

    def take(self, grammar: str) -> GrammarCopy:
        """Return a copy for one more answer: one that no other answer follows, if there is one or may be."""
        copies = self._copies[grammar]
        self._copies.move_to_end(grammar)
        if not copies.idle and copies.may_grow:
            self._add(grammar)
        copy = copies.idle.pop() if copies.idle else min(copies.all, key=lambda each: each.num_answers)
        copy.num_answers += 1
        copy.num_served += 1
        return copy

    def give_back(self, copy: GrammarCopy) -> None:
        """Note that an answer no longer follows its copy."""
        copy.num_answers -= 1
        copies = self._copies.get(copy.grammar)
        if copies is None or copy not in copies.all:
            return
        copies.seconds = max(copies.seconds, copy.seconds)
        if copy.is_spent or copy.num_served >= _MOST_SERVED:
            del copies.all[copy]
            self._num_copies -= 1
        elif not copy.num_answers:
            copies.idle.append(copy)

    def drop_oldest(self) -> None:
        """Forget the grammars that were used least lately, as long as there are too many copies."""
        while self._num_copies > self._max_copies and len(self._copies) > 1:
            _, dropped = self._copies.popitem(last=False)
            self._num_copies -= len(dropped.all)

    def _add(self, grammar: str) -> GrammarCopy:
        copy = GrammarCopy(grammar)
        copies = self._copies[grammar]
        copies.all[copy] = None
        copies.idle.append(copy)
        self._num_copies += 1
        return copy
