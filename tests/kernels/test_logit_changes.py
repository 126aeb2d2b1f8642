"""What requests change in their logits: the kernel changes what the plain torch does, and nothing beside it."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, MARKS
from nvcli.core.messages import FORBIDDEN
from nvcli.kernels import logit_changes as reference
from nvcli.kernels.sampling_columns import LogitChanges
from nvcli.kernels.triton.sampling import logit_changes as kernels

pytestmark = MARKS

S, L, E, V = 9, 2100, 300, 701
"""More tokens and more entries than a program looks at together."""
PROMPT_LENS = [5, 1300, 1, 40, 2100, 3, 3, 8, 0]
POSITIONS = [2100, 2050, 2, 41, 2100, 700, 5, 9, 1]
MIN_LENS = [2101, 0, 3, 0, 2101, 0, 5, 9, 2]
SLOTS = [3, 0, 8, 1, 4, 2, 6, 5]
"""Of each row of logits. Slot 7 has none."""


def make_changes() -> LogitChanges:
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(V, generator=generator)[:E] for _ in range(S)]).int()
    values = torch.randn(S, E, generator=generator)
    values[:, ::3], values[:, 1::3] = -torch.inf, torch.inf
    ids[:, 30:40] = ids[:, :10]  # biased, and an end id too
    values[:, 250:] = 0.0
    return LogitChanges(
        presence_penalty=torch.tensor([0.5, 0.0, 0.0, -0.5, 1.0, 0.0, 0.3, 0.0, 0.0]),
        frequency_penalty=torch.tensor([0.25, 0.1, 0.0, 0.0, 1.0, 0.0, -0.2, 0.0, 0.0]),
        repetition_penalty=torch.tensor([1.0, 1.3, 0.7, 1.1, 2.0, 1.0, 1.0, 1.0, 1.5]),
        prompt_len=torch.tensor(PROMPT_LENS, dtype=torch.int32),
        min_len=torch.tensor(MIN_LENS, dtype=torch.int32),
        num_forbidden=torch.tensor([300, 0, 7, 1, 0, 250, 20, 0, 0], dtype=torch.int32),
        entry_ids=ids,
        entry_values=values,
    )


def to_device(changes: LogitChanges) -> LogitChanges:
    return LogitChanges(*(tensor.to(DEVICE) for tensor in changes))


@pytest.mark.parametrize(
    ("at", "num_penalised", "num_entries"),
    [([0, 1, 3, 4, 5, 6, 2], 7, 250), ([6, 3, 1, 5, 7], 3, 250), ([7, 5], 0, 300), ([4, 2], 2, 0), ([1], 1, 7)],
)
def test_rows_with_changes_are_changed(at: list[int], num_penalised: int, num_entries: int) -> None:
    """Some rows have penalties, some entries, some both; the others stay bit by bit. A forbidden token stays so."""
    changes = make_changes()
    generator = torch.Generator().manual_seed(5)
    token_ids = (torch.rand(S, L, generator=generator) ** 3 * V).int()  # some often, some never
    wide = torch.randn(len(SLOTS), V + 11, generator=generator) * 3
    wide[:, ::50] = -torch.inf
    positions = torch.tensor([POSITIONS[slot] for slot in SLOTS], dtype=torch.int32)
    rows, slots = torch.tensor(at, dtype=torch.int32), torch.tensor(SLOTS)
    actual, expected = wide.to(DEVICE, copy=True), wide.clone()
    reference.change_logits(
        expected[:, :V], changes, rows, slots, positions, token_ids,
        num_penalised=num_penalised, num_entries=num_entries,
    )  # fmt: skip
    kernels.change_logits(
        actual[:, :V], to_device(changes), *(each.to(DEVICE) for each in (rows, slots, positions, token_ids)),
        num_penalised=num_penalised, num_entries=num_entries,
    )  # fmt: skip
    actual = actual.cpu()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    others = [row for row in range(len(SLOTS)) if row not in at]
    assert torch.equal(actual[others], wide[others])
    assert torch.equal(actual[:, V:], wide[:, V:])
    assert not torch.equal(actual[at], wide[at])
    forbidden = actual[:, :V].isneginf()
    assert forbidden[:, ::50].all()
    assert forbidden[at].sum() > forbidden[others].sum() / max(1, len(others)) or not num_entries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_that_are_forbidden_alone(dtype: torch.dtype) -> None:
    """Stop ids of short answers get -inf, others a finite logit; what a mask forbids, and all else, stays."""
    changes, start = make_changes(), 100
    changes = changes._replace(entry_values=torch.where(changes.entry_values.isneginf(), -torch.inf, FORBIDDEN))
    wide = (torch.randn(len(SLOTS), V - start, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    wide[:, ::50] = -torch.inf
    slots, positions = torch.tensor(SLOTS), torch.tensor([POSITIONS[slot] for slot in SLOTS], dtype=torch.int32)
    expected = wide[:, :500].clone()
    for row, slot in enumerate(SLOTS):
        for entry in range(int(changes.num_forbidden[slot])):
            token = int(changes.entry_ids[slot, entry]) - start
            is_stop = bool(changes.entry_values[slot, entry].isinf())
            if 0 <= token < 500 and (not is_stop or POSITIONS[slot] < MIN_LENS[slot]):
                low = -torch.inf if is_stop else max(FORBIDDEN, torch.finfo(dtype).min)
                expected[row, token] = min(float(expected[row, token]), low)
    actual = wide.to(DEVICE, copy=True)
    for _ in range(2):  # once more changes nothing
        kernels.forbid_tokens(
            actual[:, :500], to_device(changes), slots.to(DEVICE), positions.to(DEVICE), start=start
        )  # fmt: skip
    torch.testing.assert_close(actual[:, :500].cpu(), expected, atol=0, rtol=5e-3)  # the interpreter cuts bfloat16 off
    assert torch.equal(actual[:, 500:].cpu(), wide[:, 500:])
    found = wide.clone()
    reference.forbid_tokens(found[:, :500], changes, slots, positions, start=start)
    assert torch.equal(found[:, :500], expected)
