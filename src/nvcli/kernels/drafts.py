"""Drafts: guesses at the tokens that follow a row's last one, and the check of which are right.

A decode row with drafts computes its last token and the drafts after it. Every position is sampled with its own random
number, and drafts are accepted up to the first one that differs from the token sampled for its position. So a row gives
the same tokens as it would one at a time; the token sampled after the last accepted draft is one of them.

Drafts are looked up in the row's own tokens: they are what followed the longest earlier match of the last tokens, the
latest one if several are equally long. If that match is short, drafts are what followed in other answers
(`nvcli.kernels.answer_table`), if that is known.

Plain torch is the reference; CUDA tensors take the Triton kernels, which are tested against it and can run in a CUDA
graph. Everything is arithmetic on integers that are the same on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.answer_table import enter_answer, follow_answers
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.step_tensors import RUN, AnswerTable, DraftRows, SlotState, StepInputs, StepRows

LONGEST_MATCH = 8
"""Maximum tokens that are compared; among matches at least this long, the latest is taken."""
LEAST_MATCH = 2
"""Minimum tokens that must be equal."""
OWN_TEXT, OTHER_ANSWERS, HEAD = range(3)
"""Sources of drafts, as indices of `nvcli.core.messages.DRAFT_SOURCES`."""
_COIN = 1 << 16


def accepted_of(accept_rate: float | None) -> int:
    """Return the acceptance rate as the kernels take it: in units of 1 / 65,536, or -1 if drafts are accepted when they
    equal what was sampled."""
    return -1 if accept_rate is None else round(accept_rate * _COIN)


@with_kernel("elementwise.drafts")
def find_drafts(
    rows: StepRows, state: SlotState, drafts: DraftRows, answers: AnswerTable | None, *, for_all: bool = False
) -> None:
    """Write drafts after each row's last token into `state.token_ids`, up to `drafts.most`, and their numbers,
    sources and matches into `drafts`. Runs before `prepare_inputs`. `for_all`: rows without a match
    get drafts too, from their own tokens. `answers` None: no drafts come from other answers."""
    if answers is not None:
        answers.time.add_(1)
    drafts.num_drafts[: len(rows.slots)] = 0
    drafts.sources[: len(rows.slots)] = OWN_TEXT
    drafts.matches[: len(rows.slots)] = 0
    for row, (slot, most) in enumerate(zip(rows.slots.tolist(), drafts.most.tolist(), strict=True)):
        if most == 0:
            continue
        last = int(state.lengths[slot])
        tokens = state.token_ids[slot]
        length, found = _latest_match(tokens[: last + 1])
        drafts.matches[row] = length
        if length or for_all:
            places = found + 1 + torch.arange(most) % max(1, last - found)
            tokens[last + 1 : last + 1 + most] = tokens[places]
            drafts.num_drafts[row] = most
        if answers is None or length >= RUN:
            continue
        if others := follow_answers(answers, tokens[: last + 1], most):
            tokens[last + 1 : last + 1 + len(others)] = torch.tensor(others, dtype=torch.int32)
            drafts.num_drafts[row] = most if for_all else len(others)
            drafts.sources[row] = OTHER_ANSWERS


def _latest_match(tokens: Tensor) -> tuple[int, int]:
    """Return the length of the longest earlier run of tokens that equals the last ones, and the position where it ends,
    the latest if there are several; (0, 0) if there is none."""
    last = len(tokens) - 1
    lengths = torch.zeros(last, dtype=torch.int64)
    runs_on = torch.ones(last, dtype=torch.bool)
    for back in range(min(LONGEST_MATCH, last)):
        runs_on[:back] = False
        runs_on[back:] &= tokens[: last - back] == tokens[last - back]
        lengths += runs_on
    best = int(lengths.max()) if last else 0
    return (best, int(torch.nonzero(lengths == best)[-1])) if best >= LEAST_MATCH else (0, 0)


@with_kernel("elementwise.drafts")
def accept_drafts(
    rows: StepRows,
    state: SlotState,
    inputs: StepInputs,
    drafts: DraftRows,
    answers: AnswerTable | None,
    ids: Tensor,
    held: Tensor | None = None,
    *,
    accepted: int = -1,
) -> None:
    """Count the tokens that each row gives (`drafts.counts`), write them into `state.token_ids` and `answers`, and set
    `state.lengths` accordingly. May be called again with other `ids` for the same step.

    ids: [N] int32 as sampled; held: [N] int32, rows whose first entry is not 0 give nothing (None: all give); accepted:
    see `accepted_of`.
    """
    drafts.counts[: len(rows.slots)] = 0
    fields = zip(
        rows.slots.tolist(),
        rows.num_logits.tolist(),
        rows.logits_start_loc.tolist(),
        drafts.num_drafts.tolist(),
        drafts.limits.tolist(),
        strict=False,
    )
    for row, (slot, num_logits, start, num_drafts, limit) in enumerate(fields):
        if num_logits == 0 or slot == state.padding_slot:
            continue
        first = int(inputs.sample_positions[start])
        sampled = ids[start : start + num_logits]
        following = inputs.input_ids[inputs.logits_rows[start + 1 : start + num_logits]]
        count = 1
        while count <= min(num_drafts, num_logits - 1):
            is_right = bool(sampled[count - 1] == following[count - 1])
            if not (is_right if accepted < 0 else _coin(slot, first + count) < accepted):
                break
            count += 1
        if num_logits > 1:
            count = max(0, min(count, limit - first + 1))
        if held is not None and int(held[start]):
            count = 0
        state.token_ids[slot, first : first + count] = sampled[:count].clamp(min=0)
        state.lengths[slot] = first - 1 + count
        drafts.counts[row] = count
        if answers is not None:
            enter_answer(answers, state, slot, min(first, int(answers.ends[slot])))


def _coin(slot: int, position: int) -> int:
    """Return a pseudo-random number below 65,536 (the finalizer of MurmurHash3; Appleby)."""
    word = (position * 0x9E3779B1 + slot * 0x85EBCA77) & 0xFFFFFFFF
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (word ^ (word >> 16)) & (_COIN - 1)
