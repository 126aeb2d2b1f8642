"""Tiny random checkpoints that read images, with a tokenizer, a chat template and an image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints import PINPOINTS_OF_32, PINPOINTS_OF_34, edit_json, write_tiny_model
from expert_shapes import EXPERT_SHAPES
from family_shapes import SHAPES
from vision_reference import SIDE
from weightless_model import write_weightless_model

VOCAB_SIZE = 261
"""256 bytes, two tokens of the tokenizer, and the marks."""
IMAGE_ID = 259
"""The second mark."""
TEMPLATE = """{%- for message in messages %}{{ message.role + ':' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '\n' }}{%- endfor %}{{ 'a:' }}"""
SCALE = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.25, 0.3, 0.2]}
AREA = {
    "min_pixels": 4 * SIDE**2,
    "max_pixels": 60 * SIDE**2,
    "patch_size": SIDE // 2,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


class Marks(NamedTuple):
    """How a family's chat template writes an image, and the settings of its image processor."""

    tokens: tuple[str, str, str]
    """Special tokens, of which the second stands for a token of an image."""
    written: str
    processor: dict[str, Any]


_QWEN = Marks(
    ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "<|vision_start|><|image_pad|><|vision_end|>",
    {"image_processor_type": "Qwen2VLImageProcessorFast", **AREA},
)
_PIXTRAL = {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 10 * SIDE}}
_GLM = Marks(
    ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    "<|begin_of_image|><|image|><|end_of_image|>",
    {"image_processor_type": "Glm46VImageProcessor", **AREA},
)
_INTERNVL = Marks(
    ("<img>", "<IMG_CONTEXT>", "</img>"),
    "<IMG_CONTEXT>",
    {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 32, "width": 32}, "max_patches": 2},
)
_IDEFICS = Marks(
    ("<fake_token_around_image>", "<image>", "<global-img>"),
    "<image>",
    {
        "image_processor_type": "Idefics3ImageProcessor",
        "max_image_size": {"longest_edge": 34},
        "size": {"longest_edge": 68},
    },
)
MARKS = {
    "idefics 2": _IDEFICS._replace(
        processor={
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"shortest_edge": 2 * SIDE, "longest_edge": 8 * SIDE},
            "do_image_splitting": True,
        }
    ),
    "gemma 3 with vision": Marks(
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
    ),
    **dict.fromkeys(
        ("gemma 4 12b", "gemma 4 with vision, layer inputs and shared keys"),
        Marks(
            ("<|image>", "<|image|>", "<image|>"),
            "<|image|>",
            {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": SIDE // 2,
                "pooling_kernel_size": 2,
                "max_soft_tokens": 70,
                "do_normalize": True,
            },
        ),
    ),
    "mistral 3 with vision": Marks(("[IMG_BREAK]", "[IMG]", "[IMG_END]"), "[IMG]", _PIXTRAL),
    "minimax m3 with vision": Marks(
        ("]<]start of image[>[", "]<]image[>[", "]<]end of image[>["),
        "]<]image[>[",
        {"image_processor_type": "MiniMaxM3VLImageProcessor", **AREA},
    ),
    "internvl": _INTERNVL,
    "qianfan-ocr": _INTERNVL._replace(written="<image>"),
    **dict.fromkeys(("glm 4.6v-flash", "glm 4.6v", "glm-ocr"), _GLM),
    "cohere compass with vision": _QWEN._replace(
        processor={"image_processor_type": "CohereCompassImageProcessor", **AREA}
    ),
    "hunyuan-ocr": _QWEN._replace(processor={"image_processor_type": "HunYuanVLImageProcessor", **AREA}),
    "hunyuan v4 with vision": _QWEN._replace(processor={"image_processor_type": "HYV4VLImageProcessor", **AREA}),
    "videollama 3": _QWEN._replace(
        processor={
            **AREA,
            "image_processor_type": "VideoLlama3ImageProcessor",
            "patch_size": SIDE,
            "merge_size": 1,
            "temporal_patch_size": 1,
        }
    ),
    "ovis 2": Marks(
        ("<unused>", "<IMG_ATOM>", "<unused 2>"),
        "<image>",
        {
            "image_processor_type": "Ovis2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "crop_to_patches": True,
            "max_patches": 6,
        },
    ),
    "got-ocr 2": Marks(
        ("<img>", "<imgpad>", "</img>"),
        "<imgpad>",
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 32, "width": 32}},
    ),
    "deepseek-ocr 2": Marks(
        ("<unused>", "<image>", "<unused 2>"),
        "<image>",
        {
            "image_processor_type": "DeepseekOcr2ImageProcessor",
            "size": {"height": 16 * SIDE, "width": 16 * SIDE},
            "tile_size": 12 * SIDE,
        },
    ),
    "paddleocr-vl": _QWEN._replace(processor={"image_processor_type": "PaddleOCRVLImageProcessor", **AREA}),
    "idefics 3": _IDEFICS,
    "granite docling": _IDEFICS._replace(
        processor={
            "image_processor_type": "GraniteDoclingImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 6,
        }
    ),
    **dict.fromkeys(
        ("llava-next", "granite 4 vision"),
        Marks(
            ("<unused>", "<image>", "<unused 2>"),
            "<image>",
            {
                "image_processor_type": "LlavaNextImageProcessor",
                "size": {"shortest_edge": 32},
                "crop_size": {"height": 32, "width": 32},
                "image_grid_pinpoints": PINPOINTS_OF_32,
            },
        ),
    ),
    "llava-onevision": Marks(
        ("<unused>", "<image>", "<unused 2>"),
        "<image>",
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 34, "width": 34},
            "image_grid_pinpoints": PINPOINTS_OF_34,
        },
    ),
    "llava 1.5": Marks(
        ("<unused>", "<image>", "<unused 2>"),
        "<image>",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
    ),
    "aya vision": Marks(
        ("<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"),
        "<image>",
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 32, "width": 32}, "max_patches": 6},
    ),
    "command a vision": Marks(
        ("<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"),
        "<|IMG_PATCH|>",
        {"image_processor_type": "Cohere2VisionImageProcessorFast", "size": {"height": 32, "width": 32}},
    ),
    "kimi k2.5 with vision": _QWEN._replace(
        processor={"media_proc_cfg": {"patch_size": SIDE // 2, "merge_kernel_size": 2, "in_patch_limit": 240}}
    ),
    "glm 5.3 flash with vision": _GLM._replace(
        processor={
            "image_processor_type": "Glm5NextImageProcessor",
            "patch_size": SIDE // 2,
            "min_image_tokens": 4,
            "max_image_tokens": 60,
        }
    ),
    "muse glimmer with vision": Marks(
        ("<|image_start|>", "<|patch|>", "<|image_end|>"),
        "<|patch|>",
        {"image_processor_type": "MuseGlimmerImageProcessor", "patch_size": SIDE // 2, "max_image_tokens": 60},
    ),
    "llama 4 with vision": Marks(
        ("<|image_start|>", "<|patch|>", "<|image_end|>"),
        "<|image|>",
        {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 32, "width": 32}},
    ),
    "step 3.7 with vision": Marks(
        ("<im_start>", "<im_patch>", "<im_end>"),
        "<im_patch>",
        {
            "image_processor_type": "Step3p7ImageProcessor",
            "size": {"height": 4 * SIDE, "width": 4 * SIDE},
            "patch_size": 2 * SIDE,
            "max_image_size": 8 * SIDE,
            "vision_patch_size": SIDE // 4,
        },
    ),
    "lfm2-vl": Marks(
        ("<|image_start|>", "<image>", "<|image_end|>"),
        "<image>",
        {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "do_resize": False,
            "encoder_patch_size": SIDE // 2,
            "min_image_tokens": 4,
            "max_image_tokens": 60,
            "max_tiles": 6,
            "tile_size": 3 * SIDE,
        },
    ),
    "lighton-ocr": _QWEN._replace(processor=_PIXTRAL),
    **dict.fromkeys(
        ("paligemma", "paligemma 2"),
        Marks(
            ("<unused>", "<image>", "<unused 2>"),
            "<image>",
            {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}},
        ),
    ),
    "nemotron 3 omni": Marks(
        ("<img>", "<image>", "</img>"),
        "<image>",
        {
            "image_processor_type": "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor",
            "patch_size": SIDE // 2,
            "min_num_patches": 16,
            "max_num_patches": 240,
            "norm_mean": SCALE["image_mean"],
            "norm_std": SCALE["image_std"],
        },
    ),
    **dict.fromkeys(
        ("minicpm-v 4.6", "minicpm-v 4.7"),
        Marks(
            ("<image>", "<|image_pad|>", "</image>"),
            "<|image_pad|>",
            {
                "image_processor_type": "MiniCPMV4_6ImageProcessor",
                "patch_size": SIDE // 4,
                "scale_resolution": 5 * SIDE,
                "max_slice_nums": 6,
            },
        ),
    ),
}
"""By the names of `SHAPES`; all others are Qwen's."""


_WITH_IMAGE_TOKEN_INDEX = (
    "Gemma3",
    "GotOcr2",
    "Granite4Vision",
    "MiniMaxM3VL",
    "PaliGemma",
    "Mistral3",
    "AyaVision",
    "Llava",
    "LlavaNext",
    "LlavaOnevision",
)


def write_vision_model(folder: Path, name: str = "qwen 2.5-vl", **settings: Any) -> Path:
    """Write a checkpoint of one of `SHAPES`. `settings`: see `write_tiny_model`."""
    folder.mkdir(parents=True)
    write_weightless_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    marks = MARKS.get(name, _QWEN)
    for token, content in enumerate(marks.tokens, IMAGE_ID - 1):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token, "content": content, **flags, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", marks.written))
    (folder / "preprocessor_config.json").write_text(json.dumps(marks.processor | SCALE))
    family, overrides = (SHAPES | EXPERT_SHAPES)[name]
    vocabulary = dict.fromkeys(("vocab_size", *(key for key in overrides if key.startswith("vocab_size"))), VOCAB_SIZE)
    write_tiny_model(folder, family, **{**overrides, **settings, **vocabulary})
    has_older_name = family.partition(" ")[0] in _WITH_IMAGE_TOKEN_INDEX
    key = "image_token_index" if has_older_name else "image_token_id"
    edit_json(folder / "config.json", **{key: IMAGE_ID})
    return folder


def write_image(path: Path, height: int, width: int, seed: int = 0) -> Path:
    """Write an image of smooth colours, in the format of the path's suffix."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path
