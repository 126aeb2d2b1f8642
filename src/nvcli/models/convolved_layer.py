"""ConvolvedLayer: a decoder layer whose keys, values and results are convolved over the tokens
(`mixers/result_convolutions.py`). Shapes: T tokens, H hidden, C channels of this rank's keys and values."""

from __future__ import annotations

from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateCache
from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.layers import Attention, CachedModule
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.result_convolutions import CONVOLVED, MLP_FACTOR, ResultConvolutions
from nvcli.models.parallel import BuildContext, TensorShard
from nvcli.models.short_conv import Convolution


class Convolutions(CachedModule):
    """A layer's convolutions, whose last inputs are one state."""

    cache: StateCache

    def __init__(
        self, build: BuildContext, path: str, config: ResultConvolutions, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        self.places = config.places(build.group.size)
        of_keys, of_values, *others = (f"{path}.{name}" for name in CONVOLVED)
        self.kv_conv = Convolution(build, [of_keys, of_values])
        self.mixer_conv, self.mlp_conv = (Convolution(build, [name]) for name in others)
        self.mlp_factor = TensorShard(build, f"{path}.{MLP_FACTOR}")

    def convolve_heads(self, keys_and_values: Tensor, batch: ForwardBatch) -> None:
        """Convolve a step's keys and values [T, C] in place; rows may be strided."""
        convolved = self._convolve(self.kv_conv, keys_and_values, self.places.keys_and_values, batch)
        keys_and_values.copy_(convolved)

    def of_mixer(self, part: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Convolve a rank's part of the result of attention: [T, H] or parts [P, T, H] → [T, H]."""
        return self._convolve(self.mixer_conv, part, self.places.mixer, batch)

    def of_mlp(self, part: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Convolve a rank's part of the result of the MLP, times the layer's factor: as `of_mixer`."""
        return self._convolve(self.mlp_conv, part, self.places.mlp, batch, self.mlp_factor.weight)

    def _convolve(
        self, conv: Convolution, x: Tensor | None, places: slice, batch: ForwardBatch, factor: Tensor | None = None
    ) -> Tensor:
        assert x is not None, "nothing may be added to the stream yet"
        pool, _, rows, kept = batch.states(self.cache)
        if x.dim() == 3:
            x = x.sum(dim=0).to(pool.dtype)
        if kept is not None:
            kept = kept._replace(inputs=kept.inputs[:, places])
        convolved: Tensor = conv(x, pool[:, :, places], rows, kept, activates=False, adds_input=True, factor=factor)
        return convolved


class ConvolvedAttention(Attention):
    """Attention whose keys and values are convolved before they are normed and stored."""

    convolutions: Convolutions
    """The layer's own, which sets it."""

    def _prepared(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        self.convolutions.convolve_heads(qkv[:, self.spec.num_heads * self.spec.head_dim :], batch)
        return super()._prepared(qkv, batch)


class ConvolvedLayer(DecoderLayer):
    """One layer, with a norm before each of its two blocks and a convolution after it."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(plan)
        config = plan.config.convolutions
        assert config is not None
        assert isinstance(self.mixer, ConvolvedAttention)
        self.convolutions: Convolutions = config.build(plan.build.of_own_rows(), plan.path, plan.norm, plan.caches[-1])
        self.mixer.convolutions = self.convolutions

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer. As the states want the results of all tokens, only what follows the layer is spared for
        those that do not continue."""
        (delta, residual, _), (angles, batch, rows, _, before) = state, step
        assert self.before_mlp is not None
        assert self.mlp is not None
        adapters = batch.token_adapters
        mixed = self.mixer(self._input_of_mixer(delta, residual, before), angles, batch)
        delta = self.convolutions.of_mixer(self.mixer.o_proj(mixed, None, adapters), batch)
        del mixed  # the MLP can reuse its memory
        x = self.before_mlp(delta, residual)
        part = self.mlp(x, None, adapters, self.ids_of(self.mlp, batch, None))
        delta = self.convolutions.of_mlp(part, batch)
        if rows is not None:
            if len(rows) == 0:
                return LayerState(None, residual[rows])
            delta, residual = delta[rows], self.group.residual_rows(residual, rows)
        return LayerState(delta, residual)
