"""GroupedOutput: a mixer's output projection in two steps, the first of which groups of heads do apart."""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.kernels.invariant_linear import invariant_by_head
from nvcli.kernels.linear import by_head
from nvcli.kernels.lora_types import AdapterRows
from nvcli.models.parallel import BuildContext, RowParallelLinear, TensorShard


class GroupedOutput(nn.Module):
    """o_b(the results of o_a of each group): [T, this rank's heads × D] → [T, H], as `RowParallelLinear` does.

    Ranks share the groups. The weights of the first step are multiplied as they are, whatever ranks keep others in.
    """

    def __init__(self, build: BuildContext, path: str, num_groups: int) -> None:
        """Build both projections in the mixer `path`. `num_groups`: those of this rank."""
        super().__init__()
        self.num_groups = num_groups
        self.o_a_proj = TensorShard(build, f"{path}.o_a_proj.weight")
        self.o_b_proj = RowParallelLinear(build, f"{path}.o_b_proj")
        self.by_head = invariant_by_head if build.batch_invariant else by_head

    def forward(self, x: Tensor, residual: Tensor | None, adapters: AdapterRows | None = None) -> Tensor | None:
        delta: Tensor | None = self.o_b_proj(self._of_groups(x), residual, adapters)
        return delta

    def part(self, x: Tensor, out: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Compute this rank's part of a sum."""
        return self.o_b_proj.part(self._of_groups(x), out, adapters)

    def _of_groups(self, x: Tensor) -> Tensor:
        groups = x.view(len(x), self.num_groups, -1)
        weight: Tensor = self.o_a_proj.weight
        weights = weight.view(self.num_groups, -1, groups.shape[2])
        out = x.new_empty(len(x), self.num_groups, weights.shape[1])
        self.by_head(groups, weights.transpose(1, 2), out)
        return out.flatten(1)
