"""The tower of Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4), as config.json spells it. Torch-free.

Images have any shape, and a limited number of tokens. Gemma 4 12B has a tower without layers, which norms and projects
the pixels of each token.
"""

from __future__ import annotations

from typing import Any

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import NO_BIASES, read_sizes, rope_theta

_NAMES = TowerNames(
    prefixes=tuple((f"{part}.", f"{TOWER}.") for part in ("vision_tower", "vision_embedder", "embed_vision")),
    renamed=(
        ("patch_embedder.input_proj.", "patch_embed.proj."),
        ("patch_embedder.position_embedding_table", "pos_embed.weight"),
        ("encoder.layers.", "blocks."),
        (".input_layernorm.", ".norm1."),
        (".post_attention_layernorm.", ".result_norm1."),
        (".pre_feedforward_layernorm.", ".norm2."),
        (".post_feedforward_layernorm.", ".result_norm2."),
        (".self_attn.o_proj.", ".attn.proj."),
        (".self_attn.", ".attn."),
        (".linear.", "."),
        ("std_bias", "merger.shift.weight"),
        ("std_scale", "merger.scale.weight"),
        ("multimodal_embedder.", ""),
        ("embedding_projection.", "merger.projection."),
        ("patch_ln1.", "patch_norm."),
        ("patch_dense.", "patch_embed.proj."),
        ("patch_ln2.", "first_norm."),
        ("pos_embedding", "pos_embed.weight"),
        ("pos_norm.", "last_norm."),
    ),
)
_TEXT = ImageText(written="<|image|>", token="<|image|>", before="<|image>", after="<image|>")
_BOTH_WAYS = "use_bidirectional_attention"


def read_gemma4_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Gemma 4."""
    vision.only(hidden_activation="gelu_pytorch_tanh")
    sizes = read_sizes(vision, text)
    vision.only(head_dim=sizes["hidden_size"] // sizes["num_heads"], num_key_value_heads=sizes["num_heads"])
    return VisionConfig(
        merge_size=vision.positive("pooling_kernel_size", 3),
        merger=MergerConfig(
            kind="project",
            size=0,
            eps=vision.positive_number("rms_norm_eps", 1e-6),
            scale=sizes["hidden_size"] ** 0.5,
            is_standardised=vision.get("standardize", bool, False),
        ),
        norm="rms",
        eps=vision.positive_number("rms_norm_eps", 1e-6),
        is_gated=True,
        centres_pixels=True,
        qk_norm="head",
        norms_values=True,
        has_bounds=vision.get("use_clipped_linears", bool, False),
        has_result_norms=True,
        rope="halves",
        rope_theta=rope_theta(vision, 100.0),
        num_positions=vision.positive("position_embedding_size", 10_240),
        interpolation="axes",
        **NO_BIASES,
        **_common(config, text),
        **sizes,
    )


def read_gemma4_unified_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Gemma 4 12B, which has no layers."""
    size = vision.positive("mm_embed_dim")
    vision.only(output_proj_dims=size)
    return VisionConfig(
        depth=0,
        hidden_size=size,
        intermediate_size=0,
        num_heads=1,
        patch_size=vision.positive("patch_size", 16) * vision.positive("pooling_kernel_size", 3),
        merge_size=1,
        merger=MergerConfig(kind="project", size=0, eps=vision.positive_number("rms_norm_eps", 1e-6)),
        eps=1e-5,
        has_patch_norm=True,
        has_first_norm=True,
        has_last_norm=True,
        num_positions=vision.positive("mm_posemb_size"),
        interpolation="turns",
        out_size=text.positive("hidden_size"),
        **_common(config, text),
    )


def _common(config: JsonFile, text: JsonFile) -> dict[str, Any]:
    """Read what both have in common."""
    return {
        "names": _NAMES,
        "processor": "gemma4",
        "activation": "gelu_tanh",
        "has_last_channels": True,
        "attends_both_ways": "windows" if text.has(_BOTH_WAYS) else "",
        "image_token_id": config.get("image_token_id", int, 258_880),
        "text": _TEXT,
    }
