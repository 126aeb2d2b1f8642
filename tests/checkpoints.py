"""Small random checkpoints for tests, written as Hugging Face's own tools write them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""The families that `write_tiny_model` writes, by the names of transformers' classes."""


IMAGE_TOKEN = 96
"""The id that stands for a token of an image in tiny checkpoints; no prompt of text has it."""
THINKER = "Thinker"
"""The end of the names of families whose files hold a part for speech besides."""
_WITH_IMAGES = "ForConditionalGeneration"
AFTER_IMAGES = 7
BEFORE_IMAGES = 8
"""The id before the tokens of each image, by which transformers finds some families' images."""
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PIXTRAL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
}
_QWEN_OR_GLM = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
_HUNYUAN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "max_image_size": 28,
}
_SAM = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 2,
    "output_channels": 12,
    "window_size": 6,
    "global_attn_indexes": [1],
    "mlp_dim": 24,
}
WITH_VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gemma3": ("Gemma3Text", "SiglipVision", {**_VISION, "image_size": 32, "patch_size": 4}),
    "PaliGemma": (
        "Gemma",
        "SiglipVision",
        {**_VISION, "image_size": 16, "patch_size": 8, "projection_dim": 32, "vision_use_head": False},
    ),
    "PaliGemma 2": (
        "Gemma2",
        "SiglipVision",
        {**_VISION, "image_size": 16, "patch_size": 8, "projection_dim": 32, "vision_use_head": False},
    ),
    "Qwen3_5": (
        "Qwen3_5Text",
        "Qwen3_5Vision",
        {**_QWEN_OR_GLM, "depth": 1, "intermediate_size": 16, "num_position_embeddings": 16},
    ),
    "Qwen4Exp": (
        "Qwen4ExpText",
        "Qwen4ExpVision",
        {**_QWEN_OR_GLM, "depth": 1, "intermediate_size": 16, "num_position_embeddings": 16},
    ),
    "Qwen2_5_VL": (
        "Qwen2_5_VLText",
        "Qwen2_5_VLVision",
        {**_QWEN_OR_GLM, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3VLMoe": (
        "Qwen3VLMoeText",
        "Qwen3VLMoeVision",
        {**_QWEN_OR_GLM, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    ),
    "CohereCompass": (
        "CohereCompassText",
        "CohereCompassVision",
        {**_QWEN_OR_GLM, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    ),
    "Qwen3VL": (
        "Qwen3VLText",
        "Qwen3VLVision",
        {**_QWEN_OR_GLM, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    ),
    "Gemma4": (
        "Gemma4Text",
        "Gemma4Vision",
        {
            **_VISION,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 160,
            "use_clipped_linears": True,
            "standardize": True,
        },
    ),
    "Gemma4Unified": (
        "Gemma4UnifiedText",
        "Gemma4UnifiedVision",
        {
            "mm_embed_dim": 24,
            "output_proj_dims": 24,
            "mm_posemb_size": 70,
            "patch_size": 4,
            "pooling_kernel_size": 2,
        },
    ),
    "Qwen2VL": (
        "Qwen2VLText",
        "Qwen2VLVision",
        {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4},
    ),
    "Exaone4_5_": (
        "Exaone4",
        "Exaone4_5_Vision",
        {
            **_QWEN_OR_GLM,
            "depth": 3,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "Qwen2_5OmniThinker": (
        "Qwen2_5OmniText",
        "Qwen2_5OmniVisionEncoder",
        {**_QWEN_OR_GLM, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3OmniMoeThinker": (
        "Qwen3OmniMoeText",
        "Qwen3OmniMoeVisionEncoder",
        {**_QWEN_OR_GLM, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [1, 0]},
    ),
    "HyperCLOVAXVisionV2": (
        "HyperCLOVAX",
        "Qwen2_5_VLVision",
        {**_QWEN_OR_GLM, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 24},
    ),
    "QianfanOCR": ("Qwen3", "QianfanOCRVision", {**_VISION, "num_hidden_layers": 2, "image_size": 32, "patch_size": 4}),
    "HunYuanVL": ("HunYuanVLText", "HunYuanVLVision", _HUNYUAN_VISION),
    "HYV4VL": ("HYV4VLText", "HYV4VLVision", _HUNYUAN_VISION),
    "Inkling": (
        "InklingText",
        "InklingVision",
        {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 2},
    ),
    "Mistral3": ("Ministral3", "PixtralVision", {**_PIXTRAL, "hidden_act": "silu"}),
    "MiniMaxM3VL": (
        "MiniMaxM3VLText",
        "MiniMaxM3VLVision",
        {**_VISION, "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 4},
    ),
    "MistralLarge4": ("MistralLarge4Text", "PixtralVision", {**_PIXTRAL, "hidden_act": "silu"}),
    "Glm4v": ("Glm4vText", "Glm4vVision", {**_QWEN_OR_GLM, "image_size": 24}),
    "Step3p7": (
        "Step3p7Text",
        "Step3p7Vision",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 2,
            "max_position_embeddings": 16,
        },
    ),
    "Glm46V": ("Glm4vMoeText", "Glm4vMoeVision", {**_QWEN_OR_GLM, "image_size": 24}),
    "Glm4vMoe": ("Glm4vMoeText", "Glm4vMoeVision", {**_QWEN_OR_GLM, "image_size": 24}),
    "GlmOcr": ("GlmOcrText", "GlmOcrVision", _QWEN_OR_GLM),
    "Glm5Next": (
        "Glm5NextText",
        "Glm5NextVision",
        {**_QWEN_OR_GLM, "projection_intermediate_size": 40, "swiglu_limit": 1.0},
    ),
    "PaddleOCRVL": ("PaddleOCRText", "PaddleOCRVision", {**_VISION, "image_size": 24, "patch_size": 4}),
    "InternVL": (
        "Qwen2",
        "InternVLVision",
        {**_VISION, "num_hidden_layers": 2, "image_size": 32, "patch_size": 4, "use_qk_norm": True},
    ),
    "Llama4": (
        "Llama4Text",
        "Llama4Vision",
        {
            **_VISION,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "image_size": 32,
            "patch_size": 4,
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
    ),
    "MuseGlimmer": (
        "MuseGlimmerText",
        "MuseGlimmerVision",
        {
            **_VISION,
            "num_hidden_layers": 3,
            "layer_types": ["window_attention", "full_attention", "window_attention"],
            "image_size": 32,
            "patch_size": 4,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "max_position_embeddings": 16,
        },
    ),
    "MuseSpark": ("MuseSparkText", "MuseSparkVision", {**_VISION, "image_size": 32, "patch_size": 4}),
    "Kimi_K25": (
        "DeepseekV3",
        "Kimi_K25Vision",
        {**_VISION, "num_hidden_layers": 2, "pos_emb_height": 4, "pos_emb_width": 4, "patch_size": 4},
    ),
    "LightOnOcr": ("Qwen3", "PixtralVision", _PIXTRAL),
    "Llava": ("Llama", "CLIPVision", {**_VISION, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8}),
    "LlavaNext": (
        "Mistral",
        "CLIPVision",
        {**_VISION, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8},
    ),
    "LlavaOnevision": (
        "Qwen2",
        "SiglipVision",
        {**_VISION, "image_size": 34, "patch_size": 8, "vision_use_head": False},
    ),
    "Llava Pixtral": ("Mistral", "PixtralVision", {**_PIXTRAL, "patch_size": 8}),
    "Llava Siglip": (
        "Qwen2",
        "SiglipVision",
        {**_VISION, "image_size": 34, "patch_size": 8, "vision_use_head": False},
    ),
    "VideoLlama3": ("Qwen2", "VideoLlama3Vision", {**_VISION, "num_hidden_layers": 2, "patch_size": 8}),
    "GotOcr2": ("Qwen2", "GotOcr2Vision", _SAM),
    "Ovis2": (
        "Qwen2",
        "Ovis2Vision",
        {
            **_VISION,
            "num_hidden_layers": 2,
            "image_size": 32,
            "patch_size": 4,
            "hidden_stride": 2,
            "vocab_size": 45,
            "qkv_bias": True,
        },
    ),
    "DeepseekOcr2": (
        "DeepseekOcr2Text",
        "DeepseekOcr2Vision",
        {
            "sam_config": {
                **_SAM,
                "num_hidden_layers": 2,
                "image_size": 128,
                "window_size": 14,
                "downsample_channels": [24, 16],
            },
            "encoder_config": {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 24,
                "vocab_size": 2,
            },
        },
    ),
    "Lfm2Vl": ("Lfm2", "Siglip2Vision", {**_VISION, "num_hidden_layers": 2, "num_patches": 25, "patch_size": 4}),
    "GraniteDocling": (
        "GraniteDoclingText",
        "GraniteDoclingVision",
        {
            **_VISION,
            "num_hidden_layers": 3,
            "image_size": 32,
            "patch_size": 4,
            "scale_factor": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0, 2],
        },
    ),
    "Granite4Vision": (
        "Granite4VisionText",
        "SiglipVision",
        {
            **_VISION,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "image_size": 32,
            "patch_size": 4,
            "vision_use_head": False,
        },
    ),
    "Lfm3Vl": (
        "Lfm3",
        "Lfm3VlVision",
        {
            **_VISION,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "patch_size": 4,
        },
    ),
    **{
        f"MiniCPMV4_{number}": (
            "Qwen3_5Text",
            f"MiniCPMV4_{number}Vision",
            {**_VISION, "num_hidden_layers": 3, "image_size": 14, "patch_size": 2, "insert_layer_id": 1},
        )
        for number in (6, 7)
    },
    "MiniCPMOcr": (
        "Qwen3_5Text",
        "MiniCPMOcrVision",
        {**_VISION, "num_hidden_layers": 2, "image_size": 28, "patch_size": 4},
    ),
    "NemotronH_Omni_Reasoning_V3": (
        "NemotronH",
        "Radio",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mlp_ratio": 1.5,
            "patch_size": 4,
            "max_img_size": 32,
            "num_cls_tokens": 2,
            "num_registers": 1,
            "video_temporal_patch_size": 2,
        },
    ),
    **dict.fromkeys(
        ("AyaVision", "Cohere2Vision"),
        (
            "Cohere2",
            "SiglipVision",
            {**_VISION, "num_hidden_layers": 2, "image_size": 32, "patch_size": 4, "vision_use_head": False},
        ),
    ),
    "Idefics2": ("Mistral", "Idefics2Vision", {**_VISION, "num_hidden_layers": 2, "image_size": 64, "patch_size": 8}),
    "Idefics3": ("Llama", "Idefics3Vision", {**_VISION, "num_hidden_layers": 2, "image_size": 34, "patch_size": 4}),
}
"""Families of models that read images too: the classes of their text part and of their vision part, and a tiny one."""


PINPOINTS_OF_32 = [[32, 64], [64, 32], [64, 64], [96, 32]]
PINPOINTS_OF_34 = [[34 * rows, 34 * columns] for rows in range(1, 4) for columns in range(1, 4)]
_OTHER_CLASSES = {"MiniMaxM3VL": "MiniMaxM3Sparse"}
"""The beginnings of the names of models, where those of their configurations are others."""
_LAST_LAYER = {
    "image_token_index": IMAGE_TOKEN,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
_AUDIO = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "output_dim": 32,
    "num_mel_bins": 16,
}
_WHOLE: dict[str, dict[str, Any]] = {
    "Qwen2_5OmniThinker": {
        "image_token_index": IMAGE_TOKEN,
        "vision_start_token_id": BEFORE_IMAGES,
        "audio_config": _AUDIO,
    },
    "Qwen3OmniMoeThinker": {
        "image_token_id": IMAGE_TOKEN,
        "vision_start_token_id": BEFORE_IMAGES,
        "audio_config": {**_AUDIO, "downsample_hidden_size": 8},
    },
    "Gemma3": {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 16},
    **{name: {"image_token_index": IMAGE_TOKEN, "projection_dim": 32} for name in ("PaliGemma", "PaliGemma 2")},
    "Mistral3": {"image_token_index": IMAGE_TOKEN},
    "MistralLarge4": {"image_token_index": IMAGE_TOKEN},
    "MiniMaxM3VL": {"image_token_index": IMAGE_TOKEN, "video_token_index": 95, "projector_hidden_size": 24},
    "Llava": {"image_token_index": IMAGE_TOKEN},
    "Llava Pixtral": {**_LAST_LAYER, "multimodal_projector_bias": False},
    "Llava Siglip": _LAST_LAYER,
    "LlavaNext": {"image_token_index": IMAGE_TOKEN, "image_grid_pinpoints": PINPOINTS_OF_32},
    "LlavaOnevision": {
        "image_token_index": IMAGE_TOKEN,
        "image_grid_pinpoints": PINPOINTS_OF_34,
        "vision_aspect_ratio": "anyres_max_3",
    },
    "AyaVision": {"image_token_index": IMAGE_TOKEN},
    "GotOcr2": {"image_token_index": IMAGE_TOKEN},
    "Idefics2": {
        "image_token_id": IMAGE_TOKEN,
        "perceiver_config": {
            "hidden_size": 32,
            "rms_norm_eps": 1e-5,
            "resampler_n_latents": 5,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "num_key_value_heads": 2,
            "resampler_head_dim": 12,
        },
    },
    "Ovis2": {
        "image_token_id": IMAGE_TOKEN,
        "visual_indicator_token_ids": [90, 91, 92, 93, 94],
    },
    "GraniteDocling": {"image_token_id": IMAGE_TOKEN, "pad_token_id": 0, "density_router_hidden_size": 8},
    "Granite4Vision": {
        "image_token_index": IMAGE_TOKEN,
        "image_grid_pinpoints": PINPOINTS_OF_32,
        "vision_feature_select_strategy": "full",
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[1, 3], [-2, 1], [-1, 0]],
        "spatial_target_layers": [2, 4, 5, 6],
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "hidden_size": 128,
            "encoder_hidden_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "intermediate_size": 24,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
    },
    "Kimi_K25": {"image_token_id": IMAGE_TOKEN, "projection_hidden_size": 16},
    "Lfm3Vl": {"image_token_id": IMAGE_TOKEN, "projector_hidden_size": 24},
    "MiniCPMV4_6": {"image_token_id": IMAGE_TOKEN, "insert_layer_id": 1},
    "MiniCPMV4_7": {
        "image_token_id": IMAGE_TOKEN,
        "insert_layer_id": 1,
        "image_start_id": BEFORE_IMAGES,
        "image_end_id": AFTER_IMAGES,
        "slice_start_id": 90,
        "slice_end_id": 91,
        "newline_id": 92,
    },
    "NemotronH_Omni_Reasoning_V3": {
        "image_token_id": IMAGE_TOKEN,
        "vision_hidden_size": 16,
        "projector_hidden_size": 24,
    },
    "Cohere2Vision": {"image_token_id": IMAGE_TOKEN, "alignment_intermediate_size": 24},
    "MuseGlimmer": {"image_token_id": IMAGE_TOKEN, "out_hidden_size": 64, "projector_hidden_size": 16},
    "MuseSpark": {
        "image_token_id": IMAGE_TOKEN,
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
        "audio_config": {
            "hidden_sizes": (8, 8),
            "patch_sizes": (4, 4),
            "depths": (1, 1),
            "num_hidden_layers": 2,
            "out_hidden_size": 32,
        },
    },
    "Inkling": {"image_token_id": IMAGE_TOKEN, "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8}},
    "Gemma4": {
        "image_token_id": IMAGE_TOKEN,
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16},
    },
}
"""What the configuration of the whole model says besides."""


def tiny_model_config(**overrides: Any) -> dict[str, Any]:
    """Arguments of a transformers configuration; two layers, about 60,000 parameters."""
    arguments = {
        "vocab_size": 97,  # odd, so that tensor parallelism has to pad it
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **overrides,
    }
    if arguments["head_dim"] is None:
        del arguments["head_dim"]  # some families derive it, and take none
    return arguments


SINCE = {
    **dict.fromkeys(("Bamba", "Beam", "Flint", "GptOss", "Kolibri1", "Lfm3", "Mamba2", "MiniMaxM2", "Olmo3"), "5.23"),
    **dict.fromkeys(("AXK2", "BailingHybrid", "HyperCLOVAXVisionV2", "MiMoV2Flash", "Step3p7"), "5.23"),
    **dict.fromkeys(("DeepseekV2", "Ernie4_5_Moe", "Gemma4", "Gemma4Unified", "GraniteMoeHybrid"), "5.17"),
    **dict.fromkeys(("Laguna", "Mellum", "MiniCPM3", "Mistral4", "MuseGlimmer", "NemotronH", "PaddleOCRVL"), "5.17"),
    **dict.fromkeys(("AXK1", "Dbrx", "DeepseekOcr2", "GraniteMoeSWA", "GraniteSWA", "Kimi_K25"), "5.17"),
    **dict.fromkeys(
        ("DeepseekV32", "Glm5Next", "GlmMoeDsa", "GraniteDocling", "HYV4", "HunYuanVL", "KimiLinear", "Lfm3Vl"), "5.23"
    ),
    **dict.fromkeys(("MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7", "NemotronH_Omni_Reasoning_V3"), "5.23"),
    **dict.fromkeys(("CohereCompass", "Dots3Note", "MiniMaxM3VL", "MistralLarge4", "MuseSpark", "Zamba2"), "5.23"),
    **dict.fromkeys(("Apertus1p5", "Dory", "HYV4VL", "Inkling", "LaraMini", "Qwen4Exp"), "5.24"),
}
"""The first version of transformers, of 5.10, 5.17, 5.23 and 5.24, that computes a family as it was published: 5.17
leaves MiniMax-M2's `rotary_dim` unread, and norms all groups of Bamba and Mamba-2 at once."""
_UNKNOWN_BEFORE = {
    *(
        "AXK2",
        "Apertus1p5",
        "BailingHybrid",
        "Beam",
        "CohereCompass",
        "DeepseekOcr2",
        "Dory",
        "Dots3Note",
        "DeepseekV32",
        "Flint",
        "Glm5Next",
        "GlmMoeDsa",
        "GraniteDocling",
        "GraniteMoeSWA",
        "GraniteSWA",
        "HYV4",
        "HYV4VL",
        "HyperCLOVAXVisionV2",
        "HunYuanVL",
        "Inkling",
        "Kimi_K25",
        "KimiLinear",
        "Kolibri1",
        "LaraMini",
        "Lfm3",
        "Lfm3Vl",
        "Mellum",
        "MiMoV2Flash",
        "MiniCPMOcr",
        "MiniCPMV4_6",
        "MiniCPMV4_7",
        "NemotronH_Omni_Reasoning_V3",
        "MiniMaxM3VL",
        "MistralLarge4",
        "MuseSpark",
        "Qwen4Exp",
        "Step3p7",
    ),
    *("MiniCPM3", "MuseGlimmer", "NemotronH", "Olmo3"),
}
"""Those of them of which older versions cannot make the configuration."""


def is_too_old(family: str) -> bool:
    """Tell whether this version of transformers has not yet what `SINCE` says."""
    import transformers

    return Version(transformers.__version__) < Version(SINCE.get(family, "0"))


_last_written: list[Any] = []
"""The checkpoint of `write_tiny_model` that was written last: its folder, its time, and transformers' model of it."""


def write_tiny_model(
    path: Path,
    family: str = "Qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    embedding_scale: float | None = None,
    is_bare: bool = False,
    **overrides: Any,
) -> Path:
    """A random checkpoint of a family, `save_pretrained` into `path`. `is_bare`: without an LM head. `overrides`: its
    configuration's arguments; for a model of more than text, those of its text part.

    The weights are large enough for the logits to differ clearly, and no norm weight or bias is trivial.
    """
    import torch
    import transformers

    generator = torch.Generator().manual_seed(seed)
    arguments = tiny_model_config(**overrides)
    if family == "Qwen2" and "head_dim" not in overrides:
        del arguments["head_dim"]  # its files have none
    model = _make_model(transformers, family, arguments, is_bare=is_bare)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.2
            if "embeddings_table" in name:  # of whose vectors Ovis 2 reads means
                scale = 1.0
            own = name.replace(".norm_attn_norm.", ".")  # DBRX's name of a block
            if ".layer_scale" not in own:  # which RADIO's published files leave out
                parameter.copy_(noise * scale + (1.0 if "norm" in own or ".ln_" in own else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.1 * torch.randn(1, generator=generator))
            elif name.endswith(("e_score_correction_bias", "expert_bias", "rotary_emb.alpha")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("tid2eid"):
                experts = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator)
                buffer.copy_(experts.argsort(dim=1)[:, : buffer.shape[1]])
            elif name.endswith(("_min", "_max")) and "vision" in name:
                buffer.copy_((1 if name.endswith("_max") else -1) * (1 + torch.rand((), generator=generator)))
            elif name.endswith(("std_bias", "std_scale")):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
        model.get_input_embeddings().weight.mul_(3.0 if embedding_scale is None else embedding_scale)
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if family in ("QianfanOCR", "Kimi_K25"):  # save_pretrained mistakes the text part's layers for those of the tower
        edit_weights(path, _rename_text_layers)
    if family.endswith(THINKER):
        edit_weights(path, _put_beside_talker)
        file = path / "config.json"
        thinker = json.loads(file.read_text())
        kind = thinker["model_type"].removesuffix(f"_{THINKER.lower()}")
        whole = {"architectures": [f"{family.removesuffix(THINKER)}{_WITH_IMAGES}"], "model_type": kind}
        file.write_text(json.dumps({**whole, "thinker_config": thinker, "talker_config": {}}))
    if family == "OlmoHybrid":  # save_pretrained cuts the convolutions into three equal parts
        edit_weights(path, _cut_convolutions)
    if dtype == "float32" and family not in WITH_VISION:
        _last_written[:] = [path, _changed_at(path), model]
    return path


def _put_beside_talker(weights: dict[str, Tensor]) -> None:
    import torch

    for name in list(weights):
        weights[f"thinker.{name}"] = weights.pop(name)
    weights["talker.model.layers.0.input_layernorm.weight"] = torch.ones(8)


def _rename_text_layers(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.startswith("language_model.model.")]:
        weights[name.replace(".encoder.", ".").replace(".blocks.", ".layers.")] = weights.pop(name)


def _cut_convolutions(weights: dict[str, Tensor]) -> None:
    import torch

    for name in [name for name in weights if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        sizes = [len(weights[one.replace("conv1d", "proj")]) for one in names]
        parts = torch.cat([weights[one] for one in names]).split(sizes)
        weights.update(zip(names, map(torch.clone, parts), strict=True))


def write_tiny_config(path: Path, family: str = "Qwen3", **overrides: Any) -> Path:
    """The configuration of a checkpoint of `write_tiny_model` alone."""
    import transformers

    config = _make_config(transformers, family, tiny_model_config(**overrides))
    config.architectures = [architecture_of(family)]
    config.save_pretrained(path)
    return path


def architecture_of(family: str) -> str:
    """Return the name of transformers' class of a model. `family` is a name of `WITH_VISION` or of a text model."""
    if family in WITH_VISION:
        name = family.partition(" ")[0]
        return name if _is_whole_name(name) else f"{_OTHER_CLASSES.get(name, name)}{_WITH_IMAGES}"
    if family in ("Apertus1p5Text", "AriaText"):
        return f"{family}ForCausalLM"
    return f"{family}LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"


def _is_whole_name(family: str) -> bool:
    """Whether it is the name of a class, as that of Nemotron 3 Omni, to which nothing is added."""
    return family.endswith("_V3")


def _make_config(transformers: Any, family: str, arguments: dict[str, Any]) -> Any:
    _skip_if_unknown(family.removesuffix("Text"))
    if family not in WITH_VISION:
        return getattr(transformers, f"{family}Config")(**arguments)
    text_name, vision_name, vision_arguments = WITH_VISION[family]
    name = family.partition(" ")[0]
    of_both = {key: arguments[key] for key in ("hidden_size", "vocab_size")} if family == "Ovis2" else {}
    return getattr(transformers, f"{name}{'_' if _is_whole_name(name) else ''}Config")(
        text_config=getattr(transformers, f"{text_name}Config")(**arguments),
        vision_config=getattr(transformers, f"{vision_name}Config")(**vision_arguments),
        tie_word_embeddings=arguments["tie_word_embeddings"],
        **_WHOLE.get(family, {"image_token_id": IMAGE_TOKEN}),
        **of_both,
    )


def _skip_if_unknown(family: str) -> None:
    if family in _UNKNOWN_BEFORE and is_too_old(family):
        pytest.skip(f"needs transformers {SINCE[family]}")


def _make_model(transformers: Any, family: str, arguments: dict[str, Any], *, is_bare: bool) -> Any:
    """A model of transformers with its initial weights: a classifier if `id2label` names its classes."""
    config = _make_config(transformers, family, arguments)
    if is_bare:
        return transformers.AutoModel.from_config(config)
    if "id2label" in arguments:
        config.id2label = arguments["id2label"]
        return transformers.AutoModelForSequenceClassification.from_config(config)
    return getattr(transformers, architecture_of(family))(config)


def edit_json(file: Path, **values: Any) -> None:
    """Set keys of a file that holds a JSON object."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors") -> None:
    """Have `change` change the tensors of one file of a checkpoint, by their names."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / file)
    change(weights)
    save_file(weights, path / file, metadata={"format": "pt"})


def set_weights(path: Path, name: str, value: float, row: int | slice = slice(None)) -> None:
    """Overwrite rows of a weight in a checkpoint of one file with one value."""
    edit_weights(path, lambda weights: weights[name].__setitem__(row, value))


def write_tiny_qwen3(path: Path, **settings: Any) -> Path:
    """A random Qwen3 checkpoint; see `write_tiny_model`."""
    return write_tiny_model(path, "Qwen3", **settings)


def reference_logits(path: Path, ids: list[int]) -> Any:
    """[len(ids), vocab_size] float32: transformers' logits at every position."""
    return reference_logits_of(path, [ids])[0]


def reference_logits_of(path: Path, prompts: list[list[int]]) -> list[Any]:
    """transformers' logits at every position of each prompt: [length, vocab_size] float32 each."""
    import torch

    model = _kept_model(path, _changed_at(path))
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in prompts]


def greedy_answer(logits: Any, prompt_len: int, max_tokens: int, eos: int | None) -> list[int]:
    """Return the tokens that a model chooses, which has read a prompt and a guess of its greedy answer.

    They are its own answer for as long as the guess is right, and so differ from a wrong one. `logits`: at every
    position, [length, vocab_size].
    """
    chosen: list[int] = logits[prompt_len - 1 :].argmax(-1).tolist()[:max_tokens]
    return chosen[: chosen.index(eos) + 1] if eos in chosen else chosen


@functools.lru_cache(maxsize=2)
def _kept_model(path: Path, changed_at: int) -> Any:
    """Return the model of a checkpoint; it is loaded once for as long as its files stay as they are."""
    return reference_model(path)


def _changed_at(path: Path) -> int:
    return max(file.stat().st_mtime_ns for file in path.iterdir())


def reference_model(path: Path) -> Any:
    """transformers' own model of a checkpoint, in float32; the last one that was written is not read again.

    Its plain attention is asked for: torch's, which is the default, leaves out Gemma 2's soft cap in some versions.
    Only Falcon's is torch's: its plain one adds ALiBi twice.
    """
    import torch

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    family = name.partition("For")[0]
    if is_too_old(family):
        pytest.skip(f"needs transformers {SINCE[family]}")
    attention = "sdpa" if family == "Falcon" else "eager"
    if len(_last_written) == 3 and _last_written[:2] == [path, _changed_at(path)]:
        model = _last_written.pop()  # whoever asks for it may change it
        model.set_attn_implementation(attention)
        return model.eval()
    return scaled(class_of(name).from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval())


def class_of(architecture: str) -> Any:
    """Return transformers' class of a model, or of the part that reads text and images if it has one for speech."""
    import transformers

    thinker = architecture.replace(_WITH_IMAGES, f"{THINKER}{_WITH_IMAGES}")
    return getattr(transformers, thinker, None) or getattr(transformers, architecture)


def scaled(model: Any) -> Any:
    """Have the heads of Aya Vision and Command A Vision scale logits, as those of Command A and of Aya Vision in
    transformers 4.50 do."""
    if model.config.model_type in ("aya_vision", "cohere2_vision"):
        scale = model.config.text_config.logit_scale
        model.lm_head.register_forward_hook(lambda module, inputs, logits: scale * logits)
    return model
