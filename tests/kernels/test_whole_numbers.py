"""The arithmetic of launches, against its definitions."""

from __future__ import annotations

import math

from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2


def test_numbers_are_rounded_up() -> None:
    for number in range(1, 70):
        assert next_power_of_2(number) == 2 ** math.ceil(math.log2(number))
        assert all(ceil_div(number, divisor) == math.ceil(number / divisor) for divisor in range(1, 9))
    assert ceil_div(0, 8) == 0
