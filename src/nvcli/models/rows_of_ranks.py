"""RowsOfRanks: a block that ranks share, between blocks that each rank computes of its own rows alone.

With attention by rows (`ModelConfig.attention_dp`; SGLang's and TensorRT-LLM's "attention DP") the residual stream of a
token is on one rank, which also has the whole weights of norms and token mixers. The other block of a layer stays cut
over the ranks: the normed rows of all ranks are gathered, each rank computes its part for all of them, and the parts
are summed on the rank that each row came from. All ranks have equally many rows, some of which are padding.
"""

from __future__ import annotations

from torch import Tensor

from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.lora_types import AdapterRows
from nvcli.models.layers import FeedForward
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


class RowsOfRanks(FeedForward):
    """[T, H] of this rank → `delta` [T, H], complete."""

    def __init__(self, group: TensorParallelGroup, block: FeedForward) -> None:
        """`block`: cut over the ranks; it does not read the residual stream."""
        super().__init__()
        assert not block.is_summed, "ModelConfig refuses it"
        self.group, self.block = group, block

    def forward(self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None) -> Tensor:
        assert isinstance(x, Tensor), "nothing is quantised before it is gathered"
        part = self.block(self.group.gather_rows(x), None, adapters)
        return self.group.scatter_sum(part)
