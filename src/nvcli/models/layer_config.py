"""DecoderConfig: the layers of a decoder. Families write it (`families/`), and everything else reads it. Torch-free.

Layers that are alike share one `LayerConfig`, so that a model is a short list of kinds and an index for each layer.
All sizes are those of the whole model, not of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from nvcli.kernels.elementwise_settings import PlainActivation
from nvcli.kernels.expert_settings import Routing
from nvcli.kernels.residual_gate_settings import ResidualGates
from nvcli.kernels.stream_settings import StreamSettings
from nvcli.models.altup_config import AltUpConfig
from nvcli.models.checkpoint_layout import PLAIN_LAYOUT, CheckpointLayout
from nvcli.models.draft_head_config import DraftHeadConfig
from nvcli.models.mixers.mixer import Block, FeedForward, LayerContext, Mixer, NormConfig
from nvcli.models.mixers.ngram_lookup import NGramLookupConfig
from nvcli.models.mixers.result_convolutions import ResultConvolutions
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix, vector
from nvcli.worker.distributed.stage import Stage

SHORTCUT = "shortcut"
"""The name of a layer's shortcut in the decoder."""
MOST_STREAMS = 16
"""The most residual streams; more than any model has."""
TO_GATES, FROM_GATES = "W_down", "W_up"
"""The matrices of a norm's gates."""
PREDICTION = "prediction"
"""The beginning of the names of a prediction head's tensors."""
RATE_OF_MIXER, RATE_OF_MLP = "lambda_1", "lambda_2"
"""The names of the rates at which the stream goes towards a block's result."""
TO_BESIDE, NORM_OF_BESIDE = "to_beside", "beside_layernorm"
"""The projection and the norm of what `LayerConfig.beside` reads, in layers that read embeddings."""
GATE_OF_MIXER, GATE_OF_MLP = "post_attention_residual_gate.gate", "post_feedforward_residual_gate.gate"
"""The names of the gates of the residual stream."""
SCALE_OF_MLP = "post_feedforward_layernorm"
"""The name of what an MLP's result is multiplied by before it is normed for its gate."""
STREAMS_OF_MIXER, STREAMS_OF_MLP, STREAMS_AT_END = "attn_hc", "ffn_hc", "hc_head"
"""The names of the weights of shares of residual streams, before a layer's blocks and after the last layer."""
TO_STREAM_GATES, FROM_STREAM_GATES = "input_mix_weight_down", "input_mix_weight_up"
"""The matrices of the streams' gates."""
RESULT_SHARES = "block_inject_weight"
"""The matrix of the shares of a block's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """The places of norms in a layer, and their names in the checkpoint. None: there is no norm at that place.

    A norm before a block reads the residual stream; a norm after it reads the block's output, before that is added to
    the stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    mlp_skips_mixer: bool = False
    """Whether the norm before the MLP reads the stream as it was before the mixer."""
    factor_after: float = 1.0
    """Weights of the norms after blocks are multiplied by it when they are loaded."""
    epsilons: tuple[float, float, float, float] | None = None
    """The epsilons of the norms at these four places; None: that of all norms of the decoder."""
    gated: tuple[str, ...] = ()
    """The norms before blocks whose result is multiplied by gates: the sigmoid of an MLP of the result itself."""
    gate_rank: int = 0
    """The size of what these MLPs compute in between."""
    stream_factors: tuple[float, float] | None = None
    """With it the residual stream goes on from what the norms before the mixer and before the MLP give, multiplied by
    these numbers (post-norm); None: from what these norms read."""

    @property
    def is_parallel(self) -> bool:
        """Whether an MLP reads what the mixer reads: through a norm of its own, or, if it has none, normed with it."""
        return self.mlp_skips_mixer or (self.before_mlp is None and self.after_mlp is None)

    def names(self) -> Iterable[str]:
        """The names of the layer's norms, in their order in the layer."""
        return (name for name, _ in self.factors())

    def factors(self) -> Iterator[tuple[str, float]]:
        """Yield the names of the layer's norms, in their order in the layer, and the factors of their weights."""
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        factors = (1.0, self.factor_after) * 2
        return ((name, factor) for name, factor in zip(places, factors, strict=True) if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer."""

    mixer: Mixer
    """The block that mixes tokens."""
    beside: Mixer | None = None
    """Another mixer, which reads the same normed input; their outputs are added."""
    reads_embeddings: bool = False
    """Whether the mixer reads the stream beside the embeddings, and the MLP its result. `beside` then reads the sum of
    the stream and of a projection of this, and its result alone is added to the stream (`shared_block_layer.py`)."""
    loop: Literal["first", "again"] | None = None
    """Whether a loop of layers begins with it, the first or another one: the normed stream before the first is added to
    the normed stream here (`interpolated_layer.py`)."""
    convolutions: ResultConvolutions | None = None
    """Convolutions of keys, values and results; there is attention then, and nothing beside it. None: there are
    none."""
    mlp: FeedForward | None
    """The block that computes each token by itself; None: the layer has none."""
    shortcut: FeedForward | None = None
    """Another such block, which reads the same normed input as `mlp`. Its result is added to the stream after the next
    layer, so that it can be computed beside that (Shortcut-connected MoE, https://arxiv.org/abs/2404.05019)."""
    lookup: NGramLookupConfig | None = None
    """The block that adds vectors of n-grams to the residual streams before the others; None: there is none."""
    norms: LayerNorms = LayerNorms()
    has_scalar: bool = False
    """Whether the residual stream is multiplied by a number from the checkpoint at the end of the layer."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The parts of the layer that keep something in the KV cache."""
        others = self.beside, self.lookup, self.convolutions
        return (self.mixer, *(other for other in others if other is not None))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for _, block in self.named_blocks)

    @property
    def named_blocks(self) -> tuple[tuple[str, Block], ...]:
        """The blocks with their names in the layer."""
        blocks = *self.mixers, *(() if self.mlp is None else (self.mlp,))
        named = tuple((block.name, block) for block in blocks)
        return named if self.shortcut is None else (*named, (SHORTCUT, self.shortcut))

    def for_length(self, max_model_len: int) -> LayerConfig:
        """Return how runs of at most this many tokens compute it."""
        return replace(self, mixer=self.mixer.for_length(max_model_len))

    @property
    def is_parallel(self) -> bool:
        """Whether mixer and MLP read the same stream, and their outputs are added."""
        return self.mlp is not None and self.norms.is_parallel

    @property
    def routing(self) -> Routing | None:
        """How a token's experts are chosen; None: the layer has no experts."""
        routings = (block.routing for block in (self.mlp, self.shortcut) if block is not None)
        return next((routing for routing in routings if routing is not None), None)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors of the layer `path`, besides those of inputs of its own. All its norms have the same form,
        whatever their place."""
        for name, block in self.named_blocks:
            tensors = block.tensors(f"{path}.{name}", context)
            for tensor in tensors:
                # Tables of ids stay cut.
                is_whole = context.attention_dp and isinstance(block, Mixer) and tensor.sharding is not Sharding.VOCAB
                yield tensor.whole() if is_whole else tensor
        pairs = replace(context, hidden_size=2 * context.hidden_size)
        for name, factor in self.norms.factors():
            is_wide = self.reads_embeddings and name == self.norms.before_attention
            yield from (pairs if is_wide else context).norm_tensors(f"{path}.{name}", factor=factor)
            if name in self.norms.gated:
                shape = self.norms.gate_rank, context.hidden_size
                for kind, sizes in ((TO_GATES, shape), (FROM_GATES, shape[::-1])):
                    weight = matrix(f"{path}.{name}.{kind}", sizes, Sharding.REPLICATED, context.dtype, "norms")
                    yield replace(weight, in_linear_layer=False)
        if self.reads_embeddings:
            shape = context.hidden_size, context.hidden_size
            yield matrix(f"{path}.{TO_BESIDE}", shape, Sharding.REPLICATED, context.dtype, "MLP")
            yield from context.norm_tensors(f"{path}.{NORM_OF_BESIDE}")
        if self.has_scalar:
            yield vector(f"{path}.layer_scalar", 1, Sharding.REPLICATED, "norms", context.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """Inputs of each layer besides the residual stream (`layer_inputs.py`)."""

    vocab_size: int
    size: int
    padding_id: int = 0
    """The id by which the tokens of images are looked up."""
    lacks_ids: bool = False
    """Whether the vocabulary has ids from `vocab_size` on, which are looked up as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """Embeddings of positions, which are added to those of tokens (`parallel.PositionEmbedding`)."""

    count: int
    """The positions that the model knows: no sequence can be longer."""
    offset: int = 0
    """The row of the first position's embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionHead:
    """A projection of the last hidden states to the same size, an activation and a norm like the decoder's, before the
    LM head or a classifier's (`prediction.py`)."""

    activation: PlainActivation
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """All layers of a decoder, and what comes before and after them."""

    layer_kinds: tuple[LayerConfig, ...]
    """The distinct layers, in the order of their first use."""
    kind_of_layer: tuple[int, ...]
    """The index of each layer's kind."""
    norm: NormConfig
    last_norm: NormConfig | None = None
    """The norm after the last layer; None: it is as all others."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it."""
    image_scale: float = 1.0
    """Embeddings of images are multiplied by it."""
    deep_scale: float = 1.0
    """The residual stream gets results of a vision tower's layers multiplied by it."""
    rounds_embedding_scale: bool = False
    """Whether `embedding_scale` is rounded to the type of the weights first."""
    embedding_norm: NormConfig | None = None
    """The norm of embeddings before the first layer; None: there is none."""
    logit_scale: float = 1.0
    prediction_head: PredictionHead | None = None
    """None: the LM head reads the last hidden states."""
    has_head_bias: bool = False
    """Whether the LM head has a bias."""
    logit_soft_cap: float | None = None
    """Logits become soft_cap × tanh(logit / soft_cap); None: no cap."""
    learned_positions: LearnedPositions | None = None
    first_sinusoid: int | None = None
    """The number of the first position in a table of sines and cosines, which is added to the embeddings of tokens
    (`parallel.SinusoidalPositions`); None: nothing is."""
    layer_inputs: LayerInputsConfig | None = None
    streams: StreamSettings | None = None
    """With it the residual is several streams side by side (`stream_layer.py`), which begin as copies of the
    embeddings; None: it is one, or `altup` has several."""
    altup: AltUpConfig | None = None
    """With it the residual is several streams, of which layers change one and guess the others; there are layer inputs
    then."""
    residual_gates: ResidualGates | None = None
    """With it results are normed and added to the residual stream through gates (`gated_residual_layer.py`), and the
    layers have no other norms after blocks; None: they are not."""
    rate_factor: float | None = None
    """With it the stream goes from what a norm gives towards a block's normed result, at a rate for each number, which
    is multiplied by this (`interpolated_layer.py`); None: results are added to it."""
    weight_factors: tuple[tuple[str, float], ...] = ()
    """Factors of weights, which are multiplied by them when they are loaded: the last two parts of a projection's name
    in the decoder, and its factor."""
    max_positions: int | None = None
    """The longest sequence that is computed as the model would; None: as long as config.json says."""
    layout: CheckpointLayout = PLAIN_LAYOUT
    mtp: DraftHeadConfig | None = None
    """The head for multi-token prediction that checkpoints of the family bring; None: they bring none."""

    @property
    def num_layers(self) -> int:
        return len(self.kind_of_layer)

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """Each layer's config, in layer order."""
        return tuple(self.layer_kinds[kind] for kind in self.kind_of_layer)

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """For each layer, the number of the layer whose keys and values it reads: its own, or that of an earlier
        layer."""
        others = (layer.mixer.reads_kv_of for layer in self.layers)
        return tuple(number if other is None else other for number, other in enumerate(others))

    @property
    def num_streams(self) -> int:
        """The number of residual streams."""
        several = self.streams or self.altup
        return 1 if several is None else several.count

    @property
    def stream_kernels(self) -> int:
        """The number of kernels by which several residual streams are read and changed, for each block of a layer."""
        if self.altup is not None:
            return self.altup.num_kernels
        return 0 if self.streams is None else self.streams.num_kernels

    @property
    def keeps_embeddings(self) -> bool:
        """Whether layers read the embeddings of the tokens."""
        return any(layer.reads_embeddings for layer in self.layer_kinds)

    @property
    def has_loops(self) -> bool:
        """Whether layers go back to the stream before an earlier one."""
        return any(layer.loop is not None for layer in self.layer_kinds)

    @property
    def has_convolutions(self) -> bool:
        """Whether layers convolve their results; all of them do, or none."""
        return any(layer.convolutions is not None for layer in self.layer_kinds)

    @property
    def has_shortcuts(self) -> bool:
        """Whether layers pass a result on to the next ones beside the residual stream: every second one does, so that a
        pipeline is cut after pairs of layers."""
        return any(layer.shortcut is not None for layer in self.layer_kinds)

    def stage_layers(self, stage: Stage) -> range:
        """Return the numbers of a stage's layers."""
        unit = 1 + self.has_shortcuts
        units = stage.layers(self.num_layers // unit)
        return range(units.start * unit, units.stop * unit)

    @property
    def both_ways(self) -> bool:
        """Whether tokens attend to those after them, too."""
        return any(layer.mixer.both_ways for layer in self.layer_kinds)

    def with_both_ways(self) -> DecoderConfig | None:
        """Return it with tokens that attend to those after them, too; None: some layer cannot do that."""
        found = []
        for layer in self.layer_kinds:
            mixer = layer.mixer.with_both_ways()
            if mixer is None or len(layer.mixers) > 1:
                return None
            found.append(replace(layer, mixer=mixer))
        return replace(self, layer_kinds=tuple(found))

    def for_length(self, max_model_len: int) -> DecoderConfig:
        """Return how runs of at most this many tokens compute it."""
        kinds, index = index_kinds(layer.for_length(max_model_len) for layer in self.layers)
        mtp = None if self.mtp is None else self.mtp.for_length(max_model_len)
        return replace(self, layer_kinds=kinds, kind_of_layer=index, mtp=mtp)

    @property
    def angles_per_position(self) -> int:
        """The number of cosines and sines per position in tables, over all rotations of the model."""
        rotations = {rotation for layer in self.layer_kinds for rotation in layer.mixer.rotations}
        return sum(head_dim for rope, head_dim in rotations if not rope.is_learned)


def index_kinds(layers: Iterable[LayerConfig]) -> tuple[tuple[LayerConfig, ...], tuple[int, ...]]:
    """Return the distinct layers, and the index of each layer's kind."""
    kinds: dict[LayerConfig, int] = {}
    index = tuple(kinds.setdefault(layer, len(kinds)) for layer in layers)
    return tuple(kinds), index
