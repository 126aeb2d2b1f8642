"""The tensors of a model: their names, shapes and types, how ranks share them, and what they belong to. Torch-free.

This list is the only definition of a model's shapes. Layers create their parameters from it, the loader checks
checkpoints against it, and memory plans, limits and layouts add it up (`nvcli.sizing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from nvcli.core.config_types import FOUR_BITS
from nvcli.kernels.stream_settings import StreamSettings
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models.config import ModelConfig
from nvcli.models.layer_config import (
    FROM_STREAM_GATES,
    GATE_OF_MIXER,
    GATE_OF_MLP,
    PREDICTION,
    RATE_OF_MIXER,
    RATE_OF_MLP,
    RESULT_SHARES,
    SCALE_OF_MLP,
    STREAMS_AT_END,
    STREAMS_OF_MIXER,
    STREAMS_OF_MLP,
    TO_STREAM_GATES,
    LayerConfig,
)
from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.rope_config import LEARNED_FREQUENCIES
from nvcli.models.tensor_spec import EXPERTS, Part, Sharding, StoredDtype, TensorSpec, matrix, vector, with_bias
from nvcli.models.vision.tower_tensors import tower_tensors
from nvcli.worker.distributed.stage import WHOLE, Stage

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of the embedding and the LM head, which may share one tensor."""
HEAD_BIAS = f"{HEAD}.bias"
SCORE = "score"
"""Name of a classifier's head, which every rank has whole."""
EMBEDDING_NORM = "model.embedding_norm"
"""Name of the norm of embeddings."""
POSITIONS = "model.embed_positions"
"""Name of the embeddings of positions."""
LAYER_EMBEDDING = "model.embed_tokens_per_layer"
"""Name of the embedding of the layers' own inputs, with a part for each layer."""
_LAST = ".down_proj"
"""The projection of experts that is kept in a parameter of its own."""
_STREAMS_OF_LAYER: tuple[tuple[str, Part], ...] = (STREAMS_OF_MIXER, "attention"), (STREAMS_OF_MLP, "MLP")
"""A layer's weights of shares of residual streams, and the items under which they are counted."""


@lru_cache(maxsize=64)  # plans ask for the same few stages many times
def model_tensors(config: ModelConfig, dtype: StoredDtype, stage: Stage = WHOLE) -> tuple[TensorSpec, ...]:
    """Return every tensor that a stage of the model needs, in layer order, each name once.

    With a tied LM head the last of several stages needs the embedding, as its LM head.
    """
    tensors = tuple(_with_factors(_tensors(config, dtype, stage), dict(config.decoder.weight_factors)))
    return tensors if config.quantization == "none" else tuple(_quantised(tensors, config))


def unused_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of tensors that a checkpoint may have but the model does not use."""
    names = (
        name
        for number, layer in enumerate(config.layers)
        for block_name, block in layer.named_blocks
        for name in block.unused_tensors(f"model.layers.{number}.{block_name}")
    )
    return *names, *(() if config.draft_head is None else config.draft_head.unused_tensors())


def _with_factors(tensors: Iterable[TensorSpec], factors: Mapping[str, float]) -> Iterator[TensorSpec]:
    """Give weights their factors, by the last two parts of their projections' names."""
    for tensor in tensors:
        module, _, kind = tensor.name.rpartition(".")
        factor = factors.get(".".join(module.split(".")[-2:]), 1.0) if kind == "weight" else 1.0
        yield tensor if factor == 1.0 else replace(tensor, factor=tensor.factor * factor)


def _quantised(tensors: tuple[TensorSpec, ...], config: ModelConfig) -> Iterator[TensorSpec]:
    """Mark the weights of linear layers to be kept in FP8 or 4 bits, except those that the checkpoint did not quantise,
    and the LM head, if the checkpoint has it in 4 or 8 bits that ranks can keep.
    Projections that a layer fuses are kept in the same way, and so are those of a mixture of experts, whose weights are
    the only ones in MXFP4; other layers are in FP8 beside them, or not quantised. Weights with factors stay plain."""
    names = {tensor.name for tensor in tensors}
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    scaled = {tensor.name for tensor in tensors if tensor.factor != 1.0}
    is_mxfp4 = config.quantisation is not None and config.quantisation.numbers == "mxfp4"
    for tensor in tensors:
        module, _, kind = tensor.name.rpartition(".")
        parent = module.rpartition(".")[0]
        if config.keeps_head and tensor.name == f"{head}.weight" and tensor.factor == 1.0:
            yield replace(tensor, w4=config.groups_of([module]))
            continue
        parts = [f"{parent}.{one}" for one in tensor.kept_with if f"{parent}.{one}.{kind}" in names]
        multiplied = parts  # together
        if tensor.is_of_experts:  # files name each expert
            multiplied = [part for part in parts if part.endswith(_LAST) == module.endswith(_LAST)]
            parts = [part.replace(f".{EXPERTS}.", f".{EXPERTS}.0.") for part in parts]
        is_beside = is_mxfp4 and not tensor.is_of_experts
        is_plain = is_beside and not config.has_fp8_beside
        is_plain |= config.quantization in FOUR_BITS and tensor.part == "draft head"  # few files have that in 4 bits
        is_plain |= any(f"{parent}.{one}.{kind}" in scaled for one in tensor.kept_with)
        if kind != "weight" or is_plain or not parts or any(map(config.leaves_alone, parts)):
            yield tensor
        elif config.quantization == "fp8" or is_beside:
            scaling: FP8Scaling = "channel" if is_mxfp4 and tensor.is_of_experts else config.fp8_scaling
            yield replace(tensor, dtype="float8_e4m3fn", scaling=scaling)
        else:
            yield replace(tensor, w4=config.groups_of(multiplied))


def _tensors(config: ModelConfig, dtype: StoredDtype, stage: Stage) -> Iterator[TensorSpec]:
    decoder, hidden = config.decoder, config.hidden_size
    context = LayerContext(
        hidden_size=hidden,
        norm=decoder.norm,
        dtype=dtype,
        expert_parallel=config.expert_parallel,
        attention_dp=config.attention_dp,
        stores_wide_routers=config.stores_wide_routers,
        normed_streams=decoder.num_streams if decoder.streams is not None and decoder.streams.gate_rank else 1,
    )
    embedding = matrix(EMBEDDING, (config.vocab_size, hidden), Sharding.VOCAB, dtype, "embeddings")
    if stage.is_first:
        yield embedding
        if (positions := decoder.learned_positions) is not None:
            shape = positions.offset + positions.count, hidden
            yield matrix(POSITIONS, shape, Sharding.REPLICATED, dtype, "embeddings")
        if decoder.embedding_norm is not None:
            yield from replace(context, norm=decoder.embedding_norm).norm_tensors(EMBEDDING_NORM)
        if config.has_tower:
            assert config.vision is not None
            yield from tower_tensors(config.vision, dtype)
    inputs = decoder.layer_inputs
    if inputs is not None:  # what is computed for all layers before the first one
        width = decoder.num_layers * inputs.size
        yield matrix(LAYER_EMBEDDING, (inputs.vocab_size, width), Sharding.VOCAB, dtype, "embeddings")
        shape = width, hidden
        yield matrix("model.per_layer_model_projection", shape, Sharding.REPLICATED, dtype, "MLP")
        yield context.norm_weight("model.per_layer_projection_norm", inputs.size)
    layers, streams, altup = decoder.layers, decoder.streams, decoder.altup
    if altup is not None:
        yield from altup.tensors(context, is_first=stage.is_first, is_last=stage.is_last)
    rotations = {rotation for number in decoder.stage_layers(stage) for rotation in layers[number].mixer.rotations}
    for rope, head_dim in rotations:
        if rope.is_learned:
            yield vector(LEARNED_FREQUENCIES, head_dim // 2, Sharding.REPLICATED, "attention")
    for number in decoder.stage_layers(stage):
        path = f"model.layers.{number}"
        yield from _layer(path, layers[number], context, inputs.size if inputs else None)
        if streams is not None:
            for name, part in _STREAMS_OF_LAYER:
                yield from _share_tensors(f"{path}.{name}", streams, context, part)
        if altup is not None:
            yield from altup.layer_tensors(path, context)
        if decoder.rate_factor is not None:
            for name in (RATE_OF_MIXER, RATE_OF_MLP):
                rates = vector(f"{path}.{name}", hidden, Sharding.REPLICATED, "norms")
                yield replace(rates, factor=decoder.rate_factor)
        if decoder.residual_gates is not None:
            for name in (GATE_OF_MIXER, GATE_OF_MLP):
                yield vector(f"{path}.{name}", hidden, Sharding.REPLICATED, "norms")
            scale = context.norm_weight(f"{path}.{SCALE_OF_MLP}", hidden)
            yield replace(scale, dtype="float32")
    if stage.is_last:
        of_last = replace(context, norm=decoder.last_norm or decoder.norm)
        yield from of_last.norm_tensors("model.norm", factor=decoder.logit_scale)
        if streams is not None and not streams.ends_with_mean:
            yield from _share_tensors(f"model.{STREAMS_AT_END}", streams, context, "MLP", is_end=True)
        if not config.tie_word_embeddings:
            yield matrix(HEAD, (config.vocab_size, hidden), Sharding.VOCAB, dtype, "LM head")
        elif not stage.is_first:
            yield replace(embedding, part="LM head")
        if (prediction := decoder.prediction_head) is not None:
            dense = matrix(f"{PREDICTION}.dense", (hidden, hidden), Sharding.REPLICATED, dtype, "LM head")
            yield from with_bias(dense, bias=prediction.has_bias)
            yield from context.norm_tensors(f"{PREDICTION}.norm")
        if decoder.has_head_bias:
            yield vector(HEAD_BIAS, config.vocab_size, Sharding.VOCAB, "LM head", dtype)
        if config.classifier is not None:
            shape = len(config.classifier.labels), hidden
            yield from with_bias(
                matrix(SCORE, shape, Sharding.REPLICATED, "float32", "classifier"), bias=config.classifier.has_bias
            )
        if config.draft_head is not None:
            for tensor in config.draft_head.tensors(context, config.vocab_size):
                yield replace(tensor, part="draft head")


def _layer(path: str, layer: LayerConfig, context: LayerContext, input_size: int | None) -> Iterator[TensorSpec]:
    """Yield the tensors of one layer. `input_size` is the size of the layer's input besides the residual stream; None:
    it has none."""
    hidden, dtype = context.hidden_size, context.dtype
    yield from layer.tensors(path, context)
    if input_size is not None:
        yield matrix(f"{path}.per_layer_input_gate", (input_size, hidden), Sharding.REPLICATED, dtype, "MLP")
        yield matrix(f"{path}.per_layer_projection", (hidden, input_size), Sharding.REPLICATED, dtype, "MLP")
        yield context.norm_weight(f"{path}.post_per_layer_input_norm", hidden)


def _share_tensors(
    path: str, streams: StreamSettings, context: LayerContext, part: Part, *, is_end: bool = False
) -> Iterator[TensorSpec]:
    """Yield the weights by which residual streams are read and changed: those of gates, or of shares in float32
    (`kernels.streams.ShareWeights`). `is_end`: no block's result is added to the streams after that."""
    width = streams.count * context.hidden_size
    if streams.gate_rank:
        shapes = {TO_STREAM_GATES: (streams.gate_rank, width), FROM_STREAM_GATES: (width, streams.gate_rank)}
        shapes |= {} if is_end else {RESULT_SHARES: (streams.count, width)}
        for name, shape in shapes.items():
            # What gates and shares are made of is divided by the number of streams.
            factor = 1.0 if name == FROM_STREAM_GATES else 1 / streams.count
            weight = matrix(f"{path}.{name}", shape, Sharding.REPLICATED, context.dtype, part)
            yield replace(weight, in_linear_layer=False, factor=factor)
        return
    num_shares, num_scales = (streams.count, 1) if is_end else (streams.num_shares, streams.num_scales)
    base = vector(f"{path}.base", num_shares, Sharding.REPLICATED, part)
    yield replace(base, name=f"{path}.fn", shape=(num_shares, width), in_linear_layer=False)
    yield base
    yield vector(f"{path}.scale", num_scales, Sharding.REPLICATED, part)
