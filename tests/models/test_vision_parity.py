"""Towers, positions and logits of models that read images are those of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from batches import RequestState
from checkpoints import IMAGE_TOKEN, write_tiny_model
from expert_shapes import EXPERT_SHAPES
from family_shapes import SHAPES
from model_driver import ModelDriver
from nvcli.attention.image_tokens import ImageTokens
from nvcli.models.vision.positions import ImageSpan, angle_positions, offset_behind
from nvcli.models.vision.tower import PixelScale

SCALE = PixelScale(factor=1 / 255, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
SIDE = 8
"""Pixels of a token's side in tiny checkpoints."""
FAMILIES = ["qwen 2.5-vl", "qwen 3-vl", "qwen 3-vl moe", "qwen 3.5 with vision"]
SIZES = [(5, 7), (1, 1), (2, 9), (5, 7), (4, 4)]
"""Rows and columns of tokens: with whole windows of 2 and others, and two of one size."""


@pytest.fixture(scope="module")
def driver_of(tmp_path_factory: pytest.TempPathFactory):
    """Gives a loaded model with its tower, and transformers' model."""
    folder = tmp_path_factory.mktemp("vision")

    @cache
    def load(name: str) -> tuple[Path, ModelDriver, transformers.PreTrainedModel]:
        family, overrides = (SHAPES | EXPERT_SHAPES)[name]
        path = write_tiny_model(folder / name, family, **overrides)
        reference = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
        return path, ModelDriver(path, has_tower=True), reference

    return load


def make_images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8) for rows, columns in sizes]


def reference_inputs(images: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    processor = Qwen2VLImageProcessorPil(
        do_resize=False, patch_size=4, merge_size=2, image_mean=list(SCALE.mean), image_std=list(SCALE.std)
    )
    found = processor(images=images, return_tensors="pt", input_data_format="channels_last")
    return found["pixel_values"], found["image_grid_thw"]


@pytest.mark.parametrize("name", FAMILIES)
def test_towers_are_those_of_transformers(name: str, driver_of) -> None:
    _, driver, reference = driver_of(name)
    images = make_images(*SIZES)
    pixels, grid = reference_inputs(images)
    with torch.inference_mode():
        expected = reference.model.get_image_features(pixels, grid)
        found = driver.model.vision([torch.from_numpy(image) for image in images], SCALE)
    deep = getattr(expected, "deepstack_features", None) or []
    whole = torch.cat([torch.cat(list(part)) for part in (expected.pooler_output, *deep)], dim=1)
    assert [len(each) for each in found] == [rows * columns for rows, columns in SIZES]
    torch.testing.assert_close(torch.cat(found), whole, atol=2e-5, rtol=1e-4)
    assert whole.std() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunks", [(), (9, 20)], ids=["whole", "in chunks that end inside images"])
def test_logits_with_images_are_those_of_transformers(name: str, chunks: tuple[int, ...], driver_of) -> None:
    """Text before, between and behind images, which are of odd sizes; and tokens that are decoded behind them."""
    _, driver, reference = driver_of(name)
    sizes = [(2, 9), (1, 1), (5, 3)]
    images = make_images(*sizes)
    ids, spans = [3, 4, 5], []
    for rows, columns in sizes:
        spans.append(ImageSpan(len(ids), rows, columns))
        ids += [IMAGE_TOKEN] * (rows * columns) + [7, 8]
    ids += [11, 12, 13, 14]
    pixels, grid = reference_inputs(images)
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        expected = reference(
            input_ids=tokens,
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
        ).logits[0]
        embeddings = torch.cat(driver.model.vision([torch.from_numpy(image) for image in images], SCALE))
    outputs = torch.split(embeddings, driver.model.config.hidden_size, dim=1)
    places = [place for span in spans for place in range(span.first, span.end)]
    request, found, start = RequestState(), [], 0
    num_decoded = 3  # text behind the images, whose positions are an offset
    for length in (*chunks, len(ids) - num_decoded - sum(chunks), *[1] * num_decoded):
        end = start + length
        here = [number for number, place in enumerate(places) if start <= place < end]
        rows = torch.tensor([places[number] - start for number in here])
        picked = [output[here] for output in outputs]
        is_text = start >= spans[-1].end
        found += driver.step(
            (request, ids[start:end]),
            images=ImageTokens(rows, picked[0], tuple(picked[1:])) if here else None,
            angle_positions=torch.arange(start, end) + offset_behind(spans, start)
            if is_text
            else torch.from_numpy(angle_positions(spans, start, end)),
        )
        start = end
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.3
