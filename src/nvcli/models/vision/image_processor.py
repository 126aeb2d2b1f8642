"""ImageProcessor: the settings of a checkpoint's image processor, and the size to which it brings an image.

Read from preprocessor_config.json, or from processor_config.json as newer versions of transformers write it.
Torch-free: the parent, its image processes and the ranks read it. The processor is transformers'
`Qwen2VLImageProcessor`, which Qwen2.5-VL, Qwen3-VL and Qwen 3.5 share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvcli.core.validation import show
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import VisionConfig

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_NESTED = "image_processor"
_CLASSES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_MOST_RATIO = 200
"""The longest image is this many times as long as wide."""
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_BICUBIC = 3

Channels = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """How images become pixels of a model."""

    token_pixels: int
    """Pixels of the side of a token's square."""
    min_pixels: int
    max_pixels: int
    factor: float
    """Pixels, from 0 to 255, are multiplied by it; then `mean` is subtracted, and they are divided by `std`."""
    mean: Channels
    std: Channels

    @property
    def max_tokens(self) -> int:
        """The most tokens of an image."""
        return max(1, self.max_pixels // self.token_pixels**2)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels to which an image is brought (`smart_resize` in transformers). Raises
        ValueError for one that is too long."""
        side = self.token_pixels
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise ValueError(f"its longer side is more than {_MOST_RATIO} times as long as the other")
        rounded = round(height / side) * side, round(width / side) * side
        if rounded[0] * rounded[1] > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            return tuple(max(side, math.floor(length / scale / side) * side) for length in (height, width))  # type: ignore[return-value]
        if rounded[0] * rounded[1] < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            return tuple(math.ceil(length * scale / side) * side for length in (height, width))  # type: ignore[return-value]
        return rounded


def has_processor(path: Path) -> bool:
    """Tell whether a checkpoint's folder has settings of an image processor."""
    return (path / PROCESSOR_FILES[1]).is_file() or _NESTED in JsonFile.read_if_present(
        path / PROCESSOR_FILES[0]
    ).values


def read_processor(path: Path, vision: VisionConfig) -> ImageProcessor:
    """Read the image processor of a checkpoint's folder. Raises LoadError for one that is missing, is of another kind,
    or does not fit the tower."""
    file = _read(path)
    kind = file.get("image_processor_type", str, _CLASSES[0])
    if kind not in _CLASSES:
        raise file.error("image_processor_type", f"{show(kind)} is not supported; supported: {', '.join(_CLASSES)}")
    for key, only in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", _BICUBIC)):
        if (value := file.values.get(key)) not in (None, only):
            raise file.error(key, f"{show(value)} is not supported; supported: {show(only)}")
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge_size}
    for key, wanted in sizes.items():
        if (found := file.get(key, int, {"patch_size": 14, "merge_size": 2}[key])) != wanted:
            raise file.error(key, f"is {found}, and {wanted} in config.json")
    size = file.values.get("size")
    edges = size if isinstance(size, dict) else {}
    limits: dict[str, Any] = {
        "min_pixels": file.values.get("min_pixels") or edges.get("shortest_edge") or _MIN_PIXELS,
        "max_pixels": file.values.get("max_pixels") or edges.get("longest_edge") or _MAX_PIXELS,
    }
    limited = file.with_values({**file.values, **limits})
    return ImageProcessor(
        token_pixels=vision.token_pixels,
        min_pixels=limited.positive("min_pixels"),
        max_pixels=limited.positive("max_pixels"),
        factor=file.get("rescale_factor", float, 1 / 255),
        mean=_channels(file, "image_mean", _CLIP_MEAN),
        std=_channels(file, "image_std", _CLIP_STD),
    )


def _read(path: Path) -> JsonFile:
    newer = JsonFile.read_if_present(path / PROCESSOR_FILES[0])
    nested = newer.values.get(_NESTED)
    if isinstance(nested, dict):
        return newer.with_values(nested, f"{_NESTED}.")
    return JsonFile.read(path / PROCESSOR_FILES[1])


def _channels(file: JsonFile, key: str, default: Channels) -> Channels:
    value = file.values.get(key, list(default))
    if not isinstance(value, list) or len(value) != len(default) or not all(isinstance(v, int | float) for v in value):
        raise file.error(key, f"{show(value)} is not a list of {len(default)} numbers")
    red, green, blue = map(float, value)
    return red, green, blue
