"""Towers, positions and logits of models that read images are those of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from batches import RequestState
from checkpoints import AFTER_IMAGES, BEFORE_IMAGES, IMAGE_TOKEN, write_tiny_model
from expert_shapes import EXPERT_SHAPES
from fake_runners import engine_config
from family_shapes import SHAPES
from model_driver import ModelDriver
from nvcli.attention.image_tokens import ImageTokens
from nvcli.attention.whole_images import WholeImage
from nvcli.models.vision.image_processor import ImageProcessor
from nvcli.models.vision.image_size import EdgeRule
from nvcli.models.vision.patch_grid import patch_grid
from nvcli.models.vision.positions import (
    ImageSpan,
    angle_positions,
    canvas_positions,
    numbered_positions,
    offset_behind,
)
from nvcli.sizing.images import largest_tower_batch, tower_batch_tokens, tower_bytes
from vision_reference import allowed_size, breaks_rows, load_reference, make_image, model_inputs, pixel_inputs

PROCESSOR = ImageProcessor(
    rule=EdgeRule(side=1, longest=1),  # images have their size already
    resampling="bicubic",
    factor=1 / 255,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.3, 0.25),
)
FAMILIES = [
    "qwen 2-vl",
    "exaone 4.5",
    "hyperclova x with vision",
    "qianfan-ocr",
    "qwen 2.5-vl",
    "qwen 3-vl",
    "qwen 3-vl moe",
    "cohere compass with vision",
    "qwen 2.5-omni",
    "qwen 3-omni",
    "qwen 3.5 with vision",
    "qwen 4-exp with vision",
    "minicpm-v 4.6",
    "minicpm-v 4.7",
    "minicpm-ocr",
    "nemotron 3 omni",
    "gemma 3 with vision",
    "paligemma",
    "paligemma 2",
    "gemma 4 with vision, layer inputs and shared keys",
    "gemma 4 with vision, experts beside an mlp",
    "gemma 4 12b",
    "mistral 3 with vision",
    "mistral large 4 with vision, shared keys",
    "minimax m3 with vision",
    "lighton-ocr",
    "glm 4.6v-flash",
    "glm 4.6v",
    "glm 4.6v of either size",
    "glm-ocr",
    "glm 5.3 flash with vision",
    "hunyuan-ocr",
    "hunyuan v4 with vision",
    "internvl",
    "paddleocr-vl",
    "idefics 2",
    "idefics 3",
    "granite docling",
    "lfm2-vl",
    "lfm3-vl",
    "aya vision",
    "command a vision",
    "kimi k2.5 with vision",
    "llama 4 with vision",
    "muse glimmer with vision",
    "step 3.7 with vision",
    "llava 1.5",
    "llava with siglip",
    "pixtral 12b",
    "videollama 3",
    "got-ocr 2",
    "ovis 2",
]
SIZES = [(5, 7), (1, 1), (2, 9), (5, 7), (4, 4)]
"""Rows and columns of tokens: with whole windows of 2 and others, and two of one size."""
TEXT_TOKEN = 9
"""What stands behind a row of an image's tokens, where something does."""


@pytest.fixture(scope="module")
def driver_of(tmp_path_factory: pytest.TempPathFactory):
    """Gives a loaded model with its tower, and transformers' model."""
    folder = tmp_path_factory.mktemp("vision")

    @cache
    def load(name: str) -> tuple[Path, ModelDriver, transformers.PreTrainedModel]:
        family, overrides = (SHAPES | EXPERT_SHAPES)[name]
        path = write_tiny_model(folder / name, family, **overrides)
        return path, ModelDriver(path, has_tower=True), load_reference(path)

    return load


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_of_towers_is_planned(name: str, driver_of) -> None:
    """It holds the patches of a batch at least."""
    _, driver, _ = driver_of(name)
    vision = driver.model.config.vision
    config = engine_config(max_image_tokens=64)
    patches = tower_batch_tokens(config, vision) * vision.merge_size**2
    assert tower_bytes(config, vision) > patches * vision.patch_values * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_towers_have_positions_for_the_largest_batch(name: str, driver_of) -> None:
    _, driver, _ = driver_of(name)
    vision = driver.model.config.vision
    sizes = largest_tower_batch(vision, 4096)
    assert 4000 < sum(rows * columns for rows, columns in sizes) <= 4096
    taps = patch_grid(vision, [(rows * vision.merge_size, columns * vision.merge_size) for rows, columns in sizes]).taps
    assert taps is None or taps.max() < np.prod(vision.position_shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_towers_are_those_of_transformers(name: str, driver_of) -> None:
    _, driver, reference = driver_of(name)
    vision = driver.model.config.vision
    sizes = [allowed_size(vision, *size) for size in SIZES]
    images = [make_image(*size, seed) for seed, size in enumerate(sizes)]
    with torch.inference_mode():
        expected = reference.get_image_features(**pixel_inputs(vision, images, PROCESSOR), return_dict=True)
        found = driver.model.vision([torch.from_numpy(image) for image in images], PROCESSOR)
        if (norm := driver.model.model.embedding_norm) is not None:
            found = [norm(None, each) for each in found]
    deep = getattr(expected, "deepstack_features", None) or []
    parts = (expected.pooler_output, *deep)
    whole = torch.cat([part.flatten(0, -2) if torch.is_tensor(part) else torch.cat(part) for part in parts], dim=1)
    assert [len(each) for each in found] == [vision.num_tokens(*size) for size in sizes]
    torch.testing.assert_close(torch.cat(found), whole, atol=2e-5, rtol=1e-4)
    assert whole.std() > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_towers_on_a_gpu_compute_what_they_do_on_a_cpu(name: str, driver_of) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    path, driver, _ = driver_of(name)
    on_gpu = ModelDriver(path, device=torch.device("cuda"), has_tower=True)
    sizes = [allowed_size(driver.model.config.vision, *size) for size in SIZES]
    images = [torch.from_numpy(make_image(*size, seed)) for seed, size in enumerate(sizes)]
    with torch.inference_mode():
        expected = torch.cat(driver.model.vision(images, PROCESSOR))
        found = torch.cat(on_gpu.model.vision([image.cuda() for image in images], PROCESSOR))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "in chunks that end inside images"])
def test_logits_with_images_are_those_of_transformers(name: str, is_cut: bool, driver_of) -> None:
    """Text before, between and behind images, which are of odd sizes; and tokens that are decoded behind them."""
    _, driver, reference = driver_of(name)
    vision = driver.model.config.vision
    sizes = [allowed_size(vision, *size) for size in [(2, 9), (1, 1), (5, 3)]]
    images = [make_image(*size, seed) for seed, size in enumerate(sizes)]
    ids, spans = [3, 4, BEFORE_IMAGES], []
    for rows, columns in sizes:
        if vision.merger.latents is not None:
            rows, columns = 1, vision.num_tokens(rows, columns)
        border, row_end = vision.border, vision.has_row_ends
        canvas, apart = (((0, 0), 1), [TEXT_TOKEN]) if vision.canvas_marks else ((), [])
        spans.append(ImageSpan(len(ids), rows, columns + row_end, border, *canvas))
        row = [IMAGE_TOKEN] * (columns + row_end) + [TEXT_TOKEN] * breaks_rows(vision)
        behind = [IMAGE_TOKEN] * (border + vision.num_behind(rows))
        ids += [*[IMAGE_TOKEN] * border, *row * rows, *behind, AFTER_IMAGES, *apart, BEFORE_IMAGES]
    ids += [11, 12, 13, 14]
    num_decoded = 3  # text behind the images, whose positions are an offset
    with torch.inference_mode():
        expected = reference(**model_inputs(vision, ids, images, PROCESSOR, num_decoded)).logits[0]
        embeddings = torch.cat(driver.model.vision([torch.from_numpy(image) for image in images], PROCESSOR))
    outputs = torch.split(embeddings, driver.model.config.hidden_size, dim=1)
    places = [place for place, token in enumerate(ids) if token == IMAGE_TOKEN]
    cuts, whole_spans = [9, 20] if is_cut else [], list[tuple[int, int]]()
    if vision.attends_both_ways == "prompts":
        cuts, whole_spans = [], [(0, len(ids) - num_decoded)]
    elif vision.attends_both_ways:
        cuts = [spans[1].first, spans[1].end + 1] if is_cut else []
        whole_spans = [(span.first, span.end) for span in spans]
    bounds = [0, *cuts, *range(len(ids) - num_decoded, len(ids) + 1)]
    request, found = RequestState(), []
    for start, end in pairwise(bounds):
        here = [number for number, place in enumerate(places) if start <= place < end]
        rows = torch.tensor([places[number] - start for number in here])
        picked = [output[here] for output in outputs]
        whole = tuple(whole_images(whole_spans, start, end))
        positions = None
        if vision.axes:
            of_axes = canvas_positions if vision.canvas_marks else angle_positions
            of_axes = numbered_positions if vision.numbers_images else of_axes
            positions = torch.from_numpy(of_axes(spans, start, end))
            if start > spans[-1].end:
                offset = 0 if vision.numbers_images else offset_behind(of_axes, spans, start)
                positions = torch.arange(start, end) + offset
        found += driver.step(
            (request, ids[start:end]),
            images=ImageTokens(rows, picked[0], tuple(picked[1:])) if here else None,
            whole_images=whole,
            angle_positions=positions,
        )
    torch.testing.assert_close(torch.cat(found), expected, atol=5e-4, rtol=1e-4)
    assert expected.std() > 0.3


def whole_images(spans: list[tuple[int, int]], start: int, end: int) -> Iterator[WholeImage]:
    for first, last in spans:
        if start <= first < end:
            assert last <= end
            yield WholeImage(first - start, last - first, 0, first)


BEGIN_SLICE, END_SLICE, LINE = 90, 91, 92


def canvas_prompt(rng: random.Random) -> tuple[list[int], list[int], list[tuple[int, int]], list[ImageSpan]]:
    """Return the ids of a prompt with marked images and slices, whether each stands for an image, their patches, and
    where they are."""
    ids, types, sizes, spans = list[int](), list[int](), list[tuple[int, int]](), list[ImageSpan]()

    def write(*tokens: int) -> None:
        ids.extend(tokens)
        types.extend(token == IMAGE_TOKEN for token in tokens)

    def add(rows: int, columns: int, **settings: Any) -> None:
        spans.append(ImageSpan(len(ids), rows, columns, **settings))
        sizes.append((4 * rows, 4 * columns))
        write(*[IMAGE_TOKEN] * rows * columns)

    for _ in range(3):
        grid = rng.choice([(0, 0), (1, 3), (3, 1), (2, 2), (2, 3)])
        size = rng.randint(1, 9), rng.randint(1, 9)
        breaks = rng.randint(0, 2)
        write(BEFORE_IMAGES)
        add(rng.randint(1, 9), rng.randint(1, 9), slices=grid, marks=1 + breaks)
        write(AFTER_IMAGES)
        for row in range(grid[0]):
            write(*[LINE] * (row > 0))
            for _ in range(grid[1]):
                write(BEGIN_SLICE)
                add(*size)
                write(END_SLICE)
        write(*[LINE] * breaks, *[5] * rng.randint(1, 3))
    return ids, types, sizes, spans


def test_places_on_canvases_are_those_of_transformers() -> None:
    """Images with and without slices, in rows and columns, at the beginning of a prompt and before line breaks."""
    family = getattr(transformers, "MiniCPMV4_7Model", None)
    if family is None:
        pytest.skip("needs transformers 5.23")
    theirs = object.__new__(family)
    theirs.config = SimpleNamespace(
        downsample_mode="16x",
        image_start_id=BEFORE_IMAGES,
        image_end_id=AFTER_IMAGES,
        slice_start_id=BEGIN_SLICE,
        slice_end_id=END_SLICE,
        newline_id=LINE,
    )
    rng = random.Random(0)
    for _ in range(30):
        ids, types, sizes, spans = canvas_prompt(rng)
        given = (torch.tensor([tokens]).int() for tokens in (ids, types))
        expected, delta = theirs.get_rope_index(*given, torch.tensor(sizes))
        np.testing.assert_array_equal(canvas_positions(spans, 0, len(ids)), expected[:, 0])
        first, last = sorted(rng.sample(range(len(ids)), 2))
        np.testing.assert_array_equal(canvas_positions(spans, first, last), expected[:, 0, first:last])
        assert offset_behind(canvas_positions, spans, len(ids)) == delta.item()
