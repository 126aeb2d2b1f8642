"""ShortConv: a layer's short convolution between two gates, sharded over the ranks by channels.

Shapes: T tokens, H hidden, C channels of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateCache
from nvcli.kernels.causal_conv import causal_conv
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.state_rows import StateRows
from nvcli.models.layers import Angles, TokenMixer
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.short_conv import ShortConvConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear
from nvcli.models.weights import WeightModule, WeightSource, empty_parameter, length, stacked_rows


class ShortConv(TokenMixer):
    """c × conv(b × x), of three projections b, c and x of the input: [T, H] → [T, C], the input of `o_proj`."""

    cache: StateCache
    quantised_input = "in_proj"

    def __init__(
        self, build: BuildContext, path: str, config: ShortConvConfig, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        self.in_proj = ColumnParallelLinear(build, f"{path}.bcx_proj", ("b_proj", "c_proj", "x_proj"))
        self.conv = Convolution(build, [f"{path}.conv"])
        self.o_proj = RowParallelLinear(build, f"{path}.out_proj")

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the convolution's last inputs; for rows with drafts, store what is
        needed to advance these later."""
        pool, _, rows, kept = batch.states(self.cache)
        projected = self.in_proj(x, batch.token_adapters)
        before, after, values = projected.chunk(3, dim=1)
        convolved: Tensor = self.conv(before * values, pool, rows, kept, activates=False)
        return convolved.mul_(after)


class Convolution(WeightModule):
    """A convolution of this rank's channels: [T, C] → the same shape. Its taps [C, 1, taps], and its bias [C] if it has
    one, are rows of the tensors of `names`, one after the other."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, names: Sequence[str], rows: Sequence[slice] | None = None) -> None:
        """`rows`: those of each tensor; None: the rank's."""
        super().__init__()
        tensors = [build.tensors[f"{name}.weight"] for name in names]
        rows = rows or [tensor.shard(build.group.rank, build.group.size)[0] for tensor in tensors]
        biases = [build.tensors[f"{name}.bias"] for name in names if f"{name}.bias" in build.tensors]
        self.parts = {
            parameter: [(one, (part, *one.shard(0, 1)[1:])) for one, part in zip(found, rows, strict=False)]
            for parameter, found in (("weight", tensors), ("bias", biases))
        }
        num_channels = sum(map(length, rows))
        self.weight = empty_parameter(tensors[0], num_channels, *tensors[0].shape[1:])
        self.bias = empty_parameter(biases[0], num_channels) if biases else None

    def forward(
        self,
        x: Tensor,
        pool: Tensor,
        rows: StateRows,
        kept: KeptInputs | None,
        *,
        activates: bool = True,
        adds_input: bool = False,
        factor: Tensor | None = None,
    ) -> Tensor:
        """Convolve the channels of each request, as `causal_conv` does."""
        return causal_conv(
            x,
            self.weight.squeeze(1),
            pool,
            rows,
            kept,
            self.bias,
            activates=activates,
            adds_input=adds_input,
            factor=factor,
        )

    def weight_sources(self) -> Iterator[WeightSource]:
        for parameter, parts in self.parts.items():
            yield from stacked_rows(parameter, parts)
