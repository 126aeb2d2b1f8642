"""The tower of LFM3-VL (https://huggingface.co/LiquidAI), as config.json spells it. Torch-free.

Most of its layers convolve patches with those around them; images are of any size, and their patches have rotary
positions.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import MLP_NAMES, NO_BIASES, PREFIXES, layer_kinds, read_sizes, rope_theta

_CONV, _FULL = "conv", "full_attention"
_NAMES = TowerNames(
    prefixes=PREFIXES,
    renamed=(
        ("patchifier.", "patch_embed.proj."),
        ("embedding_norm.", "first_norm."),
        ("layer_norm.", "norm."),
        ("layers.", "blocks."),
        (".operator_norm.", ".norm1."),
        (".ffn_norm.", ".norm2."),
        (".self_attn.out_proj.", ".attn.proj."),
        (".self_attn.", ".attn."),
        ("_layernorm.", "_norm."),
        (".feed_forward.w1.", ".mlp.gate_proj."),
        (".feed_forward.w3.", ".mlp.up_proj."),
        (".feed_forward.w2.", ".mlp.down_proj."),
        *MLP_NAMES,
    ),
)


def read_lfm3_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of LFM3-VL."""
    config.only(projector_hidden_act="gelu")
    sizes = read_sizes(vision, text)
    heads = sizes["num_heads"]
    kv_heads, side = vision.positive("num_key_value_heads", 8), vision.positive("conv_kernel_size", 3)
    if heads % kv_heads:
        raise vision.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if side % 2 == 0:
        raise vision.error("conv_kernel_size", f"{side} is even, and the square has no patch in its middle")
    default = [_CONV if number < 2 or number % 2 else _FULL for number in range(sizes["depth"])]
    kinds = layer_kinds(vision, (_CONV, _FULL), default)
    return VisionConfig(
        names=_NAMES,
        processor="qwen2_vl",
        num_kv_heads=kv_heads,
        temporal_patch_size=vision.positive("temporal_patch_size", 2),
        has_flat_patches=True,
        merge_size=vision.positive("spatial_merge_size", 2),
        merger=MergerConfig(
            kind="squares",
            size=config.positive("projector_hidden_size", 4096),
            has_bias=config.get("projector_bias", bool, True),
        ),
        norm="rms",
        eps=vision.positive_number("norm_eps", 1e-5),
        activation="silu",
        is_gated=True,
        qk_norm="head",
        has_first_norm=True,
        rope="same",
        rope_theta=rope_theta(vision, 1_000_000.0),
        conv_layers=tuple(number for number, kind in enumerate(kinds) if kind == _CONV),
        conv_size=side,
        image_token_id=config.get("image_token_id", int, 125_030),
        **NO_BIASES,
        **sizes,
    )
