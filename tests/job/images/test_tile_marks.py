"""Images whose tiles are marked become the tokens to which transformers' processor expands them, at any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from hostile_images import encoded
from nvcli.core.system.pixel_file import PixelFile
from nvcli.job.images.image_process import Question, answer
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.pixel_memory import PixelMemory, Pixels
from nvcli.job.images.row_images import RowImages
from nvcli.models.config import load_model_config
from nvcli.models.vision.image_processor import read_processor
from vision_model import write_vision_model

SIZES = [(1, 1), (1, 4000), (4000, 1), (33, 35), (40, 100), (200, 60), (68, 68), (300, 290), (2, 3), (97, 31)]


def idefics3(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil.from_pretrained(folder)
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=16)


@pytest.mark.parametrize(("name", "make"), [("idefics 3", idefics3)])
def test_tokens_are_those_of_transformers(name: str, make: Callable[[Path, Any], Any], tmp_path: Path) -> None:
    path = write_vision_model(tmp_path / "model", name)
    vision = load_model_config(path).vision
    assert vision is not None
    assert vision.text is not None
    processor, tokenizer = read_processor(path, vision), transformers.AutoTokenizer.from_pretrained(path)
    theirs = make(path, tokenizer)
    token = tokenizer.convert_tokens_to_ids(vision.text.token)
    images = RowImages(processor, token, ImageFolders.of((), ()), vision.text)
    memory = PixelMemory()
    file = PixelFile(memory.path)
    for sizes in [[size] for size in SIZES] + [SIZES[:3]]:
        photos = [Image.fromarray(np.full((*size, 3), 90, dtype=np.uint8)) for size in sizes]
        found = [answer(Question(encoded(photo, "PNG"), processor, "", 0), file) for photo in photos]
        pixels = [Pixels(memory, 0, each.height, each.width, each.key, each.tile, each.grid) for each in found]
        written = images.write("a" + f"{vision.text.written}b\n" * len(sizes), pixels)
        ids, placed = images.expand(tokenizer(written, add_special_tokens=False)["input_ids"], pixels)
        _, texts = theirs._process_images([photos], return_row_col_info=True)
        expected = "a" + "".join(f"{text}b\n" for text in texts)
        assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"], sizes
        assert places(placed.images) == [place for place, each in enumerate(ids) if each == token]
        assert len({image.key for image in placed.images}) == len(placed.images)
    images.close()


def places(images: Sequence[Any]) -> list[int]:
    return [place for image in images for place in range(image.first, image.end)]
