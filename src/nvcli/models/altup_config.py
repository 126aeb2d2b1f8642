"""AltUpConfig: alternating updates of several residual streams (https://arxiv.org/abs/2301.13310), and a product of low
rank beside attention (LAuReL, https://arxiv.org/abs/2411.07501). `models/altup_layer.py` computes both. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.tensor_spec import Part, Sharding, TensorSpec, matrix, vector

TO_STREAMS, FROM_STREAMS = "model.altup_projections", "model.altup_unembed_projections"
"""The projections of embeddings to streams, and of streams to what the last norm reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """Streams of which a layer reads and changes the first one, and guesses what it would have changed in the
    others."""

    count: int
    """The number of streams, from 2 on."""
    rank: int
    """The size of what the product of low rank computes in between."""
    num_kernels: ClassVar[int] = 6
    """The kernels by which streams are mixed and changed, for each of a layer's two blocks."""

    @property
    def numbers(self) -> range:
        """The numbers, in the names of projections, of the streams besides the first one."""
        return range(self.count - 1)

    def tensors(self, context: LayerContext, *, is_first: bool, is_last: bool) -> Iterator[TensorSpec]:
        """Yield the tensors before the first layer and after the last one."""
        for name in (*[TO_STREAMS] * is_first, *[FROM_STREAMS] * is_last):
            for number in self.numbers:
                yield _whole(f"{name}.{number}", (context.hidden_size,) * 2, context)

    def layer_tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors of the layer `path`. Those with few numbers are kept in float32, in which the shares of
        streams are computed."""
        hidden, count = context.hidden_size, self.count
        yield _whole(f"{path}.laurel.linear_left", (self.rank, hidden), context, "attention")
        yield _whole(f"{path}.laurel.linear_right", (hidden, self.rank), context, "attention")
        yield context.norm_weight(f"{path}.laurel.post_laurel_norm", hidden)
        yield context.norm_weight(f"{path}.altup.router_norm", hidden)
        yield _whole(f"{path}.altup.modality_router", (count, hidden), context)
        for name, shares in (("prediction_coefs", count * count), ("correction_coefs", count)):
            weight = vector(f"{path}.altup.{name}.weight", shares, Sharding.REPLICATED, "MLP")
            yield replace(weight, shape=(shares, count), in_linear_layer=False)
        yield vector(f"{path}.altup.correct_output_scale", hidden, Sharding.REPLICATED, "norms", context.dtype)


def _whole(name: str, shape: tuple[int, int], context: LayerContext, part: Part = "MLP") -> TensorSpec:
    """Return a weight that every rank has whole."""
    return matrix(name, shape, Sharding.REPLICATED, context.dtype, part)
