"""Constraints: the grammars of the answers in a rank's slots, and masks of the tokens that may come next.

A token's mask depends on the token before it, but the model's forward pass for it does not. So a step's forward pass is
launched as usual, before that token is known on the host, and masks are built while it runs: `follow` waits for the
previous step's tokens, and `masks` requests the masks from workers, which use llguidance (`mask_workers.py`). If the
device is faster than the host, `look_ahead` requests them while the host is still launching.

Most masks are ready when the host has to launch the choice of tokens, so that the next forward pass is launched in
time. For the others the device waits, after the forward pass (`kernels/late_masks.py`), and goes on without those that
take too long. A row whose mask is late even then is *held*: the token that the step samples for it is dropped, the
device forgets that it computed the row, and the next step computes it again, with its mask ready by then. The other
rows do not wait, and the answer is the same. If rows cannot be held (`may_hold`), the host waits for all masks. On a
CPU only the host waits.

Only the rank that posts the tokens (`EngineConfig.output_rank`) follows grammars; it tells the others the masks and
which rows are held. A request that re-enters a slot, after a preemption, brings the tokens of its answer along, and its
grammar is followed again from the start.

With `finds_runs`, an answer whose mask allows a single token may be in a run of such tokens, which the step's output
brings along (`StepMasks.runs`): the engine may compute all of them in one step. Until it does, the rank itself writes
their masks, so that the answer goes on token by token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import CONSTRAINT_FAILED, NewSlot, StepInput
from nvcli.core.structured import Constraint
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.worker.masks.answer_table import AnswerTable, FollowedAnswer
from nvcli.worker.masks.forced_runs import ForcedRuns, Runs
from nvcli.worker.masks.mask_memory import MaskMemory
from nvcli.worker.masks.mask_messages import MaskStart, allow_only, answered
from nvcli.worker.masks.mask_patience import Patience, PatienceTimer
from nvcli.worker.masks.mask_rows import num_mask_rows
from nvcli.worker.masks.mask_workers import MaskWorkers
from nvcli.worker.runner.device import own_cores
from nvcli.worker.runner.sampler import TokenMasks
from nvcli.worker.runner.slot_table import unpack_ids

_MIN_WORKERS, _MAX_WORKERS = 2, 32
"""Bounds on the number of workers. The more there are, the fewer masks wait for a slow one."""
_SMALL_VOCABULARY, _LEAST_ANSWERS = 16_384, 16
"""Masks of so few tokens are built so fast that each worker should have at least this many answers: waking another
costs the rank as much as it saves."""
_OTHER_CORES = 3
"""Cores reserved, if there are enough, for the rank, its engine and the parent."""

_LEAST_RUN = 2
"""The fewest tokens of a run that the engine hears of."""
_STEPS_WITHOUT_RUNS = 32
"""Steps without a new run after which outputs no longer wait for any."""
_MOST_NANOSECONDS = 2**31 - 1


@dataclass(slots=True)
class StepMasks:
    """The masks of a step's constrained rows, as the host went on with them, and their outcome."""

    masks: TokenMasks
    """The masks; those of late rows are undefined."""
    rows: np.ndarray
    """[n], the constrained rows among the sampled ones."""
    slots: np.ndarray
    """[n], their slots."""
    wanted: np.ndarray
    """[n] int32: for late masks, the low half of the value that `MaskTable.numbers` will have once they are there; 0
    for the others. On a rank that does not follow grammars none is late."""
    has_failed: np.ndarray
    """[n] bool, rows whose grammars cannot be followed any further; their sampled ids are not tokens."""
    memory: MaskMemory | None
    """The source of late masks; None if none can be late."""
    late_seconds: float = 0.0
    """Seconds that the device may wait for each late mask."""
    runs: ForcedRuns = field(default_factory=lambda: ForcedRuns({}))
    """The tokens that must follow those of the step."""
    late: Tensor | None = None
    """[2, num_sampled] int32, as returned by `take_late_masks`, on the device from the step's choice on, and on the
    host once its tokens are there; None: no mask was late."""

    @property
    def any_late(self) -> bool:
        return bool(self.wanted.any())

    def by_row(self, num_rows: int) -> np.ndarray:
        """Map the sampled rows of a step to their masks and the numbers they wait for: [2, num_rows] int32, as
        `take_late_masks` takes them."""
        found = np.zeros((2, num_rows), dtype=np.int32)
        found[0] = self.masks.by_row(self.rows, num_rows)
        found[1, self.rows] = self.wanted
        return found

    @property
    def patience(self) -> np.ndarray:
        """[2] int32, as `take_late_masks` takes it."""
        nanoseconds = min(_MOST_NANOSECONDS, int(1e9 * self.late_seconds))
        return np.array([np.count_nonzero(self.wanted), nanoseconds], dtype=np.int32)

    @property
    def is_held(self) -> np.ndarray:
        """[n] bool, rows that the step left out; known once its tokens are on the host, as is the rest of the
        outcome."""
        return self._late(0)

    def mark_failures(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a step, with `CONSTRAINT_FAILED` for rows whose grammars cannot be followed any further."""
        failed = self.rows[self.has_failed | self._late(1)]
        if len(failed):
            ids = ids.copy()
            ids[failed] = CONSTRAINT_FAILED
        return ids

    def counts(self, num_rows: int) -> np.ndarray | None:
        """Return the number of tokens of each of a step's rows, [num_rows] int32: none of those that are held. None:
        none is held."""
        held = self.rows[self.is_held]
        if not len(held):
            return None
        counts = np.ones(num_rows, dtype=np.int32)
        counts[held] = 0
        return counts

    def _late(self, kind: int) -> np.ndarray:
        if self.late is None:
            return np.zeros(len(self.rows), dtype=np.bool_)
        found: np.ndarray = self.late[kind].numpy()[self.rows] > 0
        return found


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Tokens that a step sampled for constrained rows, on their way to the host."""

    ids: Tensor
    """[num_sampled] int32 on the host, complete at the event."""
    event: torch.cuda.Event | None
    """Completion event; None: already complete."""
    masks: StepMasks
    """The masks, whose outcome is complete with the ids."""
    rows: np.ndarray
    """[n], the answers' rows in the mask memory."""
    num_tokens: np.ndarray
    """[n], the number of tokens of each steady answer, without the step's."""

    @property
    def is_there(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Constraints:
    """The constrained answers of one rank."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        device: torch.device,
        *,
        follows: bool,
        may_hold: bool,
        token_ids: Tensor,
        workers: MaskWorkers | None,
    ) -> None:
        """`vocab_size` is the number of the model's logits. `follows`: whether this rank follows grammars. `may_hold`:
        whether a step may leave rows out. `token_ids` are the tokens of all slots (`SlotState`). `workers` build the
        masks, if they were started early (`start_workers`)."""
        self.may_hold = may_hold
        self._config, self._vocab_size, self._device = config, vocab_size, device
        self._follows = follows
        self._token_ids = token_ids
        self._awaits_runs = config.overlap_steps and config.pipeline_parallel_size == 1
        """Whether outputs may wait for runs, while the device computes the next step."""
        self._num_without_runs = 0
        """Steps since a run began."""
        self._previous: _Chosen | None = None
        """The last choice."""
        self._answers = AnswerTable(config.max_num_seqs, num_mask_rows(config.max_num_seqs))
        self._chosen: deque[_Chosen] = deque()
        self._timer = PatienceTimer(device)
        self._workers = workers
        self._note = ""
        self._num_noted = 0
        self.memory: MaskMemory | None = None
        """The masks of all steps, once the first constrained request has come; None until then, if the tokens cannot be
        loaded, and on ranks that do not follow grammars."""

    def concerns(self, step: StepInput) -> bool:
        """Whether `begin` and `follow` have something to do for a step."""
        return self._follows and bool(len(self._answers) or step.constraints)

    def look_ahead(self) -> None:
        """Request the next masks of answers whose last tokens are on the host already. Call it as soon as a step
        arrives: if the device is faster than the host, masks are built while the host launches the step."""
        while self._chosen and self._chosen[0].is_there:
            self._take(self._chosen.popleft())
        if self._workers is not None and len(due := self._answers.due_rows()):
            self._want(due)

    def begin(self, step: StepInput) -> None:
        """Note that the step's forward pass is about to be launched."""
        self.look_ahead()
        self._timer.before_forward(has_chunks=step.num_decodes < step.num_rows)

    def follow(self, step: StepInput) -> None:
        """Take in the tokens of earlier steps, waiting for them, and the new step's slots and tokens.

        Call it once the step's forward pass is launched.
        """
        self._timer.launched()
        while self._chosen:
            chosen = self._chosen.popleft()
            if chosen.event is not None:
                chosen.event.synchronize()
            self._take(chosen)
        self._timer.tokens_came()
        for slot in unpack_ids(step.freed_slots).tolist():
            self._leave(slot)
        if step.constraints:
            self._enter(step.new_slots, step.constraints)
        if step.token_ids and len(self._answers):
            self._take_known(step)

    def masks(self, slots: np.ndarray, num_rows: int, may_force: np.ndarray, places: np.ndarray) -> StepMasks:
        """Make the masks of the next tokens of constrained answers in `slots` [n], which are among the `num_rows` rows
        that the step samples, at `places` [n]. `may_force` [n] bool: which answers choose a token that a mask alone
        allows, whatever else they ask for, and without its log-probability."""
        if self.memory is None or self._workers is None:
            anything = TokenMasks.allowing_all(len(slots), ceil_div(self._vocab_size, 32), self._device)
            has_failed = np.full(len(slots), self._follows)
            return StepMasks(anything, places, slots, np.zeros(len(slots), dtype=np.int32), has_failed, memory=None)
        rows = self._answers.rows(slots)
        self._want(rows)
        patience = self._timer.patience() if self.may_hold else None
        while True:
            wanted = answered(self._answers.wanted[rows], has_failed=False)
            self._workers.wait(rows, wanted, num_rows, self._on_host(patience))
            if not self._workers.ended:
                break
            self._replace(self._workers.ended)
            self._want(rows)
        self._timer.went_on()
        found = self._workers.table.numbers[rows]
        is_late = found < wanted
        runs = self._find_runs(rows, places, may_force & ~is_late & (found % 2 == 0))
        self.memory.bring(rows)
        low = wanted.astype(np.int32)
        low[low == 0] = 1  # after 2**31 masks of a row: 0 would mean that it is there
        return StepMasks(
            TokenMasks(self.memory.masks, rows),
            places,
            slots,
            wanted=np.where(is_late, low, 0),
            has_failed=~is_late & (found % 2 == 1),
            memory=self.memory,
            late_seconds=0.0 if patience is None else patience.step_seconds / num_rows,
            runs=runs,
        )

    def _find_runs(self, rows: np.ndarray, places: np.ndarray, may_begin: np.ndarray) -> ForcedRuns:
        """Begin the runs of answers in rows [n], of which those that `may_begin` [n] have just got their masks, and
        write the masks inside runs. Returns the runs for the step, whose sampled rows are at `places` [n], and
        completes those of the previous step."""
        answers = self._answers
        if not self._config.finds_runs:
            return ForcedRuns({})
        assert self._workers is not None
        table = self._workers.table
        for row in rows[answers.is_in_run[rows]].tolist():
            allow_only(table.masks[row], answers.rest_of_run(row)[0])
        is_new = may_begin & (table.runs[rows, 0] >= _LEAST_RUN) & answers.may_begin_run(rows)
        for row in rows[is_new].tolist():
            answers.begin_run(row, table.run(row))
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.masks.runs.complete(self._runs_behind(previous, rows[is_new]))
        self._num_without_runs = 0 if is_new.any() else self._num_without_runs + 1
        is_inside = answers.is_in_run[rows]
        known = {
            place: answers.rest_of_run(row)[1:]
            for row, place in zip(rows[is_inside].tolist(), places[is_inside].tolist(), strict=True)
        }
        waits = self._awaits_runs and self._num_without_runs < _STEPS_WITHOUT_RUNS
        return ForcedRuns(known, wait_seconds=self._timer.spare_seconds if waits else 0.0)

    def _runs_behind(self, chosen: _Chosen, rows: np.ndarray) -> Runs:
        """Return the new runs in rows [n] that follow tokens of an earlier choice immediately."""
        if not len(rows):
            return {}
        is_next = (self._answers.num_tokens[chosen.rows] == chosen.num_tokens + 1) & np.isin(chosen.rows, rows)
        found = zip(chosen.rows[is_next].tolist(), chosen.masks.rows[is_next].tolist(), strict=True)
        return {place: self._answers.rest_of_run(row) for row, place in found}

    def record_choice(self, ids: Tensor, masks: StepMasks) -> None:
        """Record a step's sampled tokens: ids [num_sampled] int32, on the host or on their way there, as is the outcome
        of the masks. Call it even if all of the constrained rows are held."""
        if not self._follows:
            return
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        rows = self._answers.rows(masks.slots)
        chosen = _Chosen(ids, event, masks, rows, self._answers.num_tokens[rows])
        self._chosen.append(chosen)
        self._previous = chosen

    def _take(self, chosen: _Chosen) -> None:
        """Take in tokens that have reached the host."""
        is_given = ~chosen.masks.is_held
        ids = chosen.ids.numpy()[chosen.masks.rows[is_given]]
        self._answers.take(chosen.rows[is_given], ids.astype(np.int64))

    def _want(self, rows: np.ndarray) -> None:
        """Request the masks of rows [n] that have not been requested yet."""
        assert self._workers is not None
        due, orders = self._answers.want(rows)
        for order in orders:
            self._workers.want(order)
        if len(due):
            self._workers.want_next(due, self._answers.wanted[due], self._answers.last_tokens[due])
        self._workers.send()

    def take_note(self) -> str:
        """Return a note for the user, once; empty if there is none."""
        note, self._note = self._note, ""
        return note

    def _replace(self, numbers: Sequence[int]) -> None:
        """Replace workers that have died, and follow their answers again from the start."""
        assert self._workers is not None

        def tokens_of(slot: int, start: int, end: int) -> list[int]:
            tokens: list[int] = self._token_ids[slot, start:end].tolist()
            return tokens

        for number in numbers:
            rows, how = self._workers.replace(number)
            for row in rows:
                is_there = int(self._workers.table.numbers[row]) >= answered(
                    int(self._answers.wanted[row]), has_failed=False
                )
                self._answers.follow_anew(row, tokens_of, has_mask=is_there)
            self._num_noted += 1
            if self._num_noted == 1:
                self._note = (
                    f"warning: a process that makes the masks of structured answers {how}; it was "
                    "replaced, and its answers go on. Further replacements are not reported"
                )

    # ------------------------------------------------------------------ entering and leaving

    def _enter(self, new_slots: Sequence[NewSlot], constraints: Sequence[Constraint]) -> None:
        """Begin the constrained answers among new slots."""
        if self.memory is None:
            self._load(constraints[0].end_ids)
        for new in new_slots:
            if new.constraint is not None:
                assert self._workers is not None, "they were loaded"
                constraint = constraints[new.constraint]
                row = self._workers.begin(constraint.grammar)
                self._answers.enter(new.slot, FollowedAnswer(row, constraint, new.sampling))

    def _load(self, end_ids: Sequence[int]) -> None:
        """Wait for the workers; all requests to a model have the same end-of-sequence ids."""
        if self._workers is None or self._workers.end_ids != [*end_ids]:
            self._workers = start_workers(self._config, self._vocab_size, end_ids, self._device)
        self._answers.use_end_ids(end_ids)
        table = self._workers.wait_ready()
        if table is not None:
            self.memory = MaskMemory(table, self._device, num_logits=self._vocab_size)

    def _leave(self, slot: int) -> None:
        """End the answer in a slot, if it is constrained."""
        row = self._answers.leave(slot)
        if row is not None and self._workers is not None:
            self._workers.end(row)

    # ------------------------------------------------------------------ following

    def _take_known(self, step: StepInput) -> None:
        """Take in tokens that the step brings and that were not sampled here since the answers entered."""
        ids = unpack_ids(step.token_ids)
        spans = (unpack_ids(step.token_slots), unpack_ids(step.token_starts), unpack_ids(step.token_counts))
        first = 0
        for slot, start, count in zip(*(span.tolist() for span in spans), strict=True):
            self._answers.take_known(slot, start, ids[first : first + count])
            first += count

    def _on_host(self, patience: Patience | None) -> Patience | None:
        """Return the host's part of a step's patience; a GPU waits longer on its own."""
        if patience is None or self._device.type == "cpu":
            return patience
        return replace(patience, step_seconds=0.0)


def start_workers(config: EngineConfig, vocab_size: int, end_ids: Sequence[int], device: torch.device) -> MaskWorkers:
    """Begin to start a rank's mask workers, which take most of a second to load the tokens."""
    max_answers, num_free = config.max_num_seqs, own_cores(device) - _OTHER_CORES
    num_useful = max_answers if vocab_size > _SMALL_VOCABULARY else max_answers // _LEAST_ANSWERS
    num_workers = min(_MAX_WORKERS, max(_MIN_WORKERS, min(num_free, num_useful)), max_answers)
    return MaskWorkers(
        MaskStart(
            model_path=str(config.model_path),
            vocab_size=vocab_size,
            end_ids=[*end_ids],
            num_rows=num_mask_rows(max_answers),
            num_workers=num_workers,
            stays_awake=num_workers <= num_free,
            finds_runs=config.finds_runs,
        )
    )
