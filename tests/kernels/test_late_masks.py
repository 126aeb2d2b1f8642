"""Masks that are late: which rows go on with them, which are left out, and what the device waits for."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np
import pytest
import torch

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels.late_masks import take_late_masks
from nvcli.kernels.triton.sampling import late_masks
from nvcli.worker.masks.mask_memory import MaskMemory
from nvcli.worker.masks.mask_messages import MaskTable, answered, memory_bytes

pytestmark = MARKS

R, W = 9, 4_747
"""More words than are copied at once, and no multiple of anything."""
NUMBERS = [0, 7, 3, 12, 2**31 + 5, 4, 6, 1, 1]
"""What was asked for last, and 2**31 + 5 for what does not fit the kernel's numbers."""
MISSING = {3, 7}
FAILED = {2, 7}
MASK_OF = [4, -1, 3, 8, 2, 1, -1, 7, 5]
IS_AWAITED = [True, False, True, False, True, True, True, True, True]
LATE = [0, 0, 1, 0, 0, 0, 0, 1, 0]
HAS_FAILED = [0, 0, 0, 0, 1, 0, 0, 0, 0]


def make_table() -> MaskTable:
    table = MaskTable.of(mmap.mmap(-1, memory_bytes(R, W)), R, W)
    table.masks[:] = np.random.default_rng(5).integers(0, 2**32, (R, W), dtype=np.uint32)
    for row, number in enumerate(NUMBERS):
        table.numbers[row] = answered(number - (row in MISSING), has_failed=row in FAILED and row not in MISSING)
    return table


def wanted_of(numbers: list[int], is_awaited: list[bool]) -> torch.Tensor:
    wanted = np.array([answered(numbers[row], has_failed=False) for row in MASK_OF])
    return torch.from_numpy(np.where(is_awaited, wanted, 0).astype(np.int32))


def test_rows_go_on_with_masks_that_are_there() -> None:
    """Their masks are brought, and no others; of those that are not there, and of those that failed, it says so."""
    table = make_table()
    masks = MaskMemory(table, DEVICE, num_logits=32 * W)
    there, made = masks._there, masks._made
    if there is made:  # on a CPU nothing need be brought
        there = torch.zeros(R, W, dtype=torch.int32)
    mask_of, wanted = torch.tensor(MASK_OF, dtype=torch.int32), wanted_of(NUMBERS, IS_AWAITED)
    patience = torch.tensor([6, 1000], dtype=torch.int32)
    found = late_masks.take_late_masks(
        there, made, masks._answered, *(each.to(DEVICE) for each in (mask_of, wanted)), patience.to(DEVICE)
    )
    assert found.tolist() == [LATE, HAS_FAILED]
    expected = torch.zeros(R, W, dtype=torch.int32)
    for row, is_awaited, is_late in zip(MASK_OF, IS_AWAITED, LATE, strict=True):
        if is_awaited and not is_late and row >= 0:
            expected[row] = torch.from_numpy(table.masks[row].view(np.int32))
    assert torch.equal(there.cpu(), expected)

    plain = torch.zeros(R, W, dtype=torch.int32)
    found = take_late_masks(plain, made, masks._answered, mask_of, wanted, patience)
    assert found.tolist() == [LATE, HAS_FAILED]
    assert torch.equal(plain, expected)


@pytest.mark.skipif(not HAS_GPU, reason="only a GPU waits")
def test_a_gpu_waits_for_masks_until_waiting_costs_more() -> None:
    """It goes on as soon as a mask is there, and without one when the patience for those that are late is lost."""
    table = make_table()
    masks = MaskMemory(table, DEVICE, num_logits=32 * W)
    rows = {row for row, is_awaited in zip(MASK_OF, IS_AWAITED, strict=True) if is_awaited and row >= 0}
    numbers = list(NUMBERS)

    def take(*, is_made: set[int], nanoseconds: int) -> tuple[list[list[int]], float]:
        for row in rows:
            numbers[row] += 1
        mask_of = torch.tensor(MASK_OF, dtype=torch.int32, device=DEVICE)
        wanted = wanted_of(numbers, IS_AWAITED).to(DEVICE)
        patience = torch.tensor([len(rows), nanoseconds], dtype=torch.int32, device=DEVICE)

        def make() -> None:
            time.sleep(0.02)
            for row in is_made:
                table.masks[row] = numbers[row]
                table.numbers[row] = answered(numbers[row], has_failed=False)

        torch.cuda.synchronize()
        thread = threading.Thread(target=make)
        thread.start()
        started = time.perf_counter()
        found = masks.take_late(mask_of, wanted, patience)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        thread.join()
        late = found[0].cpu().tolist()
        for place, row in enumerate(MASK_OF):
            if row in is_made:
                assert (masks.masks[row] == numbers[row]).all(), row
                assert late[place] == 0
        for row in rows:  # as if they were made
            table.numbers[row] = answered(numbers[row], has_failed=False)
        return found.cpu().tolist(), seconds

    take(is_made=rows, nanoseconds=2**31 - 1)  # compiles
    found, seconds = take(is_made=rows, nanoseconds=2**31 - 1)
    assert not any(found[0])
    assert 0.015 <= seconds < 1.0
    found, _ = take(is_made=set(), nanoseconds=1000)
    assert sum(found[0]) == len(rows)
    first = min(rows)
    found, seconds = take(is_made=rows - {first}, nanoseconds=40_000_000)
    assert sum(found[0]) == 1  # one is late: 40 ms, where six of them would have had 240
    assert 0.035 <= seconds < 0.2
