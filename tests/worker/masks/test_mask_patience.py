"""How long steps wait for masks, and what the host will likely take for a launch."""

from __future__ import annotations

import pytest
import torch

from nvcli.worker.masks import mask_patience
from nvcli.worker.masks.mask_patience import Patience, PatienceTimer


def test_waiting_ends_when_it_costs_what_leaving_rows_out_does() -> None:
    patience = Patience(free_until=10.0, step_seconds=2.0)
    assert patience.ends_at(1, 100) == pytest.approx(10.02)
    assert patience.ends_at(50, 100) == pytest.approx(11.0)


def test_a_launch_is_expected_to_take_as_long_as_most_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the longer ones, if one in three is; one that took very long decides nothing."""
    now = 100.0
    monkeypatch.setattr(mask_patience.time, "perf_counter", lambda: now)
    timer, expected = PatienceTimer(torch.device("cpu")), []
    first = timer.launch_seconds
    for seconds in (*[1.0, 1.0, 2.0] * 8, 50.0, *[3.0] * 16):
        timer.went_on()
        now += seconds
        timer.launched()
        now += 60.0
        timer.launched()  # of a step without masks
        expected.append(timer.launch_seconds)
    assert first < 1.0
    assert expected[:2] == pytest.approx([1.0] * 2)
    assert expected[2:25] == pytest.approx([2.0] * 23)
    assert expected[-1] == pytest.approx(3.0)
