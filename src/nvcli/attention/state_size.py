"""How many bytes a layer's recurrent state takes in a block. Torch-free, as plans ask for it too."""

from __future__ import annotations

import math

STATE_ALIGNMENT = 128
"""Bytes: each layer's state takes a multiple of it, so that float32 numbers lie where they can be read fast."""


def state_bytes(conv_shape: tuple[int, ...], recurrent_shape: tuple[int, ...], element_bytes: int) -> int:
    """The bytes of a float32 recurrent state and a convolution's inputs of `element_bytes` each, padding included."""
    size = 4 * math.prod(recurrent_shape) + element_bytes * math.prod(conv_shape)
    return -(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT
