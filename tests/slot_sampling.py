"""Sampling parameters of a slot, as the engine sends them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from nvcli.core.messages import NewSlot, SlotSampling, StepInput, pack


def slot_sampling(row: int, **overrides: Any) -> SlotSampling:
    return SlotSampling(**{"seed": 5, "row": row, "prompt_len": 3, **overrides})


def entering_step(samplings: Sequence[SlotSampling], constrained: Container[int] = ()) -> StepInput:
    """A step in which a request enters each slot, slot i with the i tokens i to 2i - 1. The answers in `constrained`
    slots follow a grammar."""
    num_slots = len(samplings)
    return StepInput(
        step_id=0,
        new_slots=[
            NewSlot(
                slot=i,
                num_cached_tokens=0,
                sampling=sampling,
                constraint=0 if i in constrained else None,
            )
            for i, sampling in enumerate(samplings)
        ],
        token_slots=pack(range(num_slots)),
        token_starts=pack([0] * num_slots),
        token_counts=pack(range(num_slots)),
        token_ids=pack(token for i in range(num_slots) for token in range(i, 2 * i)),
    )
