"""Requests with images, and what transformers answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from checkpoints import AFTER_IMAGES, BEFORE_IMAGES, greedy_answer
from nvcli.core.system.pixel_file import PixelFile
from nvcli.engine.request import Request
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.pixel_memory import PixelMemory, Pixels
from nvcli.job.images.row_images import RowImages
from nvcli.models.config import load_model_config
from nvcli.models.vision.image_processor import ImageProcessor, read_processor
from nvcli.models.vision.image_size import Fit
from nvcli.models.vision.vision_config import VisionConfig
from requests_factory import make_request
from vision_model import IMAGE_ID
from vision_reference import allowed_size, breaks_rows, load_reference, make_image, model_inputs, parts_tiles

MAX_TOKENS = 12
END_ID = 1
TEXT_TOKEN = 9
Prompt = list[int | tuple[int, int, int]]
"""Token ids, and images by rows and columns of tokens and the seed of their pixels."""

PROMPTS: list[Prompt] = [
    [5, 6, (4, 5, 0), 7],
    [5, 6, (4, 5, 1), 7],  # of the same size
    [5, 6, (4, 5, 0), 7, 8, 9],  # the same image
    [9, 10, 11],
    [(1, 1, 2), 4, (2, 9, 3), 5, (3, 3, 4), 12, 13, 14, 15, 16, 17],
    [5, 6, (4, 5, 0), 7, (4, 5, 1), 30],
    [*range(20, 60), (2, 2, 5), *range(40, 80)],
]


def put_pixels(memory: PixelMemory, pixels: np.ndarray, key: bytes, tile: int = 0) -> Pixels:
    """Write pixels, [height, width, 3] bytes, as an image process does, of tiles below each other with that side."""
    offset = memory.reserve(2 * pixels.nbytes)
    file = PixelFile(memory.path)
    file.write(pixels.tobytes(), offset)
    file.close()
    height, width, _ = pixels.shape
    grid = (1, height // tile - 1) if tile else (0, 0)
    return Pixels(memory, offset, Fit(height=tile or height, width=width, tile=(tile, tile), grid=grid), key)


class ImageRequests:
    """Makes requests, and keeps their pixels."""

    def __init__(self, model: Path) -> None:
        vision = load_model_config(model).vision
        assert vision is not None
        self.vision = vision
        self.processor: ImageProcessor = read_processor(model, vision)
        self._memory = PixelMemory()
        self._kept: list[Pixels] = []
        whole = vision.attends_both_ways == "prompts"
        folders = ImageFolders.of((), ())
        self._images = RowImages(
            self.processor,
            IMAGE_ID,
            folders,
            vision.text,
            whole_prompts=whole,
            canvas_marks=vision.canvas_marks,
        )

    def make(self, number: int, prompt: Prompt, max_tokens: int = MAX_TOKENS, **settings: Any) -> Request:
        pixels, written = [], []
        for part in prompt:
            if isinstance(part, int):
                written.append(part)
                continue
            rows, columns, seed = part
            rows, columns = allowed_size(self.vision, rows, columns)
            data = make_image(rows, columns, seed)
            tile = data.shape[1] if parts_tiles(self.vision) and self.vision.tile_tokens else 0
            pixels.append(put_pixels(self._memory, data, b"%d %d %d" % (rows, columns, seed), tile))
            written += _tokens(self.vision, rows, columns, is_written=True)
        self._kept += pixels
        ids, images = self._images.expand(written, pixels)
        request = make_request(number, ids, max_tokens, stop_ids=[END_ID], **settings)
        return msgspec.structs.replace(
            request, prompt_ids=images.packed(ids), images=images.images, image_token_id=IMAGE_ID
        )

    def requests(self) -> list[Request]:
        return [self.make(number, prompt) for number, prompt in enumerate(PROMPTS)]


def reference_answers(model: Path, processor: ImageProcessor, guesses: Sequence[list[int]]) -> list[list[int]]:
    """The greedy answers of transformers to `PROMPTS`; see `greedy_answer`."""
    vision = load_model_config(model).vision
    assert vision is not None
    reference = load_reference(model)
    answers = []
    for prompt, guess in zip(PROMPTS, guesses, strict=True):
        ids: list[int] = []
        images = []
        for part in prompt:
            if isinstance(part, int):
                ids.append(part)
                continue
            rows, columns = allowed_size(vision, *part[:2])
            images.append(make_image(rows, columns, part[2]))
            ids += _tokens(vision, rows, columns)
        with torch.inference_mode():
            logits = reference(**model_inputs(vision, ids + guess, images, processor, len(guess))).logits[0]
        answers.append(greedy_answer(logits, len(ids), MAX_TOKENS, END_ID))
    return answers


def _tokens(vision: VisionConfig, rows: int, columns: int, *, is_written: bool = False) -> list[int]:
    """The tokens of an image, or as they are written. Where something is between rows, they have a token behind them,
    and the last one another; where something is between tiles, each has a token or two before it; where images have
    canvases, they are marked, and text is behind them."""
    if breaks_rows(vision):
        row = [IMAGE_ID] * (1 if is_written else columns)
        return [*[*row, IMAGE_ID - 1] * (rows - 1), *row, IMAGE_ID + 1]
    if not parts_tiles(vision) or not vision.tile_tokens:
        image = [IMAGE_ID] * (1 if is_written else vision.num_tokens(rows, columns))
        return [BEFORE_IMAGES, *image, AFTER_IMAGES, TEXT_TOKEN] if vision.canvas_marks else image
    tile = [IMAGE_ID] * (1 if is_written else columns**2)
    return [token for number in range(rows // columns) for token in (IMAGE_ID - 1, *[7] * (number % 2), *tile)]


def image_settings(path: Path) -> dict[str, Any]:
    """The settings of an engine that reads these images."""
    vision = load_model_config(path).vision
    assert vision is not None
    is_whole = vision.attends_both_ways != ""
    most = (vision.tile_tokens**2 or 20) if is_whole else 64
    if vision.attends_both_ways == "prompts":
        return {"max_image_tokens": most, "whole_tokens": 128, "max_num_batched_tokens": 128}
    return {"max_image_tokens": most, "whole_tokens": most if is_whole else 0}


def answers_in_order(found: dict[int, list[int]]) -> Sequence[list[int]]:
    return [found[number] for number in range(len(PROMPTS))]
