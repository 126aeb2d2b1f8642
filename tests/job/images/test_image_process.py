"""Images become the pixels that transformers' processor gives the model; hostile ones are errors."""

from __future__ import annotations

import fcntl
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm46v import image_processing_pil_glm46v
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from hostile_images import encoded, valid_images
from nvcli.core.system.pixel_file import PixelFile
from nvcli.job.images import pdf_page
from nvcli.job.images.image_process import Prepared, Question, answer
from nvcli.job.images.pixel_memory import PixelMemory
from nvcli.models.vision.image_processor import ImageProcessor, Resampling
from nvcli.models.vision.image_size import (
    AreaRule,
    BudgetRule,
    CountRule,
    EdgeRule,
    FilledRule,
    MiddleRule,
    ShapeRule,
    SizeRule,
)
from nvcli.models.vision.tile_size import SplitRule, TileRule
from nvcli.models.vision.window_size import WindowRule
from vision_reference import image_processor

SIDE = 28
RULE = AreaRule(side=SIDE, min_pixels=56 * 56, max_pixels=40 * SIDE**2)
PROCESSOR = ImageProcessor(rule=RULE, resampling="bicubic", factor=1 / 255, mean=(0, 0, 0), std=(1, 1, 1))
_GLM5 = getattr(transformers, "Glm5NextImageProcessorPil", None)  # not in version 5.17
MEMORY = PixelMemory()
FILE = PixelFile(MEMORY.path)
SIZES = [(30, 30), (100, 37), (300, 700), (224, 224), (5, 400), (57, 55)]


def prepare(image: bytes | Path, processor: ImageProcessor = PROCESSOR) -> Prepared:
    return answer(Question(image, processor, MEMORY.path, 4096), FILE)


def pixels_of(found: Prepared) -> np.ndarray:
    """The pixels that were written: tiles as wide as the image, and the image below them."""
    pixels = np.empty((sum(height for height, _ in found.fit.pictures), found.fit.width, 3), dtype=np.uint8)
    FILE.read(pixels.data.cast("B"), 4096)
    return pixels


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def check_pixels(data: bytes) -> None:
    """Compare an image with what transformers' processor makes of it."""
    found = prepare(data)
    theirs = Qwen2VLImageProcessorPil(
        do_rescale=False, do_normalize=False, min_pixels=RULE.min_pixels, max_pixels=RULE.max_pixels
    )(images=[load_image(Image.open(io.BytesIO(data)))], return_tensors="np")
    assert found.problem == ""
    np.testing.assert_array_equal(pixels_of(found), whole_image(theirs))


def whole_image(found: Any) -> np.ndarray:
    """Put patches of two equal frames in their places, each with those of its token: [height, width, 3]."""
    _, rows, columns = found["image_grid_thw"][0]
    patches = found["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
    return patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 14, columns * 14, 3)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_pixels_are_those_of_transformers(height: int, width: int, kind: str) -> None:
    check_pixels(encoded(noise(height, width), kind))


@pytest.mark.parametrize(("height", "width"), [*SIZES, (190, 1)])
@pytest.mark.parametrize(
    ("rule", "resampling", "theirs"),
    [
        (TileRule(side=14, tile=56), "bilinear", Gemma3ImageProcessorPil(size={"height": 56, "width": 56})),
        (
            TileRule(side=14, tile=56, least=2, most=7),
            "bicubic",
            GotOcr2ImageProcessorPil(
                size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=2, max_patches=7
            ),
        ),
        (
            MiddleRule(side=14, edge=56),
            "bicubic",
            CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        ),
        (
            TileRule(side=14, tile=56, margin=8),
            "bicubic",
            SiglipImageProcessorPil(size={"height": 64, "width": 64}),
        ),
        (
            SplitRule(side=6, tile=56, longest=200),
            "lanczos",
            Idefics3ImageProcessorPil(size={"longest_edge": 200}, max_image_size={"longest_edge": 56}),
        ),
        (
            SplitRule(side=14, tile=56, longest=200, is_cut=False),
            "lanczos",
            Idefics3ImageProcessorPil(
                size={"longest_edge": 200}, max_image_size={"longest_edge": 56}, do_image_splitting=False
            ),
        ),
        (
            EdgeRule(side=28, longest=300),
            "bicubic",
            PixtralImageProcessorPil(size={"longest_edge": 300}, patch_size={"height": 28, "width": 28}),
        ),
        (
            CountRule(side=14, most=70),
            "bicubic",
            Gemma4ImageProcessorPil(patch_size=14, pooling_kernel_size=1, max_soft_tokens=70),
        ),
        (BudgetRule(side=28, least=5, most=40), "bicubic", _GLM5 and _GLM5(min_image_tokens=5, max_image_tokens=40)),
    ],
    ids=["gemma 3", "tiles", "clip", "siglip", "idefics 3", "idefics 3 without tiles", "pixtral", "gemma 4", "glm 5.3"],
)
def test_other_rules_are_those_of_transformers(
    height: int, width: int, rule: SizeRule, resampling: Resampling, theirs: Any
) -> None:
    data = encoded(noise(height, width), "PNG")
    found = prepare(data, replace(PROCESSOR, rule=rule, resampling=resampling))
    if theirs is None:
        pytest.skip("needs transformers 5.23")
    theirs.do_rescale = theirs.do_normalize = False
    made = theirs(images=[Image.open(io.BytesIO(data))], return_tensors="np")
    expected, pixels = made["pixel_values"], pixels_of(found)
    if isinstance(rule, BudgetRule):
        expected = whole_image(made)
    elif isinstance(rule, CountRule):  # patches of a token each, and padding
        rows, columns = found.fit.height // rule.side, found.fit.width // rule.side
        expected = expected[0, : rows * columns].reshape(rows, columns, rule.side, rule.side, 3).swapaxes(1, 2)
    else:
        expected = expected.reshape(-1, *expected.shape[-3:]).transpose(0, 2, 3, 1)
        height, width = found.fit.pictures[0]
        expected = expected[:, :height, :width]
    np.testing.assert_array_equal(pixels, expected.reshape(pixels.shape))
    assert pixels.size <= 3 * rule.most_pixels


@pytest.mark.parametrize(("height", "width"), [*SIZES, (9, 9), (3, 500), (40, 250)])
def test_sizes_of_small_images_are_those_of_transformers(height: int, width: int) -> None:
    limits = {"min_pixels": 112 * 56, "max_pixels": 40 * SIDE**2}
    fit = AreaRule(side=SIDE, **limits, enlarges="floor").fit(height, width)
    twice = {name: 2 * limit for name, limit in limits.items()}
    assert (fit.height, fit.width) == image_processing_pil_glm46v.smart_resize(2, height, width, factor=SIDE, **twice)
    filled = FilledRule(side=SIDE, merge=2, most=90, longest=40)
    navit_resize = image_processor("kimi_k25", "Kimi_K25ImageProcessor")._preprocess.__globals__["navit_resize"]
    fit = filled.fit(height, width)
    assert (fit.picture, (fit.height, fit.width)) == navit_resize(height, width, 14, 2, 90, 40)
    assert fit.height * fit.width <= filled.max_tokens * SIDE**2
    shown = image_processor("muse_glimmer", "MuseGlimmerImageProcessor").resize.__globals__["smart_resize"]
    fit = ShapeRule(side=SIDE, most=40).fit(height, width)
    assert (fit.height, fit.width) == shown(height, width, SIDE, 40)
    windows = WindowRule(side=7, whole=98, tile=49, longest=300)
    step = image_processor("step3p7", "Step3p7ImageProcessor")
    step.max_image_size = 300
    shown, cut, window, columns, rows, is_squared = step._plan_patches(width, height, 98, 49)
    fit = windows.fit(height, width)
    assert (fit.grid, fit.is_squared) == ((rows, columns), is_squared)
    assert not window or fit.cut == cut[::-1]
    assert fit.whole_first in (None, shown[::-1])
    fit = AreaRule(side=SIDE, **limits, enlarges="round").fit(height, width)
    theirs = image_processing_pil_paddleocr_vl.smart_resize(height, width, factor=SIDE, **limits)
    assert (fit.height, fit.width) == theirs


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_files_of_all_kinds_are_read_as_transformers_does() -> None:
    """Palettes, 16 bits, CMYK, transparency, first frames, photos that their camera says to turn."""
    for name, data in valid_images().items():
        try:
            check_pixels(data)
        except AssertionError as error:
            raise AssertionError(name) from error
    turned = prepare(valid_images()["JPEG turned"])
    assert turned.fit.height > turned.fit.width


def test_equal_pixels_have_one_key_and_others_another() -> None:
    keys = [prepare(encoded(noise(*size), kind)).key for size, kind in (((60, 60), "PNG"),) * 2]
    other = prepare(encoded(noise(61, 60), "PNG")).key
    assert keys[0] == keys[1] != other


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it is empty"),
        (b"%PDF-1.4", 'it is a PDF file; name it in a part {"type": "pdf"'),
        (b"hello", "it is in none of the formats"),
        (encoded(noise(60, 60), "PNG")[:200], "cannot be read"),
        (encoded(noise(2, 600), "PNG"), "its longer side is more than 200 times as long"),
        (encoded(noise(60, 60), "ICO"), "it is in none of the formats"),
    ],
    ids=["empty", "PDF", "text", "cut off", "too long", "another format"],
)
def test_what_cannot_be_read_is_a_problem(data: bytes, problem: str) -> None:
    assert prepare(data).problem.startswith(problem)


def test_a_bomb_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_page, "MAX_PIXELS", 3_000)
    found = prepare(encoded(noise(60, 60), "PNG"))
    assert found.problem == "it has 60 × 60 pixels; allowed: 3,000 together"


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(noise(60, 60), "PNG"))
    assert prepare(tmp_path / "a.png").problem == ""
    assert "No such file" in prepare(tmp_path / "b.png").problem


def test_no_memory_for_pixels_is_no_fault_of_the_image() -> None:
    os.ftruncate(fd := os.memfd_create("small", os.MFD_ALLOW_SEALING), 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    full = PixelFile(f"/proc/self/fd/{fd}")
    found = answer(Question(encoded(noise(60, 60), "PNG"), PROCESSOR, "", 4096), full)
    assert found.has_no_memory
    assert found.problem.startswith("there is no memory for its pixels")
