"""Arithmetic of whole numbers that launches of kernels need. Triton's own functions take several microseconds on the
host, as they serve the constants of kernels, too."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up; both are positive, or the number is 0."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()
