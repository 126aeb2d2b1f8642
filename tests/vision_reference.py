"""What transformers' image processors and models make of images, for each kind of processor."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4_unified import modeling_gemma4_unified
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from checkpoints import SINCE, class_of, is_too_old, scaled
from nvcli.models.vision.image_processor import ImageProcessor
from nvcli.models.vision.vision_config import VisionConfig

_PIXEL_KEYS = (
    *("pixel_values", "image_grid_thw", "image_merge_sizes", "image_sizes", "image_position_ids", "target_sizes"),
)
SIDE = 8
"""Pixels of a token's side in tiny checkpoints."""


def load_reference(path: Path) -> transformers.PreTrainedModel:
    """transformers' model of a checkpoint.

    In `forward`, Gemma 4 12B attends to images both ways in all of its layers; its masks for `generate`, and Google's
    code, do so only in those with a window (https://github.com/huggingface/transformers/issues/46711). Version 5.17
    interpolates PaddleOCR-VL's positions from corner to corner, and version 5.23 from border to border. HunyuanOCR's
    code turns both halves of a head by the same axes, and enlarges the grid to which positions are interpolated. Muse
    Glimmer's positions are those of the turned grid, as in version 5.24.
    """
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    if is_too_old(family := name.partition("For")[0]):
        pytest.skip(f"needs transformers {SINCE[family]}")
    model = class_of(name).from_pretrained(path).eval()
    if model.config.model_type == "gemma4_unified":
        modeling_gemma4_unified.create_masks_for_generate = modeling_gemma4_unified.create_masks_for_vision_model
    if model.config.model_type == "paddleocr_vl":
        model.model.visual.vision_model.embeddings.interpolation_align_corners = False
    if model.config.model_type == "muse_glimmer" and Version(transformers.__version__) < Version("5.24"):
        embedder = model.model.vision_tower.patch_embedder
        embedder.forward = partial(_turned, embedder.forward)
    if model.config.model_type == "hunyuan_vl":
        model.model.language_model.rotary_emb.recomposition_frequencies = lambda angles: torch.cat(
            2 * [torch.cat([of_axis[axis] for axis, of_axis in enumerate(angles.split(2, dim=-1))], dim=-1)], dim=-1
        )
        model.model.vision_tower.embeddings.interpolate_pos_encoding = partial(
            _enlarged, model.model.vision_tower.embeddings
        )
    if model.config.model_type == "llama4":
        model.get_image_features = partial(_projected, model, model.get_image_features)
    if model.config.model_type == "step3p7":
        model.model.get_image_features = partial(_one_by_one, model.model.get_image_features)
    return scaled(model)


def _one_by_one(
    get_image_features: Callable[..., Any], pixel_values: Sequence[Tensor], *_: Any, **settings: Any
) -> Any:
    """Return what Step 3.7's tower gives for images of different sizes."""
    settings = {key: value for key, value in settings.items() if key == "return_dict"}
    found = [get_image_features(image, **settings) for image in pixel_values]
    found[0].pooler_output = [part for each in found for part in each.pooler_output]
    return found[0]


def _projected(model: Any, get_image_features: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """Return what Llama 4's tower gives, with the projection of it that other families have there."""
    found = get_image_features(*inputs, **settings)
    found.pooler_output = model.multi_modal_projector(found.last_hidden_state)
    return found


def _turned(forward: Callable[..., Tensor], pixel_values: Tensor, grid_thw: Tensor, **others: Any) -> Tensor:
    return forward(pixel_values, grid_thw=grid_thw[:, [0, 2, 1]], **others)


def _enlarged(embeddings: Any, patches: Tensor, height: int, width: int) -> Tensor:
    """Return HunyuanOCR's positions of an image: [1, height × width, H]."""
    edge = embeddings.position_edge
    table = embeddings.position_embedding.weight[1:].T.reshape(1, -1, edge, edge)
    scale = float(height + 0.1) / edge, float(width + 0.1) / edge
    return torch.nn.functional.interpolate(table, scale_factor=scale, mode="bilinear").flatten(2).transpose(1, 2)


def image_processor(family: str, kind: str) -> Any:
    """Return an image processor of transformers that needs torchvision, which is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
            patch.setitem(sys.modules, f"torchvision{name}", ModuleType(f"torchvision{name}"))
        sys.modules["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=int)  # type: ignore[attr-defined]
        name = f"transformers.models.{family}.image_processing_with_pillow"
        path = Path(transformers.__file__).parent / f"models/{family}/image_processing_{family}.py"
        if not path.is_file():
            pytest.skip("needs transformers 5.23")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return object.__new__(getattr(module, kind))


def allowed_size(vision: VisionConfig, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of an image of about this size that the model can have."""
    tile = vision.tile_tokens
    if vision.encoder is not None:
        return vision.encoder.sides[-1], vision.encoder.sides[-1]
    if not tile:
        return rows, columns
    return (1 if vision.processor in ("gemma3", "clip") else 1 + rows * columns % 3) * tile, tile


def breaks_rows(vision: VisionConfig) -> bool:
    """Tell whether a token of text follows each row of an image's tokens."""
    return vision.text is not None and vision.text.between != ""


def parts_tiles(vision: VisionConfig) -> bool:
    """Tell whether there is text between the tokens of an image's tiles."""
    return vision.text is not None and vision.text.parts_tiles


def make_image(rows: int, columns: int, seed: int) -> np.ndarray:
    """Return the pixels of an image of so many tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8)


def pixel_inputs(vision: VisionConfig, images: Sequence[np.ndarray], processor: ImageProcessor) -> dict[str, Tensor]:
    """Return what transformers' processor makes of images that have their size already."""
    if vision.processor == "lfm2_vl":
        return _patches_of_any_number(vision, images, processor)
    if vision.processor == "nemotron_h_omni":
        found = _patches_of_any_number(vision, images, processor)
        patches = found["pixel_values"][found["pixel_attention_mask"].bool()]
        by_channel = patches.view(-1, vision.patch_size**2, 3).transpose(1, 2).flatten(1)
        return {"pixel_values": by_channel, "image_grid_hw": found["spatial_shapes"]}
    if vision.processor in ("kimi_k25", "muse_glimmer"):
        found = _patches_row_by_row(vision, images, processor)
        if vision.has_first_frames:
            found["pixel_values"] = found["pixel_values"].flatten(1).repeat(1, vision.temporal_patch_size)
        return found
    if vision.processor == "step3p7":
        scale = torch.tensor([processor.mean, processor.std])
        values = [(torch.from_numpy(image) * processor.factor - scale[0]) / scale[1] for image in images]
        return {"pixel_values": [image.permute(2, 0, 1)[None] for image in values]}
    area = {"patch_size": vision.patch_size, "merge_size": vision.merge_size}
    own: dict[str, Any] = {
        "qwen2_vl": area,
        "glm46v": area,
        "glm5_next": area,
        "hunyuan_vl": area,
        "paddleocr_vl": area,
        "minimax_m3": area,
        "video_llama_3": {**area, "temporal_patch_size": 1},
        "gemma4": {
            "patch_size": vision.patch_size,
            "pooling_kernel_size": vision.merge_size,
            "max_soft_tokens": 70,
            "do_normalize": True,
        },
        "pixtral": {"patch_size": {"height": vision.patch_size, "width": vision.patch_size}},
        "idefics3": {"do_image_splitting": False, "max_image_size": {"longest_edge": 4 * SIDE}},
        "minicpmv4_6": {"patch_size": vision.patch_size, "slice_mode": False},
    }.get(vision.processor, {})
    kinds = {
        "qwen2_vl": Qwen2VLImageProcessorPil,
        "minimax_m3": Qwen2VLImageProcessorPil,
        "video_llama_3": Qwen2VLImageProcessorPil,
        "gemma3": Gemma3ImageProcessorPil,
        "gemma4": Gemma4ImageProcessorPil,
        "pixtral": PixtralImageProcessorPil,
        "glm46v": Glm46VImageProcessorPil,
        "glm5_next": Glm46VImageProcessorPil,
        "hunyuan_vl": getattr(transformers, "HunYuanVLImageProcessorPil", None),  # not in version 5.10
        "got_ocr2": GotOcr2ImageProcessorPil,
        "got_ocr": GotOcr2ImageProcessorPil,
        "ovis2": GotOcr2ImageProcessorPil,
        "deepseek_ocr2": GotOcr2ImageProcessorPil,
        "paddleocr_vl": PaddleOCRVLImageProcessorPil,
        "idefics2": Idefics2ImageProcessorPil,
        "idefics3": Idefics3ImageProcessorPil,
        "cohere2_vision": GotOcr2ImageProcessorPil,
        "llama4": GotOcr2ImageProcessorPil,
        "granite_docling": GotOcr2ImageProcessorPil,
        "clip": GotOcr2ImageProcessorPil,
        "minicpmv4_6": getattr(transformers, "MiniCPMV4_6ImageProcessorPil", None),  # not in version 5.10
    }
    tile = vision.tile_tokens * vision.token_pixels
    if tile:
        images = [part for image in images for part in image.reshape(-1, tile, tile, 3)]
    prepare = kinds[vision.processor](
        do_resize=False, image_mean=list(processor.mean), image_std=list(processor.std), **own
    )
    found = prepare(images=list(images), return_tensors="pt", input_data_format="channels_last")
    if vision.processor == "idefics2":  # filled up to the size of the largest
        return {key: found[key] for key in ("pixel_values", "pixel_attention_mask")}
    if vision.processor == "granite_docling":  # of one row
        tiles = found["pixel_values"][None]
        return {"pixel_values": tiles, "pixel_attention_mask": torch.ones(tiles.shape[:2], dtype=torch.bool)}
    if vision.processor == "video_llama_3":
        found["image_merge_sizes"] = torch.ones(len(images), dtype=torch.int64)
    return {key: found[key] for key in _PIXEL_KEYS if key in found}


def _patches_of_any_number(
    vision: VisionConfig, images: Sequence[np.ndarray], processor: ImageProcessor
) -> dict[str, Tensor]:
    """Return what LFM2-VL's processor makes of images, which needs torchvision, as that of Nemotron 3 Omni does: their
    patches, filled up to those of the largest."""
    side, patches, shapes = vision.patch_size, [], []
    for image in images:
        values = (torch.from_numpy(image) * processor.factor - torch.tensor(processor.mean)) / torch.tensor(
            processor.std
        )
        rows, columns = image.shape[0] // side, image.shape[1] // side
        patches.append(values.view(rows, side, columns, side, 3).transpose(1, 2).reshape(rows * columns, -1))
        shapes.append([rows, columns])
    counts = torch.tensor([len(each) for each in patches])
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(patches, batch_first=True),
        "pixel_attention_mask": (torch.arange(int(counts.max())) < counts[:, None]).int(),
        "spatial_shapes": torch.tensor(shapes),
    }


def _patches_row_by_row(
    vision: VisionConfig, images: Sequence[np.ndarray], processor: ImageProcessor
) -> dict[str, Tensor]:
    """Return what Kimi K2.5's processor makes of images, which needs torchvision, as that of Muse Glimmer does."""
    found = _patches_of_any_number(vision, images, processor)
    side, shapes = vision.patch_size, found["spatial_shapes"]
    patches = found["pixel_values"][found["pixel_attention_mask"].bool()].view(-1, side, side, 3).permute(0, 3, 1, 2)
    return {"pixel_values": patches, "image_grid_thw": torch.nn.functional.pad(shapes, (1, 0), value=1)}


def model_inputs(
    vision: VisionConfig,
    ids: Sequence[int],
    images: Sequence[np.ndarray],
    processor: ImageProcessor,
    num_answered: int = 0,
) -> dict[str, Tensor]:
    """Return what transformers' model takes for a prompt with images, and as many tokens of an answer behind it."""
    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if not images:
        return inputs
    types = (tokens == vision.image_token_id).int()
    if vision.attends_both_ways == "prompts":
        types = (torch.arange(len(ids)) >= len(ids) - num_answered).int()[None]
        return inputs | pixel_inputs(vision, images, processor) | {"token_type_ids": types}
    if vision.attends_both_ways == "all":
        inputs["token_type_ids"] = types
    elif vision.axes or vision.attends_both_ways:
        inputs["mm_token_type_ids"] = types
    return inputs | pixel_inputs(vision, images, processor)
