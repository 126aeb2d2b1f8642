"""What the host will likely take for a launch."""

from __future__ import annotations

import pytest

from nvcli.runner.forward_timer import LaunchTimer


def test_a_launch_is_expected_to_take_as_long_as_most_have() -> None:
    """Neither the last one decides, nor one in three that takes longer; what has changed is learned."""
    timer, now, expected = LaunchTimer(7.0), 100.0, []
    assert timer.seconds() == 7.0
    for seconds in (*[1.0, 1.0, 2.0] * 8, *[3.0] * 16):
        timer.start(now)
        timer.stop(now + seconds)
        timer.stop(now + 50.0)  # of a step without masks
        now += 100.0
        expected.append(timer.seconds())
    assert expected[:24] == pytest.approx([1.0] * 24)
    assert expected[-1] == pytest.approx(3.0)
