"""Settings of gates between a block's result and the residual stream (`kernels/residual_gates.py`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualGates:
    """How a gate g of each channel mixes the stream with a block's normed result: the share b = sigmoid(g /
    temperature) of the result is added, and the stream is multiplied by √(1 - b²), so that the sum stays as large as
    each of them was."""

    temperature: float
    norm_eps: float
    """The epsilon of the norm of a result."""
    least: float = 1e-3
    """The least square of the factor of the stream."""
