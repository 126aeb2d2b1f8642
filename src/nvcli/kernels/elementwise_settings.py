"""Names of the functions that layers apply number by number. Torch-free."""

from __future__ import annotations

from typing import Literal

GateFunction = Literal["sigmoid", "softplus", "silu"]
"""The function that makes factors of gates."""
NormGate = Literal["silu", "sigmoid"]
"""The function of a norm's gates."""
PlainActivation = Literal["relu", "relu2", "gelu", "gelu_tanh", "xielu"]
"""The activation of an MLP without a gate. `relu2` is relu(x)² (https://arxiv.org/abs/2109.08668), `gelu_tanh` is GELU
in its tanh approximation, and `xielu` (https://arxiv.org/abs/2411.13010) has a layer's own numbers."""
XIELU_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
"""The numbers of a layer's xIELU."""
