"""Qwen3-Next, and the decoder of Qwen 3.5 and 3.6: gated delta nets (https://arxiv.org/abs/2412.06464) between layers
of gated full attention. The head for multi-token prediction is one more layer of full attention; it is left on disk
unless a run drafts tokens by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, LINEAR, ModelFile
from nvcli.models.families.qwen import read_mlps
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import OutputGate
from nvcli.models.mixers.delta_net import DeltaNetConfig, StoredProjections
from nvcli.models.mixers.mixer import FeedForward, NormConfig
from nvcli.models.mtp_config import PREFIX, MTPConfig
from nvcli.models.vision.qwen import read_qwen3_5_vision

_LAYOUT = CheckpointLayout(left=(PREFIX,))


def read_qwen3_next(config: ModelFile) -> DecoderConfig:
    """Read Qwen3-Next: a mixture of experts, with the delta nets' projections fused head by head."""
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    return _read(config, read_mlps(config, shared=shared, gates_shared=True), stored="by head")


def read_qwen3_5(config: ModelFile) -> DecoderConfig:
    """Read a dense model."""
    return _read(config, config.mlp())


def read_qwen3_5_moe(config: ModelFile) -> DecoderConfig:
    """Read a mixture of experts, with a shared expert. The weights of a token's experts add up to 1."""
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    experts = config.experts(config.routing(renormalise=True), shared=shared, gates_shared=True)
    return _read(config, experts)


def _read(
    config: ModelFile, mlps: FeedForward | Iterable[FeedForward], *, stored: StoredProjections = "qkv"
) -> DecoderConfig:
    attention = config.attention(
        qk_norm="head", gate=OutputGate(is_in_queries=True), bias=config.bias(), rope=config.rope(default_partial=0.25)
    )
    mixers = {FULL: attention, LINEAR: read_delta_net(config, stored=stored)}
    layers = config.layers(_layer_types(config), mixers, mlps)
    norm = config.rms_norm(weight_offset=1.0)
    return config.decoder(layers, norm=norm, layout=_LAYOUT, mtp=_head(config, layers, norm))


def _head(config: ModelFile, layers: Sequence[LayerConfig], norm: NormConfig) -> MTPConfig | None:
    """Read the head; older files do not say that there is one."""
    count = config.get("mtp_num_hidden_layers", int, 1)
    if count != 1 or config.get("mtp_use_dedicated_embeddings", bool, False):
        return None
    return MTPConfig(layer=next(layer for layer in reversed(layers) if not layer.mixer.kv_spec().is_state), norm=norm)


def read_delta_net(config: ModelFile, **settings: Any) -> DeltaNetConfig:
    """Read the heads and the convolution. `settings` are the other fields of `DeltaNetConfig`."""
    num_key_heads, num_value_heads = config.positive("linear_num_key_heads"), config.positive("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise config.error("linear_num_value_heads", f"{num_key_heads} key heads do not divide {num_value_heads}")
    return DeltaNetConfig(
        num_key_heads=num_key_heads,
        key_dim=config.positive("linear_key_head_dim", most=256),
        num_value_heads=num_value_heads,
        value_dim=config.positive("linear_value_head_dim", most=256),
        conv_taps=config.conv_taps("linear_conv_kernel_dim"),
        **settings,
    )


def _layer_types(config: ModelFile) -> list[str]:
    """Read `layer_types`; if they are absent, every `full_attention_interval`-th layer has full attention."""
    key = "full_attention_interval"
    return config.with_full(config.layer_kinds(lambda number: (number + 1) % config.positive(key) == 0, other=LINEAR))


_DEFAULTS = {"full_attention_interval": 4}

QWEN3_NEXT = Family(
    name="Qwen3-Next",
    architectures=("Qwen3NextForCausalLM",),
    features="gated delta nets between layers of gated attention; a mixture of experts",
    examples=("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    read=read_qwen3_next,
    defaults=_DEFAULTS,
)
QWEN3_5 = Family(
    name="Qwen 3.5, 3.6 dense",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    features="gated delta nets between layers of gated attention; a vision tower",
    examples=("Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-9B"),
    read=read_qwen3_5,
    read_vision=read_qwen3_5_vision,
    defaults=_DEFAULTS,
)
QWEN3_5_MOE = Family(
    name="Qwen 3.5, 3.6 MoE",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    features="gated delta nets between layers of gated attention; a mixture of experts; a vision tower",
    examples=("Qwen/Qwen3.5-35B-A3B",),
    read=read_qwen3_5_moe,
    read_vision=read_qwen3_5_vision,
    defaults=_DEFAULTS,
)
