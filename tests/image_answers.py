"""Requests with images, and what transformers answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nvcli.core.system.pixel_file import PixelFile
from nvcli.engine.request import Request
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.pixel_memory import PixelMemory, Pixels
from nvcli.job.images.row_images import RowImages
from nvcli.models.config import load_model_config
from nvcli.models.vision.image_processor import ImageProcessor, read_processor
from requests_factory import make_request
from vision_model import IMAGE_ID, SIDE

MAX_TOKENS = 12
END_ID = 1
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


def pixels_of(rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8)


def put_pixels(memory: PixelMemory, pixels: np.ndarray, key: bytes) -> Pixels:
    """Write pixels, [height, width, 3] bytes, as an image process does."""
    offset = memory.reserve(2 * pixels.nbytes)
    file = PixelFile(memory.path)
    file.write(pixels.tobytes(), offset)
    file.close()
    return Pixels(memory, offset, pixels.shape[0], pixels.shape[1], key)


class ImageRequests:
    """Makes requests, and keeps their pixels."""

    def __init__(self, model: Path) -> None:
        vision = load_model_config(model).vision
        assert vision is not None
        self.processor: ImageProcessor = read_processor(model, vision)
        self._memory = PixelMemory()
        self._kept: list[Pixels] = []
        self._images = RowImages(self.processor, IMAGE_ID, ImageFolders.of((), ()))

    def make(self, number: int, prompt: Prompt, max_tokens: int = MAX_TOKENS, **settings: Any) -> Request:
        pixels = []
        for part in prompt:
            if isinstance(part, tuple):
                data = pixels_of(*part)
                key = b"%d %d %d" % part
                pixels.append(put_pixels(self._memory, data, key))
        self._kept += pixels
        ids, images = self._images.expand([part if isinstance(part, int) else IMAGE_ID for part in prompt], pixels)
        request = make_request(number, ids, max_tokens, stop_ids=[END_ID], **settings)
        return msgspec.structs.replace(
            request, prompt_ids=images.packed(ids), images=images.images, image_token_id=IMAGE_ID
        )

    def requests(self) -> list[Request]:
        return [self.make(number, prompt) for number, prompt in enumerate(PROMPTS)]


def reference_answers(model: Path, processor: ImageProcessor) -> list[list[int]]:
    """The greedy answers of transformers to `PROMPTS`."""
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reference = transformers.AutoModelForImageTextToText.from_pretrained(model).eval()
    prepare = Qwen2VLImageProcessorPil(
        do_resize=False,
        patch_size=SIDE // 2,
        merge_size=2,
        image_mean=list(processor.mean),
        image_std=list(processor.std),
    )
    answers = []
    for prompt in PROMPTS:
        ids: list[int] = []
        images = []
        for part in prompt:
            if isinstance(part, int):
                ids.append(part)
            else:
                images.append(pixels_of(*part))
                ids += [IMAGE_ID] * (part[0] * part[1])
        tokens = torch.tensor([ids])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if images:
            found = prepare(images=images, return_tensors="pt", input_data_format="channels_last")
            inputs |= {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}
            inputs["mm_token_type_ids"] = (tokens == IMAGE_ID).int()
        made = reference.generate(
            **inputs, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=END_ID, pad_token_id=0
        )
        answers.append(made[0, len(ids) :].tolist())
    return answers


def answers_in_order(found: dict[int, list[int]]) -> Sequence[list[int]]:
    return [found[number] for number in range(len(PROMPTS))]
