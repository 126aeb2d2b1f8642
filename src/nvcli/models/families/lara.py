"""Lara 4 Mini (https://huggingface.co/translated/Lara-4-Mini-Base): gated delta nets between layers of attention, which
rotate heads and have a window, or neither; experts in all layers, beside one that all tokens share."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, LINEAR, SLIDING, ModelFile
from nvcli.models.families.qwen_hybrid import read_delta_net
from nvcli.models.layer_config import DecoderConfig

_LAYOUT = CheckpointLayout(
    renamed=((".linear_attn.in_proj.", ".linear_attn.qkvzba_proj."), (".linear_attn.out_norm.", ".linear_attn.norm.")),
)
_KINDS = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
"""The kinds of layers of files that do not list them, which repeat."""


def read(config: ModelFile) -> DecoderConfig:
    """Read three kinds of layers, of which those with a window alone rotate heads."""
    kinds = config.layer_types(supported=(LINEAR, SLIDING, FULL))
    kinds = kinds or [_KINDS[number % len(_KINDS)] for number in range(config.num_layers())]
    attention = config.by_kind(config.attention(qk_norm="head", rope=config.rope()), 512, full_rotates=False)
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    experts = config.experts(config.routing(renormalise=config.get("norm_topk_prob", bool, True)), shared=shared)
    layers = config.layers(kinds, {**attention, LINEAR: read_delta_net(config)}, experts)
    return config.decoder(layers, layout=_LAYOUT)


LARA = Family(
    name="Lara 4 Mini",
    architectures=("LaraMiniForCausalLM",),
    features="gated delta nets, windows and full attention without rotary positions; a mixture of experts",
    examples=("translated/Lara-4-Mini-Base",),
    read=read,
    ties_embeddings=True,
    defaults={"head_dim": 128, "num_key_value_heads": 4},
)
