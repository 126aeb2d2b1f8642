"""ShortConv: a layer's short convolution between two gates, sharded over the ranks by channels.

Shapes: T tokens, H hidden, C channels of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateSpec
from nvcli.kernels.causal_conv import causal_conv
from nvcli.kernels.fp8_types import Activations
from nvcli.models.layers import Angles, TokenMixer
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.short_conv import ShortConvConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear, TensorShards


class ShortConv(TokenMixer):
    """c × conv(b × x), of three projections b, c and x of the input: [T, H] → [T, C], the input of `o_proj`."""

    def __init__(
        self,
        build: BuildContext,
        path: str,
        config: ShortConvConfig,
        norm: NormConfig,
        spec: StateSpec,
        cache_layer: int,
    ) -> None:
        super().__init__(spec, cache_layer)
        self.in_proj = ColumnParallelLinear(build, f"{path}.bcx_proj", ("b_proj", "c_proj", "x_proj"))
        self.conv = Taps(build, {name: f"{path}.conv.{name}" for name in ("weight", "bias")})
        self.o_proj = RowParallelLinear(build, f"{path}.out_proj")

    @property
    def input_proj(self) -> ColumnParallelLinear:
        return self.in_proj

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the convolution's last inputs; for rows with drafts, store what is
        needed to advance these later."""
        pool, _, rows, kept = batch.states(self.spec.kv_group, self.cache_layer)
        projected = self.in_proj(x, batch.token_adapters)
        before, after, values = projected.chunk(3, dim=1)
        taps = self.conv.weight.squeeze(1)
        convolved = causal_conv(before * values, taps, pool, rows, kept, self.conv.bias, activates=False)
        return convolved.mul_(after)


class Taps(TensorShards):
    """The convolution's taps for this rank's channels, [C, 1, taps], and its bias [C] if it has one."""

    bias: nn.Parameter | None
