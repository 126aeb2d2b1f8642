"""Images whose tiles' tokens stand in rows with learned vectors at their ends are read as by transformers."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

from checkpoints import greedy_answer
from hostile_images import encoded
from nvcli.engine.request import Request
from nvcli.errors import RowError
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.row_images import RowImages
from nvcli.job.rows.conversation import IMAGE
from nvcli.models.config import load_model_config
from nvcli.models.vision.image_processor import read_processor
from one_rank import make_runner, run_requests
from requests_factory import make_request
from vision_model import IMAGE_ID, write_vision_model
from vision_reference import load_reference, parts_tiles

SIZES = [(30, 30), (100, 37), (300, 700), (5, 100), (57, 55), (34, 68), (400, 90), (1, 3), (1, 4000), (4000, 1)]
Sizes = list[list[tuple[int, int]]]
PROMPTS: Sizes = [*([size] for size in SIZES), [(40, 90), (20, 20)]]
KINDS = {
    "llava-next": LlavaNextImageProcessorPil,
    "llava-onevision": LlavaOnevisionImageProcessorPil,
    "granite 4 vision": LlavaNextImageProcessorPil,
    "ovis 2": Ovis2ImageProcessorPil,
    "deepseek-ocr 2": getattr(transformers, "DeepseekOcr2ImageProcessorPil", None),  # not in version 5.17
}
FEW_PROMPTS: Sizes = [[(9, 96)], [(30, 100), (9, 96)]]
"""For a family whose images have many patches."""
MAX_TOKENS, END_ID = 6, 1
OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def photo(height: int, width: int) -> Image.Image:
    small = np.random.default_rng(height).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def url(image: Image.Image) -> str:
    return "data:;base64," + base64.b64encode(encoded(image, "PNG")).decode()


def written(count: int, tokens: Sequence[int] | None = None) -> list[int]:
    """A prompt with images, each of which has so many tokens, or one that is to be expanded."""
    return [5, *(token for number in range(count) for token in [*[IMAGE_ID] * (tokens or [1] * count)[number], 7]), 8]


def their_inputs(
    theirs: Any, photos: Sequence[Image.Image], name: str
) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """What transformers' processor makes of the images of one prompt, and the marks of each image's tokens where it has
    any, by number; -1: the token is of the image."""
    found = theirs([photos] if name == "llava-onevision" else photos, return_tensors="pt")
    keys = "pixel_values", "image_sizes", "batch_num_images", "pixel_values_local", "num_local_patches"
    marks: list[list[int]] = []
    if name == "ovis 2":
        text = object.__new__(transformers.Ovis2Processor)
        text.image_seq_length = 16
        texts = [text.replace_image_token(found, number) for number in range(len(photos))]
        names = {"<IMG_ATOM>": -1, **{mark: number for number, mark in enumerate(OVIS_MARKS)}}
        marks = [[names[token] for token in re.findall("<.*?>", text)] for text in texts]
    return {key: found[key] for key in keys if key in found}, marks


def features_of(found: Any, marks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What the decoder reads of each image: its tokens' embeddings, and what is added before later layers."""
    if marks:
        own = iter(found.pooler_output.flatten(0, 1))
        vectors = found.visual_indicator_features
        return [torch.stack([vectors[mark] if mark >= 0 else next(own) for mark in each]) for each in marks]
    deep = dict(getattr(found, "deepstack_features", {}))
    if not deep:
        return list(found.pooler_output)
    return [torch.cat(parts, dim=1) for parts in zip(*(deep[layer] for layer in sorted(deep)), strict=True)]


@pytest.fixture
def close_later() -> Iterator[Callable[[RowImages], RowImages]]:
    with ExitStack() as stack:
        yield lambda images: stack.enter_context(closing(images))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_images_in_rows_are_read_as_by_transformers(
    name: str, device: str, tmp_path: Path, close_later: Callable[[RowImages], RowImages]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path = write_vision_model(tmp_path / "model", name)
    if KINDS[name] is None:
        pytest.skip("needs transformers 5.23")
    vision = load_model_config(path).vision
    assert vision is not None
    images = close_later(RowImages(read_processor(path, vision), IMAGE_ID, ImageFolders.of((), ()), vision.text))
    settings = {"max_model_len": 2048, "block_size": 16, "dtype": "float32", "max_image_tokens": 600}
    runner = make_runner(path, device, **settings)
    theirs, reference = KINDS[name].from_pretrained(path), load_reference(path)
    requests, prompts, kept = [], [], []
    sizes_of_prompts = PROMPTS if vision.encoder is None else FEW_PROMPTS
    for number, sizes in enumerate(sizes_of_prompts):
        photos = [photo(*size) for size in sizes]
        (pixels,) = images.read([[{"type": IMAGE, IMAGE: url(each)} for each in photos]])
        assert not isinstance(pixels, RowError)
        parts = [len(each.fit.pictures) if parts_tiles(vision) else 1 for each in pixels]
        ids, placed = images.expand(written(len(photos), parts), pixels)
        inputs, marks = their_inputs(theirs, photos, name)
        with torch.inference_mode():
            features = features_of(reference.model.get_image_features(**inputs, return_dict=True), marks)
        assert placed.num_tokens == tuple(map(len, features)), sizes
        assert ids == written(len(photos), placed.num_tokens)
        request: Request = make_request(number, ids, MAX_TOKENS, stop_ids=[END_ID])
        requests.append(
            msgspec.structs.replace(
                request, prompt_ids=placed.packed(ids), images=placed.images, image_token_id=IMAGE_ID
            )
        )
        if marks:
            assert images.write("a<image>b" * len(photos), pixels) == "a<IMG_ATOM>b" * len(photos)
        for image, own in zip(placed.images, marks, strict=False):
            ids[image.first : image.end] = [90 + mark if mark >= 0 else IMAGE_ID for mark in own]
        prompts.append((ids, inputs, torch.cat(features)))
        kept.append(placed)
    assert runner._images is not None
    assert runner._images.encoder is not None
    for request, (_, _, features) in zip(requests, prompts, strict=True):
        found = runner._images.encoder.embeddings(request.images)
        own = torch.cat([found[image.key] for image in request.images]).cpu()
        torch.testing.assert_close(own, features, atol=2e-5, rtol=1e-4)
    found_answers = run_requests(runner, requests)
    answers = []
    for number, (ids, inputs, _) in enumerate(prompts):
        tokens = torch.tensor([ids + found_answers[number]])
        with torch.inference_mode():
            logits = reference(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits[0]
        answers.append(greedy_answer(logits, len(ids), MAX_TOKENS, END_ID))
    assert [found_answers[number] for number in range(len(prompts))] == answers
    assert len({tuple(answer) for answer in answers}) > len(answers) // 4, "the images must make a difference"
    in_chunks = make_runner(path, device, max_num_batched_tokens=90, **settings)
    for _ in range(2):  # and then most of the prompts are in the prefix cache
        assert run_requests(in_chunks, requests) == found_answers
