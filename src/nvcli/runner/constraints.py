"""Constraints: the grammars of the answers in a rank's slots, and masks of the tokens that may come next.

The mask of a token depends on the token before it, but the model's work on that token does not. So a step's forward
pass is launched like any other, before the token is known here, and masks are made while it runs: `follow` waits for
the tokens of the step before, and `masks` asks llguidance for the allowed ones, on all cores at a time. What samples
the step then waits for the masks, if they are not done by then. No request is held back, and nothing else waits.

Only the rank that posts the tokens (`EngineConfig.output_rank`) follows grammars; the others get its masks. A request
that enters a slot again, after a preemption, brings the tokens of its answer along, and its grammar is followed anew.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nvcli.grammars import GrammarError, Vocabulary
from nvcli.messages import CONSTRAINT_FAILED, NewSlot, SlotConstraint, StepInput
from nvcli.runner.prepared_vocabulary import PreparedVocabulary
from nvcli.runner.slot_table import unpack_ids

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MAX_COMPILED = 256
"""Compiled grammars that are kept, those that were used last."""
_COMPILE_THREADS = 8
_FEW_TOKENS = 32
"""So many tokens are taken in right here, a microsecond each: waking other threads takes longer."""
_ALL = np.uint32(0xFFFFFFFF)
"""A word of a mask that forbids nothing."""


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer, and how far it has followed its grammar."""

    constraint: SlotConstraint
    matcher: LLMatcher | None
    """None once it has failed."""
    prompt_len: int
    min_tokens: int
    end_ids: frozenset[int]
    is_free: bool
    """Whether it is in its free part: the mark behind which the constraint begins is still to come."""
    num_opening: int | None
    """The tokens of the mark that begins the free part that have come; None: that is decided."""
    num_tokens: int = 0
    is_over: bool = False
    """Whether it has ended; what is still chosen for it is dropped."""
    last_ids: deque[int] = field(default_factory=deque)
    """While it is free, the last tokens, as many as the mark has."""

    @property
    def next_opening(self) -> int | None:
        """The token that begins the free part, or goes on with beginning it; None: no token does now."""
        return None if self.num_opening is None else self.constraint.opens_with[self.num_opening]

    def take_free(self, token: int) -> bool:
        """Take a token that belongs to the free part or to the marks around it; False: it does not."""
        if self.num_opening is not None:
            if token != self.next_opening:
                self.num_opening = None
                return False
            self.num_opening += 1
            if self.num_opening == len(self.constraint.opens_with):
                self.num_opening, self.is_free = None, True
            return True
        if not self.is_free:
            return False
        self.last_ids.append(token)
        self.is_free = list(self.last_ids) != self.constraint.starts_after
        self.is_over = token in self.end_ids
        return True


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The tokens that a step chose for constrained rows, on their way to the host."""

    ids: Tensor
    """[num_sampled] int32 on the host, complete at the event."""
    event: torch.cuda.Event | None
    """None: they are complete."""
    rows: list[tuple[int, _Answer]]


class Constraints:
    """The constrained answers of one rank."""

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        device: torch.device,
        *,
        follows: bool,
        prepared: PreparedVocabulary | None = None,
    ) -> None:
        """`vocab_size` is the number of the model's logits. `follows`: whether this rank is the one that follows
        grammars. `prepared` is the vocabulary, if it is loaded ahead."""
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._device = device
        self._follows = follows
        self._prepared = prepared
        self._num_words = -(-vocab_size // 32)
        self._answers: dict[int, _Answer] = {}
        """The constrained answers by slot."""
        self._chosen: deque[_Chosen] = deque()
        self._executor: LLExecutor | None = None
        """This and the vocabulary are there once the first constrained request has come."""
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher | None] = OrderedDict()
        """Matchers at the beginning of an answer by grammar, to be copied; None: it cannot be compiled."""
        self._staging = torch.empty(0, 0, dtype=torch.int32)
        """Masks on the host, [rows, words of llguidance's masks], pinned on a GPU. Its last copy to the device is over
        when it is written again, because `follow` has waited for what was sampled behind it."""

    def concerns(self, step: StepInput) -> bool:
        """Whether `follow` has something to do for a step."""
        return self._follows and bool(self._answers or step.grammars)

    def follow(self, step: StepInput) -> None:
        """Take in the tokens of the steps before, for which it waits, and the step's slots and tokens.

        Call it when the step's forward pass is launched.
        """
        while self._chosen:
            chosen = self._chosen.popleft()
            if chosen.event is not None:
                chosen.event.synchronize()
            ids = chosen.ids.tolist()
            self._take([(answer, ids[row]) for row, answer in chosen.rows])
        for slot in unpack_ids(step.freed_slots).tolist():
            self._answers.pop(slot, None)
        if step.grammars:
            self._enter(step.new_slots, step.grammars)
        if step.token_ids and self._answers:
            self._take_known(step)

    def masks(self, slots: np.ndarray) -> Tensor:
        """Return the masks of the next tokens of constrained answers: [n] slots → [n, W] int32 on the device, a bit for
        each logit (`kernels.token_mask`). A rank that does not follow grammars returns memory for them."""
        masks = torch.empty(len(slots), self._num_words, dtype=torch.int32, device=self._device)
        if self._follows:
            masks.copy_(self._fill([self._answers[slot] for slot in slots.tolist()]), non_blocking=True)
        return masks

    def failed_rows(self, slots: np.ndarray, rows: np.ndarray) -> list[int]:
        """Return those of `rows` [n], of answers in `slots` [n], whose grammars cannot be followed any further. What is
        chosen for them is no token (`CONSTRAINT_FAILED`)."""
        if not self._follows:
            return []
        pairs = zip(slots.tolist(), rows.tolist(), strict=True)
        return [row for slot, row in pairs if self._answers[slot].matcher is None]

    def chose(self, ids: Tensor, slots: np.ndarray, rows: np.ndarray) -> None:
        """Note the tokens that a step chose: ids [num_sampled] int32 on the host, or on their way there; `rows` [n] of
        them are those of constrained answers, in `slots` [n]."""
        if not self._follows:
            return
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        answers = [self._answers[slot] for slot in slots.tolist()]
        self._chosen.append(_Chosen(ids, event, list(zip(rows.tolist(), answers, strict=True))))

    # ------------------------------------------------------------------ entering

    def _enter(self, new_slots: Sequence[NewSlot], grammars: Sequence[str]) -> None:
        """Begin the constrained answers among those of new slots."""
        if self._executor is None:
            self._load(next(new.constraint.end_ids for new in new_slots if new.constraint is not None))
        self._compile(grammars)
        for new in new_slots:
            constraint = new.constraint
            if constraint is not None:
                matcher = self._compiled[grammars[constraint.grammar]]
                self._answers[new.slot] = _Answer(
                    constraint=constraint,
                    matcher=None if matcher is None else matcher.deep_copy(),
                    prompt_len=new.sampling.prompt_len,
                    min_tokens=new.sampling.min_tokens,
                    end_ids=frozenset(constraint.end_ids),
                    is_free=bool(constraint.starts_after) and not constraint.opens_with,
                    num_opening=0 if constraint.starts_after and constraint.opens_with else None,
                    last_ids=deque(maxlen=len(constraint.starts_after)),
                )
        while len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)

    def _load(self, end_ids: Sequence[int]) -> None:
        """Load the model's tokens; every request of a model has the same end-of-sequence ids."""
        from llguidance import LLExecutor

        self._executor = LLExecutor()
        self._vocabulary = None if self._prepared is None else self._prepared.take(end_ids)
        if self._vocabulary is not None:
            return
        with contextlib.suppress(GrammarError):  # the parent has loaded them: the file has changed, and answers fail
            self._vocabulary = Vocabulary.load(self._model_path, vocab_size=self._vocab_size, end_ids=end_ids)

    def _compile(self, grammars: Sequence[str]) -> None:
        """Compile the grammars that are not kept. llguidance lets other threads run meanwhile."""
        missing = [grammar for grammar in grammars if grammar not in self._compiled]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(_COMPILE_THREADS, len(missing))) as pool:
                self._compiled.update(zip(missing, pool.map(self._matcher, missing), strict=True))
        elif missing:
            self._compiled[missing[0]] = self._matcher(missing[0])
        for grammar in grammars:
            self._compiled.move_to_end(grammar)

    def _matcher(self, grammar: str) -> LLMatcher | None:
        try:
            return None if self._vocabulary is None else self._vocabulary.matcher(grammar)
        except GrammarError:  # the parent has compiled it
            return None

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
                    self._take([(answer, token)])
            first += count

    def _take(self, tokens: Sequence[tuple[_Answer, int]]) -> None:
        """Let answers go on by a token each."""
        going = []
        for answer, token in tokens:
            if answer.is_over or answer.matcher is None or token < 0:  # NOT_FINITE
                continue
            answer.num_tokens += 1
            if not answer.take_free(token):
                answer.is_over = token in answer.end_ids
                going.append((answer, token))
        if going:
            assert self._executor is not None
            pairs = [(answer.matcher, token) for answer, token in going if answer.matcher is not None]
            if len(pairs) <= _FEW_TOKENS:
                taken = [matcher.consume_token(token) for matcher, token in pairs]
            else:
                taken = self._executor.consume_token_par(pairs)
            for (answer, _), is_taken in zip(going, taken, strict=True):
                if not is_taken:
                    answer.matcher = None

    def _fill(self, answers: Sequence[_Answer]) -> Tensor:
        """Make the masks of answers on the host: [n, W]."""
        assert self._executor is not None
        masks = self._host_masks(len(answers))
        words = masks.numpy().view(np.uint32)
        matchers: list[tuple[LLMatcher, int]] = []
        opening: list[int] = []
        short: list[int] = []
        for row, answer in enumerate(answers):
            if answer.matcher is None or answer.is_free:
                words[row] = _ALL
                if answer.is_free and answer.constraint.must_begin:
                    _hold_back(words[row], answer.constraint.end_ids)
            else:
                matchers.append((answer.matcher, row))
            if answer.num_opening is not None:
                opening.append(row)
            if answer.num_tokens < answer.min_tokens:
                short.append(row)
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(masks[row].data_ptr(), 4 * masks.shape[1])
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), 4 * masks.shape[1], len(answers))
        for matcher, row in matchers:
            if matcher.is_error():
                answers[row].matcher = None
                words[row] = _ALL
        for row in opening:
            _let_open(words[row], answers[row])
        for row in short:
            _hold_back(words[row], answers[row].constraint.stop_ids)
        return masks[:, : self._num_words]

    def _host_masks(self, num_rows: int) -> Tensor:
        """Return memory for masks as llguidance writes them, which may have more words than the model's logits need."""
        if len(self._staging) < num_rows:
            num_words = self._num_words if self._vocabulary is None else self._vocabulary.num_words
            self._staging = torch.empty(
                1 << (num_rows - 1).bit_length(), num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda"
            )
        return self._staging[:num_rows]


def with_failures(ids: np.ndarray, failed_rows: Sequence[int]) -> np.ndarray:
    """Return ids with `CONSTRAINT_FAILED` in these rows."""
    ids = ids.copy()
    ids[list(failed_rows)] = CONSTRAINT_FAILED
    return ids


def _let_open(mask: np.ndarray, answer: _Answer) -> None:
    """Allow the token that begins the free part in a mask of uint32 words, in place; and no other once it has begun."""
    token = answer.next_opening
    assert token is not None
    if answer.num_opening:
        mask[:] = 0
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def _hold_back(mask: np.ndarray, token_ids: Sequence[int]) -> None:
    """Forbid tokens in a mask of uint32 words, in place, unless it allows no others."""
    held = np.zeros_like(mask)
    for token in token_ids:
        held[token >> 5] |= np.uint32(1 << (token & 31))
    left = mask & ~held
    if left.any():
        mask[:] = left
