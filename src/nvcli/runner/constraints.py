"""Constraints: the grammars of the answers in a rank's slots, and masks of the tokens that may come next.

The mask of a token depends on the token before it, but the model's work on that token does not. So a step's forward
pass is launched like any other, before the token is known here, and masks are made while it runs: `follow` waits for
the tokens of the step before, and `masks` has processes ask llguidance for the allowed ones (`mask_workers.py`).

Most masks are ready before the forward pass is over, and a few are late. A row whose mask is late is *held*: what the
step samples for it is dropped, the device forgets that it computed the row, and the next step computes it again, with
the mask that is ready by then. So the other rows do not wait, and the answer is the same. Where rows cannot be held
(`may_hold`), the step waits for all masks.

Only the rank that posts the tokens (`EngineConfig.output_rank`) follows grammars; the others get its masks, and which
rows are held. A request that enters a slot again, after a preemption, brings the tokens of its answer along, and its
grammar is followed anew.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nvcli.control_group import container_cores
from nvcli.messages import CONSTRAINT_FAILED, NewSlot, SlotConstraint, StepInput
from nvcli.runner.followed_answer import FollowedAnswer
from nvcli.runner.forward_timer import ForwardTimer
from nvcli.runner.mask_memory import MaskMemory
from nvcli.runner.mask_messages import answered
from nvcli.runner.mask_workers import MaskWorkers, Patience
from nvcli.runner.slot_table import unpack_ids

_MIN_WORKERS, _MAX_WORKERS = 2, 32
"""The more processes there are, the fewer masks wait for a slow one."""
_OTHER_CORES = 3
"""The rank, its engine and the parent have cores of their own where there are enough."""
_FIRST_LAUNCH_SECONDS = 1e-3


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
        workers: MaskWorkers | None = None,
    ) -> None:
        """`vocab_size` is the number of the model's logits, and `max_answers` the number of slots. `follows`: whether
        this rank is the one that follows grammars. `may_hold`: whether a step may leave rows out. `workers` make the
        masks, if they are started ahead (`start_workers`)."""
        self.may_hold = may_hold
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._device = device
        self._max_answers = max_answers
        self._follows = follows
        self._num_words = -(-vocab_size // 32)
        self._answers: dict[int, FollowedAnswer] = {}
        """The constrained answers by slot."""
        self._free_rows = list(range(max_answers - 1, -1, -1))
        """The rows of the masks that no answer has."""
        self._wanted = [0] * max_answers
        """The number of the last mask that the last answer in each row asked for."""
        self._chosen: deque[_Chosen] = deque()
        self._timer = ForwardTimer(device)
        self._free_since = 0.0
        """The `time.perf_counter()` at which the device began the forward pass that was launched last."""
        self._waited_at: float | None = None
        """The `time.perf_counter()` at which the last step went on with its masks, if no step has come since."""
        self._launch_seconds = _FIRST_LAUNCH_SECONDS
        """The time that the host takes from a step's masks until the next step's forward pass is launched. Masks are to
        be there so long before the forward pass is over, or the device waits."""
        self._workers = workers
        self._memory: MaskMemory | None = None
        """The masks, once the first constrained request has come; None then: the tokens cannot be loaded."""

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
        if self._waited_at is not None:
            # There may have been no step to launch for a while.
            self._launch_seconds = min(time.perf_counter() - self._waited_at, 2 * self._launch_seconds)
            self._waited_at = None
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
        if self._memory is None or self._workers is None:
            masks = torch.full((len(slots), self._num_words), -1, dtype=torch.int32, device=self._device)
            none = np.zeros(len(slots), dtype=np.bool_)
            return StepMasks(masks, is_held=none, has_failed=~none)
        for answer in answers:
            if answer.is_due:
                self._workers.want(answer.want_mask())
        self._workers.send()
        rows = np.array([answer.row for answer in answers], dtype=np.int64)
        wanted = np.array([answered(answer.wanted, has_failed=False) for answer in answers], dtype=np.int64)
        self._workers.wait(rows, wanted, num_rows, self._patience())
        self._waited_at = time.perf_counter()
        found = self._workers.answered[rows]
        return StepMasks(
            self._memory.on_device(rows, self._num_words, upload), is_held=found < wanted, has_failed=found % 2 == 1
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
        for new in new_slots:
            if new.constraint is not None:
                self._answers[new.slot] = self._begin(new, new.constraint, grammars[new.constraint.grammar])

    def _begin(self, new: NewSlot, constraint: SlotConstraint, grammar: str) -> FollowedAnswer:
        row = self._free_rows.pop()
        if self._memory is not None and self._workers is not None:
            self._workers.begin(row, grammar)
        return FollowedAnswer(
            constraint=constraint,
            row=row,
            wanted=self._wanted[row],
            prompt_len=new.sampling.prompt_len,
            min_tokens=new.sampling.min_tokens,
            end_ids=frozenset(constraint.end_ids),
            is_free=bool(constraint.starts_after) and not constraint.opens_with,
            num_opening=0 if constraint.starts_after and constraint.opens_with else None,
            last_ids=deque(maxlen=len(constraint.starts_after)),
        )

    def _load(self, end_ids: Sequence[int]) -> None:
        """Wait for the processes that make masks; every request of a model has the same end-of-sequence ids."""
        if self._workers is None or self._workers.end_ids != [*end_ids]:
            self._workers = start_workers(
                self._model_path, self._vocab_size, end_ids, self._device, max_answers=self._max_answers
            )
        num_words = self._workers.wait_ready()
        if num_words:
            assert self._workers.memory is not None
            self._memory = MaskMemory(self._workers.memory, self._max_answers, num_words, self._device)

    def _leave(self, slot: int) -> None:
        """End the answer in a slot, if it is constrained."""
        answer = self._answers.pop(slot, None)
        if answer is not None:
            self._wanted[answer.row] = answer.wanted
            self._free_rows.append(answer.row)
            if self._memory is not None and self._workers is not None:
                self._workers.end(answer.row)

    # ------------------------------------------------------------------ following

    def _take_known(self, step: StepInput) -> None:
        """Take in the tokens of answers that the step brings and that were not chosen here since they entered."""
        ids = unpack_ids(step.token_ids)
        spans = (unpack_ids(step.token_slots), unpack_ids(step.token_starts), unpack_ids(step.token_counts))
        first = 0
        for slot, start, count in zip(*(span.tolist() for span in spans), strict=True):
            answer = self._answers.get(slot)
            if answer is not None:
                begin = answer.prompt_len + answer.num_tokens
                for token in ids[first + max(0, begin - start) : first + count].tolist():
                    answer.take(token)
            first += count

    def _patience(self) -> Patience | None:
        seconds = self._timer.seconds()
        if not self.may_hold or seconds is None:
            return None
        busy = max(0.0, seconds - self._launch_seconds) if self._device.type == "cuda" else 0.0
        return Patience(self._free_since + busy, seconds)


def start_workers(
    model_path: Path, vocab_size: int, end_ids: Sequence[int], device: torch.device, *, max_answers: int
) -> MaskWorkers:
    """Begin to start the processes that make a rank's masks. It takes them most of a second to load the tokens."""
    num_shares = torch.cuda.device_count() if device.type == "cuda" else 1
    num_cores = min(float(len(os.sched_getaffinity(0))), container_cores() or math.inf)
    num_free = int(num_cores / num_shares) - _OTHER_CORES  # other GPUs may have ranks of their own
    return MaskWorkers(
        model_path,
        vocab_size=vocab_size,
        end_ids=end_ids,
        num_rows=max_answers,
        num_workers=min(_MAX_WORKERS, max(_MIN_WORKERS, num_free), max_answers),
    )


def with_failures(ids: np.ndarray, failed_rows: np.ndarray) -> np.ndarray:
    """Return ids with `CONSTRAINT_FAILED` in these rows."""
    ids = ids.copy()
    ids[failed_rows] = CONSTRAINT_FAILED
    return ids
