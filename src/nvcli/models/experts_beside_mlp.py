"""A mixture of experts in parallel with an MLP for all tokens, each between norms of its own (Gemma 4 26B-A4B).

    MLP's norm(MLP(x)) + experts' norm(experts(input norm(s), routes of router(router's norm(s))))

x is the output of the norm before the block, whose input is the residual stream s. Both terms are summed over the ranks
before they are normed, so the result is identical on all ranks and is not summed again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.lora_types import AdapterRows
from nvcli.models.experts import Experts, Router
from nvcli.models.layers import FeedForward, GatedMLP, InputNorm, ResultNorm
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear
from nvcli.models.tensor_spec import EXPERTS


class ExpertsBesideMLP(FeedForward):
    """([T, H], the residual stream [T, H], read only) → [T, H], the block's complete output."""

    is_summed = True

    def __init__(self, build: BuildContext, path: str, config: ExpertsConfig, norm: NormConfig) -> None:
        super().__init__()
        assert isinstance(config.shared, MLPConfig)
        assert not config.gates_shared
        self.group = build.group
        self.reads_ids = config.table_size is not None
        self.experts_per_token = config.routing.experts_per_token
        self.shared_expert = GatedMLP(build, f"{path}.shared_expert", config.shared, norm)
        self.shared_expert_norm = ResultNorm(build, f"{path}.shared_expert_norm", norm)
        self.gate_norm = InputNorm(build, f"{path}.gate_norm", norm)
        self.gate = Router(build, f"{path}.gate", config)
        self.experts_input_norm = InputNorm(build, f"{path}.experts_input_norm", norm)
        self.experts = Experts(build, f"{path}.{EXPERTS}", config)
        self.experts_norm = ResultNorm(build, f"{path}.experts_norm", norm)

    @property
    def input_proj(self) -> ColumnParallelLinear:
        return self.shared_expert.gate_up_proj

    def forward(
        self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Compute the block's output. The stream is complete in all rows, as the last result added to it was identical
        on all ranks."""
        assert residual is not None
        result: Tensor = self.shared_expert_norm(self.shared_expert(x, None, adapters), residual)
        if self.group.size > 1:
            result = result.clone()  # its buffer is overwritten by the next sum
        routes = self.gate(self.gate_norm(None, residual), ids)
        x = self.experts_input_norm(None, residual)
        assert isinstance(x, Tensor), "experts quantise what they read by themselves"
        parts = torch.empty(self.experts_per_token, *x.shape, dtype=x.dtype, device=x.device)
        self.experts(x, routes, parts)
        return result.add_(self.experts_norm(self.experts.part_of_sum(parts, routes), residual))
