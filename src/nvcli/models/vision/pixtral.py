"""The tower of Pixtral 12B (https://arxiv.org/abs/2410.07073), Mistral 3, Mistral Large 4 and LightOnOCR, as
config.json spells it. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import MLP_NAMES, NO_BIASES, PREFIXES, image_token, read_sizes, rope_theta

_RENAMED = (
    ("patch_conv.", "patch_embed.proj."),
    ("ln_pre.", "first_norm."),
    ("transformer.layers.", "blocks."),
    (".attention_norm.", ".norm1."),
    (".ffn_norm.", ".norm2."),
    (".attention.o_proj.", ".attn.proj."),
    (".attention.", ".attn."),
    (".feed_forward.", ".mlp."),
    ("patch_merger.", ""),
    *MLP_NAMES,
)
_MISTRAL = TowerNames(prefixes=PREFIXES, renamed=_RENAMED)
_LARGE4 = TowerNames(
    prefixes=(
        ("vision_encoder.", f"{TOWER}."),
        ("vision_language_adapter.", f"{TOWER}.merger."),
        ("pre_mm_projector_norm.", f"{TOWER}.merger.norm."),
        ("patch_merger.", f"{TOWER}.merger."),
    ),
    renamed=(
        (".wq.", ".q_proj."),
        (".wk.", ".k_proj."),
        (".wv.", ".v_proj."),
        (".wo.", ".o_proj."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
        ("w_in.", "linear_1."),
        ("w_out.", "linear_2."),
        *_RENAMED,
    ),
)
_LIGHTON = TowerNames(
    prefixes=(("vision_encoder.", f"{TOWER}."), ("vision_projection.", f"{TOWER}.merger.")), renamed=_RENAMED
)
_ROWS = ImageText(written="[IMG]", token="[IMG]", between="[IMG_BREAK]", after="[IMG_END]")
_PIXTRAL_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
}
"""Keys that files of Pixtral 12B leave out."""
_ACTIVATIONS: dict[str, Literal["silu", "gelu"]] = {"silu": "silu", "gelu": "gelu"}


def read_mistral3_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Mistral 3, whose rows of tokens end with a token of their own."""
    config.only(vision_feature_layer=-1, projector_hidden_act="gelu")
    has_bias = config.get("multimodal_projector_bias", bool, False)
    return _read(config, vision, text, image_token(config, 10), has_bias=has_bias)


def read_mistral_large4_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Mistral Large 4, whose files have Mistral's own names."""
    return replace(read_mistral3_vision(config, vision, text), names=_LARGE4, has_paired_rows=True)


def read_pixtral_vision(config: JsonFile, vision: JsonFile, text: JsonFile, projector: MergerConfig) -> VisionConfig:
    """Read the tower of Pixtral 12B, whose patches become tokens."""
    config, vision = config.replacing(spatial_merge_size=1), vision.with_defaults(_PIXTRAL_DEFAULTS)
    return replace(_read(config, vision, text, config.get("image_token_index", int, 10)), merger=projector)


def read_lighton_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of LightOnOCR."""
    tower = _read(config, vision, text, config.get("image_token_id", int, 151_655))
    return replace(tower, names=_LIGHTON, text=None)


def _read(
    config: JsonFile, vision: JsonFile, text: JsonFile, image_token_id: int, *, has_bias: bool = False
) -> VisionConfig:
    sizes = read_sizes(vision, text)
    vision.only(head_dim=sizes["hidden_size"] // sizes["num_heads"])
    return VisionConfig(
        names=_MISTRAL,
        processor="pixtral",
        merge_size=config.positive("spatial_merge_size", 2),
        merger=MergerConfig(
            kind="patches",
            size=sizes["out_size"],
            has_bias=has_bias,
            norm="rms",
            eps=text.positive_number("rms_norm_eps", 1e-6),
        ),
        norm="rms",
        eps=1e-5,
        activation=vision.choice("hidden_act", _ACTIVATIONS, "gelu"),
        is_gated=True,
        has_first_norm=True,
        rope="staggered",
        rope_theta=rope_theta(vision),
        image_token_id=image_token_id,
        text=_ROWS,
        **NO_BIASES,
        **sizes,
    )
