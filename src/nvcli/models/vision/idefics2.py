"""The tower of Idefics 2 (SigLIP, https://arxiv.org/abs/2303.15343), as config.json spells it. Torch-free.

Images have any size, and may be read in quarters beside the whole. All of them have equally many tokens.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.siglip import RENAMED, siglip_sizes
from nvcli.models.vision.vision_config import TOWER, LatentsConfig, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import side_of

_NAMES = TowerNames(
    prefixes=(
        ("vision_model.", f"{TOWER}."),
        ("connector.modality_projection.", f"{TOWER}.merger."),
        ("connector.perceiver_resampler.latents", f"{TOWER}.merger.latents.weight"),
        ("connector.perceiver_resampler.", f"{TOWER}.merger."),
    ),
    renamed=(
        (".input_latents_norm.", ".norm1."),
        (".input_context_norm.", ".context_norm."),
        (".post_attention_layernorm.", ".norm2."),
        (".self_attn.o_proj.", ".attn.proj."),
        *RENAMED,
    ),
)
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 32,
}
_MARK = "<fake_token_around_image>"
_QUARTERS = ImageText(  # `Idefics2Processor` of transformers
    written="<image>", token="<image>", before=_MARK, tile_end=_MARK, after=_MARK, joint=_MARK
)


def read_idefics2_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Idefics 2. Its files leave out so much that any file of another model would fit."""
    config.only(model_type="idefics2")
    vision = vision.with_defaults(_DEFAULTS)
    sizes, perceiver = siglip_sizes(vision, text), config.object("perceiver_config")
    out, inner = sizes["out_size"], text.positive("intermediate_size")
    heads, kv_heads = perceiver.positive("resampler_n_heads", 16), perceiver.positive("num_key_value_heads", 4)
    if heads % kv_heads:
        raise perceiver.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    perceiver.only(hidden_act="silu")
    text.only(hidden_act="silu")
    has_size = perceiver.positive("hidden_size", 4096) == out
    return VisionConfig(
        names=_NAMES,
        processor="idefics2",
        merge_size=1,
        merger=MergerConfig(
            kind="latents",
            size=inner,
            norm="rms",
            has_bias=False,
            eps=(perceiver if has_size else text).positive_number("rms_norm_eps", 1e-6 if has_size else None),
            latents=LatentsConfig(
                count=perceiver.positive("resampler_n_latents", 64),
                depth=perceiver.positive("resampler_depth", 3),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=perceiver.positive("resampler_head_dim", 96),
            ),
        ),
        num_positions=(side_of(vision, "image_size", 224) // sizes["patch_size"]) ** 2,
        interpolation="shares",
        image_token_id=config.get("image_token_id", int, 32_001),
        text=_QUARTERS,
        **sizes,
    )
