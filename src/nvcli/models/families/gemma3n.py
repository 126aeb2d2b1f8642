"""Gemma 3n (https://ai.google.dev/gemma/docs/gemma-3n): four residual streams, of which each layer changes one and
guesses the others, a product of low rank beside attention, inputs of each layer, the keys and values of earlier layers
in the last ones, and MLPs of whose gates few count in the first ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.altup_config import AltUpConfig
from nvcli.models.families.family import Family
from nvcli.models.families.gemma import GEMMA3, NORMS_ON_BOTH_SIDES, read_local_rope
from nvcli.models.families.gemma4 import kv_owners, read_layer_inputs
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import MOST_STREAMS, DecoderConfig, LayerConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.mixers.sparse_mlp import SparseMLPConfig

_SIZES, _SPARSITY = "intermediate_size", "activation_sparsity_pattern"
_GLOBAL_THETA = 1_000_000.0


def read(config: ModelFile) -> DecoderConfig:
    """Read the text part. Every fifth layer has full attention."""
    config.only(altup_active_idx=0, altup_correct_scale=True, hidden_activation="gelu_pytorch_tanh")
    return config.decoder(
        _layers(config),
        embedding_scale=float(config.positive("hidden_size") ** 0.5),
        rounds_embedding_scale=True,
        layer_inputs=read_layer_inputs(config, may_lack_ids=True),
        altup=AltUpConfig(
            count=config.positive("altup_num_inputs", 4, least=2, most=MOST_STREAMS),
            rank=config.positive("laurel_rank", 64),
        ),
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
    )


def _layers(config: ModelFile) -> Iterator[LayerConfig]:
    kinds = config.every_nth_full(5)
    attention = {
        kind: config.attention(
            scale=1.0,
            window=config.window_of(kind, 512),
            qk_norm="head",
            norms_values=True,
            bias=config.bias(),
            rope=read_local_rope(config) if kind == SLIDING else config.rope(_GLOBAL_THETA),
        )
        for kind in (SLIDING, FULL)
    }
    owners = kv_owners(config, kinds)
    for kind, owner, mlp in zip(kinds, owners, _mlps(config), strict=True):
        yield LayerConfig(mixer=replace(attention[kind], reads_kv_of=owner), mlp=mlp, norms=NORMS_ON_BOTH_SIDES)


def _mlps(config: ModelFile) -> Iterator[MLPConfig]:
    """Read one size for all layers or one for each, and which share of each layer's gates does not count."""
    count = config.num_layers()
    sizes, shares = config.values.get(_SIZES), config.of_layers(_SPARSITY)
    sizes = config.of_layers(_SIZES) if isinstance(sizes, list) else [sizes] * count
    shares = shares or [0.95 if number < 10 < count else 0.0 for number in range(count)]
    for size, share in zip(sizes or (), shares, strict=True):
        of_layer = config.replacing(**{_SIZES: size, _SPARSITY: share})
        share = of_layer.get(_SPARSITY, float, 0.0)
        if not 0 <= share < 1:
            raise config.error(_SPARSITY, f"{show(share)} is not a share, from 0 to below 1")
        mlp = of_layer.mlp(key="hidden_activation", default="gelu_pytorch_tanh")
        yield (
            mlp
            if share == 0
            else SparseMLPConfig(intermediate_size=mlp.intermediate_size, activation=mlp.activation, sparsity=share)
        )


GEMMA3N = Family(
    name="Gemma 3n",
    architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    features="alternating updates of residual streams, inputs of each layer, shared keys, sparse MLPs; text alone",
    examples=("google/gemma-3n-E4B-it", "google/gemma-3n-E2B-it"),
    read=read,
    ties_embeddings=True,
    defaults={
        **GEMMA3.defaults,
        "vocab_size": 262_400,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "num_kv_shared_layers": 15,
    },
)
