"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence): a mixture of experts, of which each token has one
and a shared one; layers that rotate and norm queries and keys, and layers that do neither and scale queries by their
position.

Layers that rotate attend within chunks of the text (`attention_chunk_size`), which in a sequence of one chunk is full
attention. Longer sequences are not computed.
"""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.llama import rotating_layers
from nvcli.models.families.model_file import FULL, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig, QueryScaling
from nvcli.models.vision.llama4 import read_llama4_vision

_CHUNKED = "chunked_attention"
_LAYOUT = CheckpointLayout(
    renamed=((".feed_forward.router.", ".mlp.gate."), (".feed_forward.", ".mlp.")), transposes_experts="some"
)


def read(config: ModelFile) -> DecoderConfig:
    """Read the decoder. It is limited to a chunk of its attention."""
    config.only(num_experts_per_tok=1)
    rotates, dense = rotating_layers(config), config.mlp(size_key="intermediate_size_mlp")
    experts = config.experts(
        config.routing(keys=("num_local_experts",), scoring="sigmoid"),
        size_key="intermediate_size",
        weighs_inputs=True,
        shared=config.mlp(),
    )
    sparse = _sparse_layers(config)
    attention = {has_rope: _attention(config, has_rope=has_rope) for has_rope in (True, False)}
    kinds = config.layer_types(supported=(_CHUNKED, FULL)) or [_CHUNKED if one else FULL for one in rotates]
    return config.decoder(
        (
            LayerConfig(mixer=attention[has_rope], mlp=experts if number in sparse else dense)
            for number, has_rope in enumerate(rotates)
        ),
        layout=_LAYOUT,
        max_positions=config.positive("attention_chunk_size", 8192, least=2) if _CHUNKED in kinds else None,
    )


def _attention(config: ModelFile, *, has_rope: bool) -> AttentionConfig:
    attention = config.attention(bias=config.bias(), rope=config.rope(500_000.0, is_interleaved=True))
    if has_rope:
        norms = config.get("use_qk_norm", bool, True)
        return replace(attention, qk_norm="head", weighs_norms=False, norms_last=True) if norms else attention
    scaling = QueryScaling(
        beta=config.positive_number("attn_scale", 0.1), length=config.positive("floor_scale", 8192), offset=1
    )
    tunes = bool(config.values.get("attn_temperature_tuning", True))  # some files have a number
    return replace(attention, rope=None, query_scaling=scaling if tunes else None)


def _sparse_layers(config: ModelFile) -> set[int]:
    """Read which layers have experts: those in `moe_layers`, or else every `interleave_moe_layer_step`-th one."""
    count, found = config.num_layers(), config.values.get("moe_layers")
    if found is None:
        step = config.positive("interleave_moe_layer_step", 1)
        return set(range(step - 1, count, step))
    if not isinstance(found, list) or any(number not in range(count) for number in found):
        raise config.error("moe_layers", f"{show(found)} is not a list of numbers of {count} layers")
    return set(found)


LLAMA4 = Family(
    name="Llama 4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    features="a mixture of experts; up to a chunk of its attention (8,192 tokens); a vision tower; marked tiles",
    examples=("meta-llama/Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
    read=read,
    read_vision=read_llama4_vision,
    defaults={"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16384},
)
