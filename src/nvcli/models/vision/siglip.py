"""The towers of Gemma 3 and PaliGemma (SigLIP, https://arxiv.org/abs/2303.15343), of Idefics 3 and SmolVLM
(https://arxiv.org/abs/2504.05299), of LFM2-VL (SigLIP 2, https://arxiv.org/abs/2502.14786), of Aya Vision
(https://arxiv.org/abs/2505.08751) and Command A Vision, and of PaddleOCR-VL (https://arxiv.org/abs/2510.14528), as
config.json spells them. Torch-free.

Gemma 3's images are squares of one size, and the mean of a square of patches becomes a token. The decoder's tokens of
an image attend to all of them. Idefics 3, Aya Vision and Command A Vision cut images into squares, which are marked in
the prompt; LFM2-VL does so with large ones, and others are of any size. PaddleOCR-VL's images are of any size, with
rotary positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig, deep_outputs
from nvcli.models.vision.vision_file import (
    MLP_NAMES,
    PREFIXES,
    image_token,
    layer_list,
    read_axes,
    read_sizes,
    read_tiles,
    rope_theta,
    square,
)

RENAMED = (
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("embeddings.position_embedding.", "pos_embed."),
    ("encoder.layers.", "blocks."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".self_attn.out_proj.", ".attn.proj."),
    (".self_attn.", ".attn."),
    (".mlp.fc", ".mlp.linear_fc"),
    ("post_layernorm.", "last_norm."),
)
"""Parts of the names of SigLIP's tensors."""
_LEFT = (f"{TOWER}.head.", f"{TOWER}.embeddings.packing_position_embedding.")
"""Tensors that make one vector of an image, and a table that nothing reads."""
_PREFIXES = (("vision_tower.vision_model.", f"{TOWER}."), *PREFIXES)  # the first in older files
_GEMMA = TowerNames(
    prefixes=_PREFIXES,
    renamed=(
        *RENAMED,
        ("mm_soft_emb_norm.", "norm."),
        ("mm_input_projection_weight", "projection.weight"),
    ),
    left=_LEFT,
)
_IDEFICS = TowerNames(
    prefixes=(("vision_model.", f"{TOWER}."), ("connector.modality_projection.proj.", f"{TOWER}.merger.projection.")),
    renamed=RENAMED,
)
_DOCLING = TowerNames(
    prefixes=(
        ("vision_model.connector.coarse.deepstack_mergers.", f"{TOWER}.deepstack_merger_list."),
        ("vision_model.connector.", f"{TOWER}.merger."),
        ("vision_model.", f"{TOWER}."),
    ),
    renamed=(
        ("coarse.", ""),
        ("layer_norm.", "norm."),
        ("ln_in.", "norm."),
        ("ln_mid.", "middle_norm."),
        ("ln_out.", "last_norm."),
        ("mlp_fc2.", "linear_fc2."),
        *RENAMED,
        *MLP_NAMES,
    ),
    left=(f"{TOWER}.merger.fine.",),
)
SQUARES = TowerNames(
    prefixes=_PREFIXES,
    renamed=(*RENAMED, ("layer_norm.", "norm."), ("layernorm.", "norm."), *MLP_NAMES),
    left=_LEFT,
)
_PADDLE = TowerNames(
    prefixes=(
        ("visual.vision_model.", f"{TOWER}."),
        ("visual.", f"{TOWER}."),
        ("mlp_AR.", f"{TOWER}.merger."),
        ("projector.", f"{TOWER}.merger."),
    ),
    renamed=(*RENAMED, ("pre_norm.", "norm."), *MLP_NAMES),
    left=_LEFT,
)
_TEXT = ImageText(  # `full_image_sequence` of transformers' processor
    written="<start_of_image>",
    token="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
)
_TILES = ImageText(  # `get_image_prompt_string` of transformers' processor
    written="<image>",
    token="<image>",
    tile="<fake_token_around_image><row_{row}_col_{column}>",
    row_end="\n",
    whole="\n\n<fake_token_around_image><global-img>",
    alone="<fake_token_around_image><global-img>",
    after="<fake_token_around_image>",
)
_PAGE_TILES = replace(  # `replace_image_token` of transformers' processor
    _TILES, alone="<fake_token_around_image><row_1_col_1>", after_alone="\n"
)
_LARGE_IN_TILES = ImageText(
    written="<image>",
    token="<image>",
    before="<|image_start|>",
    tile="<|img_row_{row}_col_{column}|>",
    whole="<|img_thumbnail|>",
    after="<|image_end|>",
)
_AYA_TILES = ImageText(
    written="<image>",
    token="<|IMG_PATCH|>",
    before="<|START_OF_IMG|>",
    tile="TILE_{number}",
    whole="TILE_GLOBAL",
    alone="TILE_GLOBAL",
    after="<|END_OF_IMG|>",
)
_COMMAND_TILES = ImageText(
    written="<|IMG_PATCH|>",
    token="<|IMG_PATCH|>",
    before="<|START_OF_IMG|>",
    tile_end="<|IMG_LINE_BREAK|>",
    after="<|IMG_LINE_BREAK|><|END_OF_IMG|>",
)
_IDEFICS_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
"""Keys that files leave out."""


def read_gemma3_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Gemma 3."""
    sizes, image = siglip_sizes(vision, text), vision.positive("image_size")
    patch = sizes["patch_size"]
    side = image // patch
    tokens = square(config, "mm_tokens_per_image", config.positive("mm_tokens_per_image", 256))
    if side % tokens or image % patch:
        raise config.error("mm_tokens_per_image", f"{tokens} × {tokens} tokens do not divide {image} pixels of a side")
    return VisionConfig(
        names=_GEMMA,
        processor="gemma3",
        merge_size=side // tokens,
        merger=MergerConfig(kind="pool", size=0, norm="rms from 1", eps=sizes["eps"]),
        tile_tokens=tokens,
        num_positions=side**2,
        attends_both_ways="all",
        image_token_id=image_token(config, 262_144),
        text=_TEXT,
        **sizes,
    )


def read_paligemma_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of PaliGemma, each of whose patches becomes a token."""
    sizes = siglip_sizes(vision, text)
    tiles = read_tiles(vision, sizes["patch_size"], default=224)
    tokens = tiles["num_positions"]
    if config.positive("projection_dim", sizes["out_size"]) != sizes["out_size"]:
        raise config.error("projection_dim", f"is not the decoder's hidden size, {sizes['out_size']}")
    window = text.values.get("sliding_window")
    if isinstance(window, int) and tokens >= window:
        problem = (
            f"images have {tiles['num_positions']:,} tokens, and `sliding_window` {window:,}, which no prompt may fill"
        )
        raise vision.error("image_size", problem)
    return VisionConfig(
        names=replace(SQUARES, renamed=(*SQUARES.renamed, ("linear.", "projection."))),
        processor="clip",
        merger=MergerConfig(kind="linear", size=0),
        attends_both_ways="prompts",
        image_token_id=image_token(config, 256_000),
        **tiles,
        **sizes,
    )


def read_idefics3_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Idefics 3 and SmolVLM."""
    vision = vision.with_defaults(_IDEFICS_DEFAULTS)
    sizes, merge = siglip_sizes(vision, text), config.positive("scale_factor", 2)
    return VisionConfig(
        names=_IDEFICS,
        processor="idefics3",
        merger=MergerConfig(kind="linear", size=0, has_bias=False),
        image_token_id=config.get("image_token_id", int, 128_257),
        text=_TILES,
        **read_tiles(vision, sizes["patch_size"], merge, default=224),
        **sizes,
    )


def read_docling_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Granite Docling, without its path to four times as many tokens."""
    vision = vision.with_defaults({**_IDEFICS_DEFAULTS, "hidden_size": 768, "num_attention_heads": 12})
    sizes, merge = siglip_sizes(vision, text), vision.positive("scale_factor", 4)
    if sizes["out_size"] % 4:
        raise text.error("hidden_size", f"{sizes['out_size']} is not a multiple of 4")
    return VisionConfig(
        names=_DOCLING,
        processor="granite_docling",
        merger=MergerConfig(kind="placed", size=sizes["out_size"], eps=1e-5),
        deepstack=deep_outputs(layer_list(vision, "deepstack_visual_indexes", (3, 7, 10), depth="num_hidden_layers")),
        image_token_id=config.get("image_token_id", int, 100_337),
        text=_PAGE_TILES,
        **read_tiles(vision, sizes["patch_size"], merge, default=512),
        **sizes,
    )


def read_lfm2_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of LFM2-VL."""
    config.only(projector_hidden_act="gelu", vision_feature_layer=-1, use_image_special_tokens=True)
    sizes = siglip_sizes(vision, text)
    positions = vision.positive("num_patches", 256)
    square(vision, "num_patches", positions)
    return VisionConfig(
        names=SQUARES,
        processor="lfm2_vl",
        merge_size=config.positive("downsample_factor", 2),
        merger=MergerConfig(
            kind="squares",
            size=config.positive("projector_hidden_size", 2560),
            has_norm=config.get("projector_use_layernorm", bool, True),
            norms_squares=True,
            has_bias=config.get("projector_bias", bool, True),
            eps=1e-5,
        ),
        has_last_channels=True,
        num_positions=positions,
        interpolation="antialiased",
        image_token_id=config.get("image_token_id", int, 396),
        text=_LARGE_IN_TILES,
        **sizes,
    )


def read_aya_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Aya Vision, whose last norm is not computed."""
    config.only(vision_feature_layer=-1, vision_feature_select_strategy="full")
    tower = _gated(config, vision, text, eps=config.positive_number("adapter_layer_norm_eps", 1e-6))
    return replace(
        tower,
        names=replace(SQUARES, left=(*_LEFT, f"{TOWER}.last_norm.")),
        has_last_norm=False,
        image_token_id=image_token(config, 255_036),
        text=_AYA_TILES,
    )


def read_command_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Command A Vision."""
    return replace(_gated(config, vision, text, eps=None), processor="cohere2_vision")


def _gated(config: JsonFile, vision: JsonFile, text: JsonFile, *, eps: float | None) -> VisionConfig:
    """Read a tower with a gated MLP over squares of patches, which are normed before it unless `eps` is None."""
    sizes = siglip_sizes(vision, text)
    inner = config.positive("alignment_intermediate_size", sizes["out_size"] if eps else 36_864)
    if inner % 2:
        raise config.error("alignment_intermediate_size", f"{inner} is odd, and half of it is a gate")
    return VisionConfig(
        names=SQUARES,
        processor="got_ocr2",
        merger=MergerConfig(
            kind="squares",
            size=inner,
            is_gated=True,
            has_norm=eps is not None,
            norms_squares=True,
            eps=eps or 1e-6,
        ),
        image_token_id=config.get("image_token_id", int, 255_036),
        text=_COMMAND_TILES,
        **read_tiles(vision, sizes["patch_size"], config.positive("downsample_factor", 2), default=512),
        **sizes,
    )


def read_paddleocr_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of PaddleOCR-VL."""
    sizes, merge = siglip_sizes(vision, text), vision.positive("spatial_merge_size", 2)
    return VisionConfig(
        names=_PADDLE,
        processor="paddleocr_vl",
        merge_size=merge,
        merger=MergerConfig(kind="squares", size=sizes["hidden_size"] * merge**2, eps=1e-5),
        rope="same",
        rope_theta=rope_theta(vision),
        num_positions=(vision.positive("image_size", 384) // sizes["patch_size"]) ** 2,
        interpolation="borders",
        axes=read_axes(text, (16, 24, 24)),
        image_token_id=config.get("image_token_id", int, 100_295),
        **sizes,
    )


def siglip_sizes(vision: JsonFile, text: JsonFile) -> dict[str, Any]:
    """Read what these towers have in common."""
    vision.only(hidden_act="gelu_pytorch_tanh")
    return {
        **read_sizes(vision, text),
        "eps": vision.positive_number("layer_norm_eps", 1e-6),
        "activation": "gelu_tanh",
        "has_last_norm": True,
    }
