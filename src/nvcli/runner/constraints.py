"""Constraints: the grammars of the answers in a rank's slots, and masks of the tokens that may come next.

The mask of a token depends on the token before it, but the model's work on that token does not. So a step's forward
pass is launched like any other, before the token is known here, and masks are made while it runs: `follow` waits for
the tokens of the step before, and `masks` has threads ask llguidance for the allowed ones (`mask_maker.py`).

Most masks are ready before the forward pass is over, and a few are late. A row whose mask is late is *held*: what the
step samples for it is dropped, the device forgets that it computed the row, and the next step computes it again, with
the mask that is ready by then. So the other rows do not wait, and the answer is the same. Where rows cannot be held
(`may_hold`), the step waits for all masks.

Only the rank that posts the tokens (`EngineConfig.output_rank`) follows grammars; the others get its masks, and which
rows are held. A request that enters a slot again, after a preemption, brings the tokens of its answer along, and its
grammar is followed anew.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nvcli.grammars import GrammarError, Vocabulary
from nvcli.messages import CONSTRAINT_FAILED, NewSlot, SlotConstraint, StepInput
from nvcli.runner.followed_answer import FollowedAnswer
from nvcli.runner.forward_timer import ForwardTimer
from nvcli.runner.grammar_copies import GrammarCopies, GrammarCopy
from nvcli.runner.mask_maker import MaskMaker, Patience
from nvcli.runner.mask_memory import MaskMemory
from nvcli.runner.prepared_vocabulary import PreparedVocabulary
from nvcli.runner.slot_table import unpack_ids

_COMPILE_THREADS = 8
_LAUNCH_SECONDS = 0.5e-3
"""The time that the host takes on a GPU from a step's masks until the next step's forward pass is launched. Masks are
to be there so long before the forward pass is over, or the device waits."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step's constrained rows."""

    masks: Tensor
    """[n, W] int32 on the device, a bit for each logit (`kernels.token_mask`); anything in rows that are held."""
    is_held: np.ndarray
    """[n] bool, the rows that the step is to leave out. False for all on a rank that does not follow grammars."""
    has_failed: np.ndarray
    """[n] bool, the rows whose grammars cannot be followed any further. What is chosen for them is no token."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The tokens that a step chose for constrained rows, on their way to the host."""

    ids: Tensor
    """[num_sampled] int32 on the host, complete at the event."""
    event: torch.cuda.Event | None
    """None: they are complete."""
    rows: list[tuple[int, FollowedAnswer]]


class Constraints:
    """The constrained answers of one rank."""

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        device: torch.device,
        *,
        max_answers: int,
        follows: bool,
        may_hold: bool,
        prepared: PreparedVocabulary | None = None,
    ) -> None:
        """`vocab_size` is the number of the model's logits, and `max_answers` the number of slots. `follows`: whether
        this rank is the one that follows grammars. `may_hold`: whether a step may leave rows out. `prepared` is the
        vocabulary, if it is loaded ahead."""
        self.may_hold = may_hold
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._device = device
        self._max_answers = max_answers
        self._follows = follows
        self._prepared = prepared
        self._num_words = -(-vocab_size // 32)
        self._answers: dict[int, FollowedAnswer] = {}
        """The constrained answers by slot."""
        self._leaving: list[FollowedAnswer] = []
        """Answers that have left their slots and may still be in work."""
        self._chosen: deque[_Chosen] = deque()
        self._timer = ForwardTimer(device)
        self._free_since = 0.0
        """The `time.perf_counter()` at which the device began the forward pass that was launched last."""
        self._copies = GrammarCopies(max_answers=max_answers)
        self._vocabulary: Vocabulary | None = None
        self._memory: MaskMemory | None = None
        """This and the next are there once the first constrained request has come."""
        self._maker: MaskMaker | None = None

    def concerns(self, step: StepInput) -> bool:
        """Whether `begin` and `follow` have something to do for a step."""
        return self._follows and bool(self._answers or step.grammars)

    def begin(self, step: StepInput) -> None:
        """Note that the step's forward pass is launched next."""
        self._timer.start(has_chunks=step.num_decodes < step.num_rows)

    def follow(self, step: StepInput) -> None:
        """Take in the tokens of the steps before, for which it waits, and the step's slots and tokens.

        Call it when the step's forward pass is launched.
        """
        self._timer.stop()
        while self._chosen:
            chosen = self._chosen.popleft()
            if chosen.event is not None:
                chosen.event.synchronize()
            ids = chosen.ids.tolist()
            for row, answer in chosen.rows:
                answer.take(ids[row])
        self._free_since = time.perf_counter()
        for slot in unpack_ids(step.freed_slots).tolist():
            self._leave(slot)
        if step.grammars:
            self._enter(step.new_slots, step.grammars)
        if step.token_ids and self._answers:
            self._take_known(step)

    def masks(self, slots: np.ndarray, num_rows: int, upload: Callable[..., tuple[Tensor, ...]]) -> StepMasks:
        """Make the masks of the next tokens of constrained answers in `slots` [n], which are among the `num_rows` rows
        that the step samples. `upload` is the rank's `Uploader`."""
        if not self._follows:
            masks = torch.empty(len(slots), self._num_words, dtype=torch.int32, device=self._device)
            none = np.zeros(len(slots), dtype=np.bool_)
            return StepMasks(masks, is_held=none, has_failed=none)
        answers = [self._answers[slot] for slot in slots.tolist()]
        memory = self._make(answers, num_rows)
        held = [not answer.is_ready for answer in answers]
        failed = [answer.has_failed for answer in answers]
        rows = np.array([answer.mask_row for answer in answers], dtype=np.int64)
        return StepMasks(
            memory.on_device(rows, self._num_words, upload), is_held=np.array(held), has_failed=np.array(failed)
        )

    def chose(self, ids: Tensor, slots: np.ndarray, rows: np.ndarray) -> None:
        """Note the tokens that a step chose: ids [num_sampled] int32 on the host, or on their way there; `rows` [n] of
        them are those of constrained answers, in `slots` [n], that were not held. Call it even if there are none."""
        if not self._follows:
            return
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        answers = [self._answers[slot] for slot in slots.tolist()]
        self._chosen.append(_Chosen(ids, event, list(zip(rows.tolist(), answers, strict=True))))

    # ------------------------------------------------------------------ entering and leaving

    def _enter(self, new_slots: Sequence[NewSlot], grammars: Sequence[str]) -> None:
        """Begin the constrained answers among those of new slots."""
        if self._memory is None:
            self._load(next(new.constraint.end_ids for new in new_slots if new.constraint is not None))
        self._compile([copy for grammar in grammars if (copy := self._copies.first(grammar)) is not None])
        for new in new_slots:
            if new.constraint is not None:
                self._answers[new.slot] = self._begin(new, new.constraint, grammars[new.constraint.grammar])
        self._copies.drop_oldest()

    def _begin(self, new: NewSlot, constraint: SlotConstraint, grammar: str) -> FollowedAnswer:
        return FollowedAnswer(
            constraint=constraint,
            copy=self._copies.take(grammar),
            mask_row=self._take_row(),
            prompt_len=new.sampling.prompt_len,
            min_tokens=new.sampling.min_tokens,
            end_ids=frozenset(constraint.end_ids),
            is_free=bool(constraint.starts_after) and not constraint.opens_with,
            num_opening=0 if constraint.starts_after and constraint.opens_with else None,
            last_ids=deque(maxlen=len(constraint.starts_after)),
            has_failed=self._vocabulary is None,
        )

    def _load(self, end_ids: Sequence[int]) -> None:
        """Load the model's tokens, and begin the threads; every request of a model has the same end-of-sequence
        ids."""
        self._vocabulary = None if self._prepared is None else self._prepared.take(end_ids)
        if self._vocabulary is None:
            with contextlib.suppress(GrammarError):  # the file has changed since the parent read it: answers fail
                self._vocabulary = Vocabulary.load(self._model_path, vocab_size=self._vocab_size, end_ids=end_ids)
        num_words = self._num_words if self._vocabulary is None else self._vocabulary.num_words
        self._memory = MaskMemory(self._max_answers, num_words, self._device)
        if self._vocabulary is not None:
            num_shares = torch.cuda.device_count() if self._device.type == "cuda" else 1
            num_cores = len(os.sched_getaffinity(0)) // num_shares  # other GPUs may have ranks of their own
            self._maker = MaskMaker(self._vocabulary, self._memory.words, num_cores=num_cores)

    def _compile(self, copies: Sequence[GrammarCopy]) -> None:
        """Compile the first copies of grammars. llguidance lets other threads run meanwhile."""
        vocabulary = self._vocabulary
        if vocabulary is None or not copies:
            return
        with ThreadPoolExecutor(min(_COMPILE_THREADS, len(copies))) as pool:
            list(pool.map(lambda copy: copy.compile(vocabulary), copies))

    def _leave(self, slot: int) -> None:
        """End the answer in a slot, if it is constrained."""
        answer = self._answers.pop(slot, None)
        if answer is not None:
            if self._maker is not None:
                self._maker.abandon(answer)
            self._leaving.append(answer)

    def _take_row(self) -> int:
        """Return a row of the masks that no thread writes."""
        assert self._memory is not None
        while True:
            for answer in self._leaving:
                if not answer.is_in_work:
                    self._memory.give_back(answer.mask_row)
                    self._copies.give_back(answer.copy)
            self._leaving = [answer for answer in self._leaving if answer.is_in_work]
            row = self._memory.take_row()
            if row is not None:
                return row
            assert self._maker is not None
            self._maker.wait(self._leaving[:1], 1, None)

    # ------------------------------------------------------------------ following

    def _take_known(self, step: StepInput) -> None:
        """Take in the tokens of answers that the step brings and that were not chosen here since they entered."""
        ids = unpack_ids(step.token_ids)
        spans = (unpack_ids(step.token_slots), unpack_ids(step.token_starts), unpack_ids(step.token_counts))
        first = 0
        for slot, start, count in zip(*(span.tolist() for span in spans), strict=True):
            answer = self._answers.get(slot)
            if answer is not None:
                if answer.is_in_work and self._maker is not None:
                    self._maker.wait([answer], 1, None)
                begin = answer.prompt_len + answer.num_tokens
                for token in ids[first + max(0, begin - start) : first + count].tolist():
                    answer.take(token)
            first += count

    def _make(self, answers: Sequence[FollowedAnswer], num_rows: int) -> MaskMemory:
        """Have the masks of answers made, and wait for them as long as that pays. Those that are not ready then are in
        work."""
        assert self._memory is not None
        due: list[FollowedAnswer] = []
        for answer in answers:
            if answer.is_ready or answer.is_in_work:
                continue
            if answer.is_over or answer.has_failed:  # nothing that is chosen for it counts
                answer.is_ready = True
            elif answer.is_free:
                answer.make_free_mask(self._memory.words[answer.mask_row])
            else:
                due.append(answer)
        if self._maker is not None:
            self._maker.begin(due)
            self._maker.wait(answers, num_rows, self._patience())
        return self._memory

    def _patience(self) -> Patience | None:
        seconds = self._timer.seconds()
        if not self.may_hold or seconds is None:
            return None
        busy = max(0.0, seconds - _LAUNCH_SECONDS) if self._device.type == "cuda" else 0.0
        return Patience(self._free_since + busy, seconds)


def with_failures(ids: np.ndarray, failed_rows: np.ndarray) -> np.ndarray:
    """Return ids with `CONSTRAINT_FAILED` in these rows."""
    ids = ids.copy()
    ids[failed_rows] = CONSTRAINT_FAILED
    return ids
