"""Settings of gates between a block's result and the residual stream (`kernels/residual_gates.py`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualGates:
    """How a number g of each channel says what is kept of the stream, and what is added to it of a normed result: the
    share b = sigmoid(g / temperature) is added, and the stream is multiplied by √(1 - b²), so that both together stay
    as large as each of them was."""

    temperature: float
    norm_eps: float
    """The epsilon of the norm of a result."""
    least: float = 1e-3
    """The least square of the factor of the stream."""
