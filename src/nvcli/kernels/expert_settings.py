"""Settings of a mixture of experts, without its weights: how its router chooses, and what its experts compute.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EXPERT_ALIGNMENT = 8
"""The intermediate size of experts is a multiple of it on each rank: rows of weights begin at multiples of 16 bytes."""
MXFP4_BLOCK = 32
"""How many neighbours of a row share a scale in MXFP4 (`kernels/mxfp4.py`)."""
TINY = 1e-20
"""Added to a sum of scores before a division by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a family of models chooses experts.

    A softmax over the chosen experts alone (Mixtral, gpt-oss) is the softmax over all experts, renormalised.
    """

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    """`sqrtsoftplus` (DeepSeek-V4, 2026): the square root of log(1 + exp(logit)). `sparsemixer`
    (https://arxiv.org/abs/2409.12136): an expert's weight is its softmax among the experts that were not chosen before
    it and whose logits are near its own."""
    tolerance: float = 0.0
    """With `sparsemixer`, logits are near if they differ by at most this part of the larger one's magnitude."""
    corrects_logits: bool = False
    """Whether a correction is added to the logits for the choice, and not to the scores."""
    renormalise: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """A factor of all weights."""
    num_shared: int = 0
    """Experts that all tokens share and that the router weighs as it does those that it chooses: its last logits are
    theirs, beside `num_experts` others. Renormalised weights add up to 1 with theirs."""
    num_groups: int = 1
    """The number of equally large groups of neighbouring experts."""
    groups_per_token: int = 1
    """A token's experts are chosen from this number of groups: those with the largest sums of their two best
    experts (DeepSeek-V3, 2024), or with the best experts."""
    sums_two_best: bool = True
    """Whether a group counts by the sum of its two best experts' scores, or by its best expert's (DeepSeek-V2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivation:
    """The function of an expert or a gated MLP on its gate and up projections, or of an expert without a gate on its up
    projection.

    `silu`: silu(gate) × up. `clamped_silu`: the same with silu(gate) at most `limit` and up within ±`limit`. `gelu`, of
    dense MLPs alone, and `gelu_tanh`: gelu(gate) × up, the latter with its approximation by tanh. `clamped_swiglu`
    (gpt-oss): with the gate at most `limit` and up within ±`limit`, gate × sigmoid(`alpha` × gate) × (up + `offset`).
    `gated_relu2`, of dense MLPs alone: relu(gate)² × up. `relu2`, without a gate: relu(up)².
    """

    kind: Literal["silu", "clamped_silu", "gelu", "gelu_tanh", "clamped_swiglu", "gated_relu2", "relu2"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Whether experts have gates. Without them, what gate and up projections are said to have is true of up alone:
        it has half as many rows."""
        return self.kind != "relu2"

    @property
    def clamps(self) -> bool:
        """Whether `limit` counts."""
        return self.kind in ("clamped_silu", "clamped_swiglu")
