"""XIELU: the numbers of a layer's xIELU."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class XIELU(NamedTuple):
    """The numbers of a layer's xIELU, as they are stored: [1] float32 each."""

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor
