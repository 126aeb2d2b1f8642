"""What the host will likely take for a launch."""

from __future__ import annotations

import pytest

from nvcli.runner.forward_timer import LaunchTimer


def test_a_launch_is_expected_to_take_as_long_as_most_have() -> None:
    """As long as the longer ones, if one in three is; one that took very long decides nothing."""
    timer, now, expected = LaunchTimer(1.0), 100.0, []
    assert timer.seconds() == 1.0
    for seconds in (*[1.0, 1.0, 2.0] * 8, 50.0, *[3.0] * 16):
        timer.start(now)
        timer.stop(now + seconds)
        timer.stop(now + 60.0)  # of a step without masks
        now += 100.0
        expected.append(timer.seconds())
    assert expected[:2] == pytest.approx([1.0] * 2)
    assert expected[2:25] == pytest.approx([2.0] * 23)
    assert expected[-1] == pytest.approx(3.0)
