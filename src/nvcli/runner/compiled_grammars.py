"""CompiledGrammars: the grammars of one process's answers, compiled, and the matchers that follow them.

A compiled grammar remembers the states that answers came through, and all answers that begin with it share that memory.
It has a limit (`grammars.Vocabulary`). An answer that meets it behind others goes on with a grammar that is compiled
for it alone, so that no answer fails because of other answers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.grammars import GrammarError, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 64
"""Compiled grammars that are kept, those that were used last."""
_MOST_COPIES, _QUICK_SECONDS = 8, 5e-3
"""There are so many copies of a grammar if it is compiled within this time."""
_MOST_SERVED = 256
"""Answers after which a copy is compiled anew, so that its memory does not grow for as long as the run lasts."""


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar as it was compiled once, for some answers."""

    beginning: LLMatcher | None
    """A matcher at the beginning of an answer, to be copied; None: the grammar cannot be compiled."""
    num_served: int = 0
    num_running: int = 0


@dataclass(slots=True)
class _Copies:
    """What is kept of a grammar."""

    copies: list[CompiledGrammar]
    seconds: float = 0.0
    """The time that it took to compile it."""


class CompiledGrammars:
    """The grammars that were used last. Any thread may use them.

    Matchers of what was compiled once share a lock, so that one of them that makes a slow mask holds up the others.
    Answers that run at the same time are therefore given copies of their own, up to a number, of grammars that are
    compiled quickly.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[str, _Copies] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, grammar: str) -> CompiledGrammar:
        """Return what an answer is to follow, until `end`."""
        with self._lock:
            known = self._compiled.setdefault(grammar, _Copies([]))
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            known.copies = [copy for copy in known.copies if copy.num_served < _MOST_SERVED]
            chosen = min(known.copies, key=lambda copy: copy.num_running, default=None)
            if chosen is None or (
                chosen.num_running and len(known.copies) < _MOST_COPIES and known.seconds < _QUICK_SECONDS
            ):
                started = time.perf_counter()
                chosen = CompiledGrammar(self.compile(grammar))
                known.seconds = time.perf_counter() - started
                known.copies.append(chosen)
            chosen.num_served += 1
            chosen.num_running += 1
        return chosen

    def end(self, compiled: CompiledGrammar) -> None:
        """Note that an answer that `begin` gave this has ended."""
        with self._lock:
            compiled.num_running -= 1

    def compile(self, grammar: str) -> LLMatcher | None:
        """Compile a grammar for one answer alone; None: it cannot be compiled."""
        with contextlib.suppress(GrammarError):  # the parent has compiled it
            return self._vocabulary.matcher(grammar)
        return None

    def forget(self, grammar: str) -> None:
        """Compile a grammar anew for the answers that begin from now on."""
        with self._lock:
            self._compiled.pop(grammar, None)


class GrammarAnswer:
    """An answer that follows a grammar."""

    def __init__(self, grammar: str | None, grammars: CompiledGrammars) -> None:
        """With `grammar` None the answer has failed."""
        self._grammar, self._grammars = grammar or "", grammars
        self._compiled: CompiledGrammar | None = None if grammar is None else grammars.begin(grammar)
        beginning = None if self._compiled is None else self._compiled.beginning
        self._matcher = None if beginning is None else beginning.deep_copy()
        self._is_alone = False
        """Whether its compiled grammar has no other answers."""
        self._tokens = array("i")
        """The tokens that the matcher has taken in."""

    @property
    def has_failed(self) -> bool:
        """Whether the grammar cannot be followed any further."""
        return self._matcher is None

    @property
    def may_end(self) -> bool:
        """Whether the grammar allows the answer to be over."""
        return self._matcher is not None and bool(self._matcher.is_accepting())

    def end(self) -> None:
        """Leave what was compiled to others."""
        if self._compiled is not None:
            self._grammars.end(self._compiled)
            self._compiled = None

    def write_mask(self, tokens: list[int], address: int, num_bytes: int) -> None:
        """Go on with tokens, and write the mask of the next one to an address, unless the answer has failed."""
        self._tokens.extend(tokens)
        if self._matcher is not None and tokens and not self._matcher.consume_tokens(tokens):
            self._begin_anew()
        if self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
            if self._matcher.is_error():
                self._begin_anew()
                if self._matcher is not None:
                    self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
                    if self._matcher.is_error():
                        self._matcher = None

    def _begin_anew(self) -> None:
        """Compile the grammar for this answer alone, and follow it to where it was, unless that was done."""
        self._matcher = None
        if not self._is_alone:
            self._is_alone = True
            self._grammars.forget(self._grammar)
            matcher = self._grammars.compile(self._grammar)
            if matcher is not None and matcher.consume_tokens(self._tokens.tolist()):
                self._matcher = matcher
