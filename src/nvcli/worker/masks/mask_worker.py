"""A mask worker: it follows the answers of some rows, takes their tokens, builds their masks one by one, and writes
them to memory that it shares with the rank. `mask_processes.py` starts it.

Masks that are likely to be slow, because the answer's last one was, are built last. A worker may die on a grammar that
takes too much stack or memory, so it notes which answer it is working on. This module knows no torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from nvcli.core.grammars import GrammarError, Vocabulary
from nvcli.core.structured import MAX_FORCED_TOKENS
from nvcli.worker.masks.mask_messages import (
    WHOLE_RUN,
    FollowGrammar,
    MaskOrders,
    MaskTable,
    WantMask,
    allow_only,
    answered,
    read_next_token,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 64
"""Compiled grammars that a worker keeps, most recently used."""
_MOST_SERVED = 256
"""Answers after which a grammar is recompiled, so that its memory does not grow for the whole run."""
_ALL = np.uint32(0xFFFFFFFF)
"""A mask word that allows every token."""
_SLOW_SECONDS = 200e-6
_MOST_PASSED = 2
"""Orders that may overtake a slow mask."""
_LOOK_SECONDS = 100e-6
"""Seconds between the first polls for orders. A timer that fires this often takes part of a core: a third of one at 50
µs in a virtual machine."""
_AWAKE_SECONDS = 6e-3
"""Seconds after which an idle worker sleeps. Steps that take longer lose little to waking it."""
_NAP_MILLISECONDS = 200.0
"""Milliseconds between polls of a sleeping worker to which no message comes. A message is missing only if the rank saw
the worker awake at the very moment it fell asleep."""


@dataclass(slots=True)
class _CompiledGrammar:
    """A grammar compiled once, for several answers."""

    beginning: LLMatcher | None
    """A matcher at the beginning of an answer, to be copied; None if the grammar cannot be compiled."""
    num_served: int = 0


class CompiledGrammars:
    """The most recently used grammars, compiled.

    A compiled grammar caches the states that answers pass through. All answers that start from it share this cache,
    whose size is limited (`grammars.Vocabulary`).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[str, _CompiledGrammar] = OrderedDict()

    def begin(self, grammar: str) -> LLMatcher | None:
        """Return a matcher for a new answer, or None if the grammar cannot be compiled."""
        known = self._compiled.get(grammar)
        if known is None or known.num_served >= _MOST_SERVED:
            known = self._compiled[grammar] = _CompiledGrammar(self.compile(grammar))
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        known.num_served += 1
        return None if known.beginning is None else known.beginning.deep_copy()

    def compile(self, grammar: str) -> LLMatcher | None:
        """Compile a grammar for a single answer; None if it cannot be compiled."""
        with contextlib.suppress(GrammarError):  # the parent has compiled it
            return self._vocabulary.matcher(grammar)
        return None

    def forget(self, grammar: str) -> None:
        """Recompile a grammar for answers that begin from now on."""
        self._compiled.pop(grammar, None)


class GrammarAnswer:
    """An answer that follows a grammar.

    When the cache that it shares with other answers is full, it continues with a grammar compiled for it alone, so that
    no answer fails because of others.

    Its matcher may be ahead of it, by tokens that must come next: each of them is the only one that its mask allows.
    """

    def __init__(self, grammar: str | None, grammars: CompiledGrammars, text_end_ids: Sequence[int] = ()) -> None:
        """`grammar` None: the answer has failed. `text_end_ids`: those of `Vocabulary`."""
        self._grammar, self._grammars = grammar or "", grammars
        self._text_end_bits = _bits(text_end_ids)
        self._matcher = None if grammar is None else grammars.begin(grammar)
        self._is_alone = False
        """Whether no other answer shares its compiled grammar."""
        self._tokens = array("i")
        """The answer's tokens."""
        self._ahead: list[int] = []
        """The tokens after those that the matcher has consumed, too."""
        self._finds_runs = True

    @property
    def has_failed(self) -> bool:
        """Whether the grammar cannot be followed any further."""
        return self._matcher is None

    def write_mask(self, tokens: list[int], mask: np.ndarray) -> None:
        """Advance by tokens, and write the mask of the next one, unless the answer has failed."""
        ahead = self._ahead
        if tokens and tokens[0] == WHOLE_RUN:
            tokens = ahead + tokens[1:]
        self._tokens.extend(tokens)
        if self._matcher is None:
            return
        if ahead:
            num_met = min(len(tokens), len(ahead))
            if tokens[:num_met] != ahead[:num_met]:
                self._matcher.rollback(len(ahead))
                ahead.clear()
            else:
                del ahead[:num_met]
                tokens = tokens[num_met:]
                if ahead:
                    allow_only(mask, ahead[0])
                    return
        if tokens and not self._matcher.consume_tokens(tokens):
            self._begin_anew()
        if self._matcher is not None and not self._write(mask):
            self._begin_anew()
            if self._matcher is not None and not self._write(mask):
                self._matcher = None

    def find_run(self, mask: np.ndarray) -> list[int]:
        """Return the tokens that must come next, up to `MAX_FORCED_TOKENS`. `mask` is the one just written.

        After the first token llguidance tells them without making masks: a mask allows the first of the tokens that it
        forces, and no other (`TokenParser::compute_mask`). Some masks of a single token are not known this way; they
        end the run, which therefore costs no more than the masks of its tokens would.
        """
        ahead = self._ahead
        if ahead or self._matcher is None or not self._finds_runs:
            return ahead
        token = _only_token(mask)
        while token is not None and not self._matcher.is_stopped():
            if not self._matcher.consume_token(token):
                # The answer fails, if it does, after these tokens and not before.
                ahead.clear()
                self._finds_runs = False
                self._matcher = self._compile()
                break
            ahead.append(token)
            forced = [] if len(ahead) == MAX_FORCED_TOKENS else self._matcher.compute_ff_tokens()
            token = forced[0] if forced else None
        return ahead

    def _write(self, mask: np.ndarray) -> bool:
        """Write the mask of the token after those that the matcher has consumed; return False if it cannot."""
        assert self._matcher is not None
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            return False
        if self._text_end_bits and not self._matcher.is_accepting():
            _hold_back(mask, self._text_end_bits)
        return True

    def _begin_anew(self) -> None:
        """Compile the grammar for this answer alone, unless that was done."""
        self._matcher = None
        if not self._is_alone:
            self._is_alone = True
            self._grammars.forget(self._grammar)
            self._matcher = self._compile()

    def _compile(self) -> LLMatcher | None:
        """Return a matcher of its own, at the current position, or None if there can be none."""
        matcher = self._grammars.compile(self._grammar)
        return matcher if matcher is not None and matcher.consume_tokens(self._tokens.tolist()) else None


class MaskWorker:
    """Builds the masks of some rows."""

    def __init__(
        self, vocabulary: Vocabulary, table: MaskTable, *, first: int = 0, step: int = 1, finds_runs: bool = False
    ) -> None:
        """`table` is the memory; this worker has every `step`-th row from `first` on. `finds_runs`: see `MaskStart`."""
        self._grammars = CompiledGrammars(vocabulary)
        self._text_end_ids = vocabulary.text_end_ids
        self._finds_runs = finds_runs
        self._numbers, self._masks, self._runs = table.numbers, table.masks, table.runs
        self._first, self._step = first, step
        self.is_asleep = table.is_asleep[first : first + 1]
        """[1], as in `MaskTable`."""
        self._at_work = table.at_work[first : first + 1]
        self._next_tokens = table.next_tokens[first::step]
        self._read_tokens = np.zeros_like(self._next_tokens)
        """A copy of `next_tokens` as last read."""
        self._answers: dict[int, GrammarAnswer] = {}
        self._slow_rows: set[int] = set()
        self._fast: deque[WantMask] = deque()
        self._slow: deque[WantMask] = deque()
        self._num_passed = 0
        """Orders that have overtaken the first slow mask."""

    def take(self, orders: MaskOrders) -> None:
        """Queue the work of these orders."""
        has_tokens = self.take_next_tokens()  # of answers that these orders may end
        if orders.ended or orders.begun:
            self._change_answers(orders)
        if orders.wanted and not has_tokens:
            self._put_off_slow_ones()
        for want in orders.wanted:
            self._queue(want)

    def take_next_tokens(self) -> bool:
        """Queue new requests in `MaskTable.next_tokens`; return whether there were any."""
        next_tokens = self._next_tokens.copy()
        places = np.flatnonzero(next_tokens != self._read_tokens)
        if not len(places):
            return False
        self._put_off_slow_ones()
        for place in places.tolist():
            number, token = read_next_token(int(next_tokens[place]))
            row = self._first + place * self._step
            self._queue(WantMask(row, number, [token], is_free=False, held_back=[], opening=None, is_opened=False))
        self._read_tokens = next_tokens
        return True

    def _put_off_slow_ones(self) -> None:
        if self._slow:
            self._num_passed += 1

    def _queue(self, want: WantMask) -> None:
        (self._slow if want.row in self._slow_rows else self._fast).append(want)

    def _change_answers(self, orders: MaskOrders) -> None:
        gone = {*orders.ended, *(new.row for new in orders.begun)}
        self._fast = deque(want for want in self._fast if want.row not in gone)
        self._slow = deque(want for want in self._slow if want.row not in gone)
        for row in gone & self._answers.keys():
            del self._answers[row]
        for new in {new.row: new for new in orders.begun}.values():  # the row's last answer: others began and ended
            self._begin(new)

    def _begin(self, new: FollowGrammar) -> None:
        self._slow_rows.discard(new.row)
        self._at_work[0] = -(new.row + 1)
        self._answers[new.row] = GrammarAnswer(new.grammar, self._grammars, self._text_end_ids)
        self._at_work[0] = 0

    def next_is_urgent(self) -> bool:
        """Whether the next mask should be built before polling for orders."""
        return bool(self._fast) or self._num_passed >= _MOST_PASSED

    @property
    def is_idle(self) -> bool:
        return not self._fast and not self._slow

    def make_next(self) -> None:
        """Build one queued mask."""
        if self._slow and (not self._fast or self._num_passed >= _MOST_PASSED):
            want = self._slow.popleft()
            self._num_passed = 0
        else:
            want = self._fast.popleft()
        began_at = time.perf_counter()
        answer = self._answers[want.row]
        self._at_work[0] = want.row + 1
        self._make(want, answer)
        seconds = time.perf_counter() - began_at
        if self._finds_runs:
            self._find_run(want, answer)
        self._numbers[want.row] = answered(want.number, has_failed=answer.has_failed)
        self._at_work[0] = 0
        if seconds > _SLOW_SECONDS:
            self._slow_rows.add(want.row)
        else:
            self._slow_rows.discard(want.row)

    def _make(self, want: WantMask, answer: GrammarAnswer) -> None:
        if want.is_free:
            self._masks[want.row] = _ALL
        else:
            answer.write_mask(want.tokens, self._masks[want.row])
            if answer.has_failed:
                self._masks[want.row] = _ALL
            if want.opening is not None:
                _let_open(self._masks[want.row], want.opening, is_only=want.is_opened)
        if want.held_back:
            _hold_back(self._masks[want.row], _bits(want.held_back))

    def _find_run(self, want: WantMask, answer: GrammarAnswer) -> None:
        """Write the run that begins with a mask just made, which is empty where the mask is not the grammar's alone."""
        run: list[int] = []
        if not want.is_free and want.opening is None and not want.held_back:
            run = answer.find_run(self._masks[want.row])
        self._runs[want.row, 0] = len(run)
        self._runs[want.row, 1 : 1 + len(run)] = run


def _let_open(mask: np.ndarray, token: int, *, is_only: bool) -> None:
    """Allow a token in a mask of uint32 words, in place, or allow only this token."""
    if is_only:
        mask[:] = 0
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def _only_token(mask: np.ndarray) -> int | None:
    """Return the token that a mask of uint32 words allows, if it is a single one."""
    if np.count_nonzero(mask) != 1:
        return None
    word = int(mask.argmax())
    bits = mask.item(word)
    return None if bits & (bits - 1) else 32 * word + bits.bit_length() - 1


def _bits(token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return each token's word in a mask, and its bit there."""
    return [(token >> 5, 1 << (token & 31)) for token in token_ids]


def _hold_back(mask: np.ndarray, bits: Sequence[tuple[int, int]]) -> None:
    """Forbid the tokens of `bits` in a mask of uint32 words, in place, unless it allows no others."""
    allowed = [(word, bit) for word, bit in bits if mask.item(word) & bit]
    for word, bit in allowed:
        mask[word] &= np.uint32(~bit & 0xFFFFFFFF)
    if allowed and not mask.any():
        for word, bit in allowed:
            mask[word] |= np.uint32(bit)


class OrderReader:
    """Reads the rank's orders."""

    def __init__(self, fd: int, *, stays_awake: bool) -> None:
        self._fd = fd
        self._awake_seconds = _AWAKE_SECONDS if stays_awake else 0.0
        self._decoder = msgspec.msgpack.Decoder(MaskOrders)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def take_next(self, worker: MaskWorker) -> bool:
        """Wait for orders. Poll the memory at first: sending a message to every worker takes the rank longer than a
        poll takes to see a request. Returns False when the rank is gone."""
        awake_until = time.perf_counter() + self._awake_seconds
        try:
            while True:
                is_asleep = bool(worker.is_asleep[0])
                if worker.take_next_tokens():
                    return True
                if self._poll.poll(_NAP_MILLISECONDS if is_asleep else 0):
                    return self._take(worker)
                if time.perf_counter() < awake_until:
                    time.sleep(_LOOK_SECONDS)
                else:
                    worker.is_asleep[0] = True  # and poll again: the rank may not have seen it
        finally:
            worker.is_asleep[0] = False

    def take_some(self, worker: MaskWorker) -> bool:
        """Take orders if there are any; return whether there were."""
        return worker.take_next_tokens() or (bool(self._poll.poll(0)) and self._take(worker))

    def _take(self, worker: MaskWorker) -> bool:
        size = _read(self._fd, 4)
        if size:
            worker.take(self._decoder.decode(_read(self._fd, *struct.unpack("I", size))))
        return bool(size)


def serve(worker: MaskWorker, orders: OrderReader) -> None:
    """Carry out orders until the rank is gone."""
    while True:
        if worker.is_idle:
            if not orders.take_next(worker):
                return
        elif worker.next_is_urgent() or not orders.take_some(worker):
            worker.make_next()


def _read(fd: int, size: int) -> bytes:
    """Read this many bytes; empty at the end of the file."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)
