"""Tiny random checkpoints that read images, with a tokenizer, a chat template and an image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import edit_json, write_tiny_model
from expert_shapes import EXPERT_SHAPES
from family_shapes import SHAPES
from weightless_model import write_weightless_model

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
VOCAB_SIZE = 261
"""256 bytes, two tokens of the tokenizer, and the marks."""
IMAGE_ID = 259
SIDE = 8
"""Pixels of a token's side."""
TEMPLATE = """{%- for message in messages %}{{ message.role + ':' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '\n' }}{%- endfor %}{{ 'a:' }}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "min_pixels": 4 * SIDE**2,
    "max_pixels": 60 * SIDE**2,
    "patch_size": SIDE // 2,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.25, 0.3, 0.2],
}


def write_vision_model(folder: Path, name: str = "qwen 2.5-vl", **settings: Any) -> Path:
    """Write a checkpoint of one of `SHAPES`. `settings`: see `write_tiny_model`."""
    folder.mkdir(parents=True)
    write_weightless_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token, content in enumerate(MARKS, VOCAB_SIZE - len(MARKS)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token, "content": content, **flags, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    family, overrides = (SHAPES | EXPERT_SHAPES)[name]
    write_tiny_model(folder, family, vocab_size=VOCAB_SIZE, **{**overrides, **settings})
    edit_json(folder / "config.json", image_token_id=IMAGE_ID)
    return folder


def write_image(path: Path, height: int, width: int, seed: int = 0) -> Path:
    """Write an image of smooth colours, in the format of the path's suffix."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path
