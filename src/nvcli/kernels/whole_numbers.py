"""Arithmetic of whole numbers, for sizes and for launches of kernels: Triton's own functions take several microseconds
on the host, as they serve the constants of kernels, too."""

from __future__ import annotations

_WARP_THREADS, _THREAD_ELEMENTS, _MOST_WARPS = 32, 16, 16


def ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up; both are positive, or the number is 0."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple


def warps_of_row(columns: int) -> int:
    """Choose the warps of a program that holds a row of this width, a power of two, in registers."""
    return min(max(columns // (_WARP_THREADS * _THREAD_ELEMENTS), 1), _MOST_WARPS)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()
