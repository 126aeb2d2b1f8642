"""ImageProcessor: the settings of a checkpoint's image processor, and the size to which it brings an image.

Read from preprocessor_config.json, or from processor_config.json as newer versions of transformers write it.
Torch-free: the parent, its image processes and the ranks read it. Each kind is one of transformers' image processors on
Pillow, whose pixels it is held to; where one needs torchvision (LFM2-VL, Command A Vision, MiniCPM-OCR, Nemotron 3
Omni, Kimi K2.5, Llama 4, Step 3.7, Muse Glimmer), Pillow takes its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from nvcli.core.validation import show
from nvcli.models.json_file import JsonFile
from nvcli.models.vision import size_rules as rules
from nvcli.models.vision.image_size import SizeRule
from nvcli.models.vision.size_rules import CLIP_MEAN, Channels, channels
from nvcli.models.vision.vision_config import ProcessorKind, VisionConfig

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_NESTED = "image_processor"
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_NO_MEAN, _NO_STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_HALF = (0.5, 0.5, 0.5)

Resampling = Literal["lanczos", "bilinear", "bicubic"]
_RESAMPLING: dict[int, Resampling] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """How images become pixels of a model."""

    rule: SizeRule
    resampling: Resampling
    factor: float
    """Pixels, from 0 to 255, are multiplied by it; then `mean` is subtracted, and they are divided by `std`."""
    mean: Channels
    std: Channels


def has_processor(path: Path, vision: VisionConfig) -> bool:
    """Tell whether the settings of a checkpoint's image processor are known."""
    if not _KINDS[vision.processor].needs_file:
        return True
    return (path / PROCESSOR_FILES[1]).is_file() or _NESTED in JsonFile.read_if_present(
        path / PROCESSOR_FILES[0]
    ).values


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of transformers' image processors, with its defaults."""

    names: tuple[str, ...]
    read_rule: Callable[[JsonFile, VisionConfig], SizeRule]
    resample: int
    mean: Channels
    std: Channels
    normalises: bool = True
    resizes_always: bool = False
    """Whether it does so whatever `do_resize` says."""
    resamples_alike: bool = False
    """Whether it does so whatever `resample` says."""
    needs_file: bool = True
    """Whether checkpoints have its settings in a file; in others they are its defaults."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of its classes."""
        return tuple(f"{name}ImageProcessor{suffix}" for name in self.names for suffix in ("", "Fast", "Pil"))


_OTHER_NAMES = {
    "norm_mean": "image_mean",
    "norm_std": "image_std",
    "in_patch_limit": "max_patches",
    "merge_kernel_size": "merge_size",
}
"""Keys of Nemotron 3 Omni and of Kimi K2.5."""
_SECTION = "media_proc_cfg"
"""The section that has those of Kimi K2.5."""


def read_processor(path: Path, vision: VisionConfig) -> ImageProcessor:
    """Read the image processor of a checkpoint's folder. Raises LoadError for one that is missing, is of another kind,
    or does not fit the tower."""
    kind = _KINDS[vision.processor]
    file = _read(path, is_there=kind.needs_file).with_names(_OTHER_NAMES)
    name = file.get("image_processor_type", str, kind.classes[0])
    if name not in kind.classes:
        raise file.error("image_processor_type", f"{show(name)} is not supported; supported: {', '.join(kind.classes)}")
    if not kind.resizes_always:
        file.only(do_resize=True)
    file.only(do_rescale=True)
    normalises = kind.normalises if file.values.get("do_normalize") is None else file.get("do_normalize", bool)
    number = kind.resample if kind.resamples_alike else file.get("resample", int, kind.resample)
    if number not in _RESAMPLING:
        raise file.error("resample", f"{number} is not supported; supported: {', '.join(map(str, _RESAMPLING))}")
    return ImageProcessor(
        rule=kind.read_rule(file, vision),
        resampling=_RESAMPLING[number],
        factor=file.get("rescale_factor", float, 1 / 255),
        mean=channels(file, "image_mean", kind.mean) if normalises else _NO_MEAN,
        std=channels(file, "image_std", kind.std) if normalises else _NO_STD,
    )


_KINDS: dict[ProcessorKind, _Kind] = {
    "qwen2_vl": _Kind(("Qwen2VL", "CohereCompass"), rules.area_rule(56 * 56, 28 * 28 * 1280), 3, CLIP_MEAN, _CLIP_STD),
    "minimax_m3": _Kind(("MiniMaxM3VL",), rules.area_rule(56 * 56, 451_584), 3, CLIP_MEAN, _CLIP_STD),
    "gemma3": _Kind(("Gemma3",), rules.square_rule, 2, _HALF, _HALF),
    "gemma4": _Kind(("Gemma4", "Gemma4Unified"), rules.count_rule, 3, _NO_MEAN, _NO_STD, normalises=False),
    "pixtral": _Kind(("Pixtral",), rules.edge_rule, 3, CLIP_MEAN, _CLIP_STD),
    "glm46v": _Kind(
        ("Glm46V", "Glm4v", "Glmga"), rules.area_rule(112 * 112, 28 * 28 * 15000, 2, "floor"), 3, CLIP_MEAN, _CLIP_STD
    ),
    "hunyuan_vl": _Kind(
        ("HunYuanVL", "HYV4VL"), rules.area_rule(512**2, 2048**2), 3, CLIP_MEAN, _CLIP_STD, resamples_alike=True
    ),
    "paddleocr_vl": _Kind(
        ("PaddleOCRVL",), rules.area_rule(384**2, 1536**2, enlarges="round"), 3, CLIP_MEAN, _CLIP_STD
    ),
    "deepseek_ocr2": _Kind(("DeepseekOcr2",), rules.framed_rule, 3, _HALF, _HALF),
    "got_ocr": _Kind(("GotOcr2",), partial(rules.tile_rule, cuts_always=False), 3, CLIP_MEAN, _CLIP_STD),
    "got_ocr2": _Kind(("GotOcr2",), rules.tile_rule, 3, CLIP_MEAN, _CLIP_STD),
    "granite_docling": _Kind(("GraniteDocling",), rules.page_rule, 3, CLIP_MEAN, _CLIP_STD),
    "cohere2_vision": _Kind(("Cohere2Vision",), rules.scaled_tile_rule, 3, CLIP_MEAN, _CLIP_STD),
    "idefics3": _Kind(("Idefics3", "SmolVLM"), rules.split_rule, 1, _HALF, _HALF),
    "clip": _Kind(("CLIP", "Siglip"), rules.middle_rule, 3, CLIP_MEAN, _CLIP_STD),
    "llava_next": _Kind(("LlavaNext",), rules.grid_rule, 3, CLIP_MEAN, _CLIP_STD),
    "llava_onevision": _Kind(("LlavaOnevision",), partial(rules.grid_rule, squares=True), 3, CLIP_MEAN, _CLIP_STD),
    "minicpmv4_6": _Kind(("MiniCPMV4_6", "MiniCPMOcr"), rules.slice_rule, 3, _HALF, _HALF),
    "nemotron_h_omni": _Kind(
        ("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"), rules.patch_rule, 3, CLIP_MEAN, _CLIP_STD
    ),
    "kimi_k25": _Kind(("Kimi_K25",), rules.filled_rule, 3, _HALF, _HALF),
    "glm5_next": _Kind(("Glm5Next",), rules.budget_rule, 3, CLIP_MEAN, _CLIP_STD),
    "llama4": _Kind(("Llama4",), rules.canvas_rule, 2, _HALF, _HALF),
    "step3p7": _Kind(("Step3p7",), rules.window_rule, 2, CLIP_MEAN, _CLIP_STD, needs_file=False),
    "video_llama_3": _Kind(("VideoLlama3",), rules.area_rule(56 * 56, 28 * 28 * 1280, merge=1), 3, _HALF, _HALF),
    "idefics2": _Kind(("Idefics2",), rules.quarter_rule, 2, _HALF, _HALF),
    "ovis2": _Kind(("Ovis2",), rules.marked_rule, 3, CLIP_MEAN, _CLIP_STD),
    "muse_glimmer": _Kind(("MuseGlimmer",), rules.shape_rule, 1, _HALF, _HALF),
    "lfm2_vl": _Kind(("Lfm2Vl",), rules.large_rule, 2, _HALF, _HALF, resizes_always=True),
}


def _read(path: Path, *, is_there: bool) -> JsonFile:
    newer = JsonFile.read_if_present(path / PROCESSOR_FILES[0])
    nested = newer.values.get(_NESTED)
    if isinstance(nested, dict):
        return newer.with_values(nested, f"{_NESTED}.")
    older = (JsonFile.read if is_there else JsonFile.read_if_present)(path / PROCESSOR_FILES[1])
    return older.object(_SECTION) if older.has(_SECTION) else older
