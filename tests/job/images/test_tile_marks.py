"""Images that are marked, or their tiles, become the pixels and tokens that transformers' processors make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from checkpoints import edit_json
from hostile_images import encoded
from nvcli.core.config import RunConfig
from nvcli.core.system.pixel_file import PixelFile
from nvcli.errors import ConfigError, LoadError
from nvcli.job.images.image_process import Question, answer
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.pixel_memory import PixelMemory, Pixels
from nvcli.job.images.row_images import RowImages
from nvcli.job.run.image_settings import whole_tokens, why_no_images
from nvcli.job.run.row_settings import read_row_settings
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.models.config import load_model_config
from nvcli.models.vision.image_processor import read_processor
from vision_model import IMAGE_ID, write_vision_model
from vision_reference import image_processor

WIDE = {
    "max_patches": 4,
    "dense_max_patches": 30,
    "dense_max_scale": 0.8,
    "dense_min_aspect": 0.9,
    "dense_max_aspect": 3.0,
}
"""Settings of Granite Docling, by which some images may have more tiles."""
SIZES = [(1, 1), (1, 150), (1500, 30), (33, 35), (40, 100), (200, 60), (68, 68), (300, 290), (2, 3), (97, 31)]


def idefics3(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil.from_pretrained(folder)
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=16)


def docling(folder: Path, tokenizer: Any) -> Any:
    images = transformers.GraniteDoclingImageProcessorPil.from_pretrained(folder)
    images.do_rescale = images.do_normalize = False
    return transformers.GraniteDoclingProcessor(images, tokenizer, image_seq_len=16)


def aya(folder: Path, tokenizer: Any) -> Any:
    images = GotOcr2ImageProcessorPil.from_pretrained(folder)
    images.crop_to_patches = True  # as `AyaVisionProcessor.images_kwargs` has it
    return transformers.AyaVisionProcessor(images, tokenizer, patch_size=4, downsample_factor=2, img_size=32)


class CommandA:
    """Command A Vision's processor, with Pillow in place of torchvision."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._images = image_processor("cohere2_vision", "Cohere2VisionImageProcessor")
        self._text = object.__new__(transformers.Cohere2VisionProcessor)
        self._text.image_token, self._text.img_line_break_token = "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"
        self._text.boi_token, self._text.eoi_token = "<|START_OF_IMG|>", "<|END_OF_IMG|>"
        self._text.patch_size = 4

    def _process_images(self, photos: Sequence[Sequence[Image.Image]], **_: Any) -> tuple[dict[str, Any], list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.image_processing_backends.TorchvisionBackend, "resize", _resized)
            size = transformers.image_utils.SizeDict(height=32, width=32)
            cut = [
                self._images.crop_image_to_patches(_tensor(photo), 1, 12, patch_size=size, resample=3)[0]
                for photo in photos[0]
            ]
        texts = [self._text.replace_image_token({"num_patches": [len(each)]}, 0) for each in cut]
        return {"pixel_values": [part for each in cut for part in each]}, texts


class Lfm2:
    """LFM2-VL's processor, with Pillow in place of torchvision."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        images = image_processor("lfm2_vl", "Lfm2VlImageProcessor")
        settings = transformers.ImageProcessingMixin.get_image_processor_dict(folder)[0]
        self._settings = {
            key: settings.get(key, getattr(images, key))
            for key in (
                *("downsample_factor", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens"),
                *("max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "resample"),
            )
        }
        self._images = images
        self._text = object.__new__(transformers.Lfm2VlProcessor)
        self._text.image_token, self._text.image_thumbnail_token = "<image>", "<|img_thumbnail|>"
        self._text.image_start_token, self._text.image_end_token = "<|image_start|>", "<|image_end|>"
        self._text.image_processor = images
        for key, value in self._settings.items():
            setattr(images, key, value)

    def _process_images(self, photos: Sequence[Sequence[Image.Image]], **_: Any) -> tuple[dict[str, Any], list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.image_processing_backends.TorchvisionBackend, "resize", _resized)
            pixels, texts = [], []
            for photo in photos[0]:
                found = self._images.resize_and_split(_tensor(photo), **self._settings)
                ((found,), (rows,), (columns,), (size,)) = found
                pixels += found
                info = {"image_rows": [rows], "image_cols": [columns], "image_sizes": [size]}
                texts.append(self._text.replace_image_token(info, 0, use_image_special_tokens=True))
        return {"pixel_values": pixels}, texts


class Omni:
    """Nemotron 3 Omni's processor, with Pillow in place of torchvision."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._images = image_processor("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3ImageProcessor")
        settings = transformers.ImageProcessingMixin.get_image_processor_dict(folder)[0]
        self._limits = [settings[key] for key in ("min_num_patches", "max_num_patches")]
        self._text = object.__new__(transformers.NemotronH_Omni_Reasoning_V3Processor)
        self._text.image_processor, self._text.image_token = self._images, "<image>"
        self._text.image_start_token, self._text.image_end_token = "<img>", "</img>"

    def _process_images(self, photos: Sequence[Sequence[Image.Image]], **_: Any) -> tuple[dict[str, Any], list[str]]:
        grid_of = self._images._preprocess.__globals__["get_patch_grid_size"]
        grids = [grid_of(photo.height, photo.width, 4, 2, *self._limits) for photo in photos[0]]
        texts = [self._text.replace_image_token({"image_grid_hw": torch.tensor([grid])}, 0) for grid in grids]
        parts = [
            _tensor(photo.resize((4 * columns, 4 * rows), Image.Resampling.BICUBIC))[0]
            for photo, (rows, columns) in zip(photos[0], grids, strict=True)
        ]
        return {"pixel_values": parts}, texts


class Llama4:
    """Llama 4's processor, with Pillow in place of torchvision."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._images = image_processor("llama4", "Llama4ImageProcessor")
        self._most = transformers.ImageProcessingMixin.get_image_processor_dict(folder)[0]["max_patches"]
        self._text = object.__new__(transformers.Llama4Processor)
        self._text.patch_size, self._text.downsample_ratio = 4, 4

    def _process_images(self, photos: Sequence[Sequence[Image.Image]], **_: Any) -> tuple[dict[str, Any], list[str]]:
        own = {"do_resize": True, "size": transformers.image_utils.SizeDict(height=32, width=32), "resample": 2}
        own |= {"do_rescale": False, "rescale_factor": 1, "do_normalize": False, "image_mean": 0, "image_std": 1}
        own |= {"max_patches": self._most, "resize_to_max_canvas": False, "disable_grouping": True}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.image_processing_backends.TorchvisionBackend, "resize", _resized)
            patch.setitem(self._images._preprocess.__globals__, "pad_to_best_fit", _padded)
            found = [self._images._preprocess([_tensor(photo)[0]], **own, return_tensors="pt") for photo in photos[0]]
        return {"pixel_values": torch.cat([each["pixel_values"] for each in found])}, [
            self._text.replace_image_token(each, 0) for each in found
        ]


class Step:
    """Step 3.7's processor, with Pillow in place of torchvision."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._images = image_processor("step3p7", "Step3p7ImageProcessor")
        self._images.max_image_size = 64
        self._text = object.__new__(transformers.Step3p7Processor)
        self._text.image_feature_placeholder, self._text.patch_feature_placeholder = 16 * "<im_patch>", 4 * "<im_patch>"

    def _process_images(self, photos: Sequence[Sequence[Image.Image]], **_: Any) -> tuple[dict[str, Any], list[str]]:
        pixels, texts = [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.image_processing_backends.TorchvisionBackend, "resize", _resized)
            patch.setattr(self._images, "pad", _squared, raising=False)
            for photo in photos[0]:
                whole, parts, columns, rows = self._images._get_image_patches(_tensor(photo)[0], 32, 16, 2)
                parts = [
                    _resized(None, part[None], transformers.image_utils.SizeDict(height=16, width=16), 2)[0]
                    for part in parts
                ]
                newlines = [*[*[False] * (columns - 1), True] * (rows - 1), *[False] * columns]
                info = {"num_local_patches": [len(parts)], "patch_newline_masks": [newlines]}
                texts.append(self._text.replace_image_token(info, 0))
                pixels += [*parts, whole]
        return {"pixel_values": pixels}, texts


class MiniCpm:
    """MiniCPM-V 4.6's processor, without its part for videos, which needs torchvision."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._images = transformers.MiniCPMV4_6ImageProcessorPil.from_pretrained(folder)
        self._images.do_rescale = self._images.do_normalize = False
        self._text = object.__new__(transformers.MiniCPMV4_6Processor)
        self._text.image_token, self._text.slice_mode = "<|image_pad|>", True
        for name in ("image", "slice", "image_id"):
            setattr(self._text, f"{name}_start_token", f"<{name}>")
            setattr(self._text, f"{name}_end_token", f"</{name}>")

    def _process_images(self, photos: Sequence[Sequence[Image.Image]], **_: Any) -> tuple[dict[str, Any], list[str]]:
        found = self._images(photos[0], return_tensors="np")
        numbers, token = range(len(photos[0])), self._text.image_token
        texts = [self._text.replace_image_token(found, number, image_token_divisor=16) for number in numbers]
        texts = self._text._prepend_local_ids([token * len(texts)], texts, token)
        patches, side = found["pixel_values"][0], self._images.patch_size
        sizes = found["target_sizes"].tolist()
        cut = np.split(patches, np.cumsum([side * rows * columns for rows, columns in sizes])[:-1], axis=2)
        parts = [
            own.reshape(3, side, rows, columns, side).swapaxes(1, 2).reshape(3, rows * side, columns * side)
            for own, (rows, columns) in zip(cut, sizes, strict=True)
        ]
        return {"pixel_values": parts}, texts


def _resized(self: Any, images: torch.Tensor, size: Any, resample: int, **_: Any) -> torch.Tensor:
    photo = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    return _tensor(photo.resize((size.width, size.height), resample=Image.Resampling(resample)))


def _squared(images: Sequence[torch.Tensor], pad_size: Any) -> list[torch.Tensor]:
    return [_padded(image, (pad_size.height, pad_size.width)) for image in images]


def _padded(images: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    height, width = images.shape[-2:]
    return torch.nn.functional.pad(images, (0, int(size[1]) - width, 0, int(size[0]) - height))


def _tensor(photo: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(photo).copy()).permute(2, 0, 1)[None]


@pytest.mark.parametrize(
    ("name", "make", "settings"),
    [
        ("idefics 3", idefics3, {}),
        ("lfm2-vl", Lfm2, {}),
        ("lfm2-vl", Lfm2, {"use_thumbnail": False}),
        ("aya vision", aya, {}),
        ("command a vision", CommandA, {}),
        ("granite docling", docling, {"max_patches": 20}),
        ("granite docling", docling, WIDE),
        ("llama 4 with vision", Llama4, {"max_patches": 6}),
        ("step 3.7 with vision", Step, {}),
        ("nemotron 3 omni", Omni, {"max_num_patches": 1040}),
        ("minicpm-v 4.6", MiniCpm, {}),
        ("minicpm-v 4.6", MiniCpm, {"slice_mode": False}),
    ],
)
def test_prompts_are_those_of_transformers(
    name: str, make: Callable[[Path, Any], Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    path = write_vision_model(tmp_path / "model", name)
    edit_json(path / "preprocessor_config.json", **settings)
    vision = load_model_config(path).vision
    assert vision is not None
    assert vision.text is not None
    processor, tokenizer = read_processor(path, vision), transformers.AutoTokenizer.from_pretrained(path)
    theirs = make(path, tokenizer)
    token = tokenizer.convert_tokens_to_ids(vision.text.token)
    images = RowImages(processor, token, ImageFolders.of((), ()), vision.text)
    memory = PixelMemory()
    file = PixelFile(memory.path)
    rng = np.random.default_rng(0)
    for sizes in [[size] for size in SIZES] + [SIZES[:3]]:
        photos = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
        pixels = list(prepared(photos, processor, memory, file))
        written = images.write("a" + f"{vision.text.written}b\n" * len(sizes), pixels)
        assert isinstance(written, str)
        ids, placed = images.expand(tokenizer(written, add_special_tokens=False)["input_ids"], pixels)
        info = {"return_row_col_info": True} if make is idefics3 else {}
        their_pixels, texts = theirs._process_images([photos] if make is not aya else photos, **info)
        expected = "a" + "".join(f"{text}b\n" for text in texts)
        assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"], sizes
        found = [place for image in placed.images for place in range(image.first, image.end)]
        assert found == [place for place, each in enumerate(ids) if each == token]
        assert len({image.key for image in placed.images}) == len(placed.images)
        if make in (Lfm2, CommandA, docling, Llama4, MiniCpm, Omni, Step):  # `test_image_process.py` has others
            tiles = their_pixels["pixel_values"][0] if make is docling else their_pixels["pixel_values"]
            for image, theirs_own in zip(placed.images, tiles, strict=True):
                own = np.empty((*theirs_own.shape[1:], 3), dtype=np.uint8)
                assert own.shape[:2] == (8 * image.rows, 8 * image.columns)
                file.read(own.data.cast("B"), image.offset)
                np.testing.assert_array_equal(own, np.moveaxis(np.asarray(theirs_own), 0, 2))
    images.close()


def write_without_template(folder: Path, name: str) -> Path:
    path = write_vision_model(folder, name)
    (path / "chat_template.jinja").unlink()
    edit_json(path / "tokenizer_config.json", chat_template="")
    edit_json(path / "tokenizer.json", truncation=None, padding=None)
    return path


def test_prompts_of_paligemma_without_a_template_are_those_of_transformers(tmp_path: Path) -> None:
    path = write_without_template(tmp_path / "model", "paligemma")
    model = load_model_config(path)
    settings = read_row_settings(RunConfig(model=str(path)), path, model)
    assert settings.has_chat_template
    tokenizer = Tokenizer.load(path, chat_template=settings.chat_template)
    photo = {"type": "image", "image": "a.png"}
    content = [photo, {"type": "text", "text": "answer en"}, photo]
    messages = [{"role": "user", "content": content}, {"role": "user", "content": " what?"}]
    own = tokenizer.encode([tokenizer.render(messages)], add_special_tokens=False)[0]
    pictures = SiglipImageProcessorPil.from_pretrained(path)
    pictures.image_seq_length = 1
    theirs = transformers.PaliGemmaProcessor(pictures, transformers.AutoTokenizer.from_pretrained(path))
    photos = [Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8))] * 2
    assert own == theirs(images=photos, text="<image><image>answer en what?")["input_ids"][0]
    assert (why_no_images(RunConfig(model=str(path), task="score"), path, model) or "").startswith("`task` is score")
    assert whole_tokens(model.with_tower(), 4, 64, 64) == 64
    with pytest.raises(ConfigError, match="computes a prompt with images of up to 65 tokens in one step"):
        whole_tokens(model.with_tower(), 4, 65, 64)


def test_pictures_of_any_size_have_equally_many_tokens(tmp_path: Path) -> None:
    """Quarters of an image and the whole, in prompts where marks of images meet each other and words."""
    path = write_vision_model(tmp_path / "model", "idefics 2")
    vision = load_model_config(path).vision
    assert vision is not None
    assert vision.text is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    their_images = Idefics2ImageProcessorPil.from_pretrained(path)
    their_images.do_rescale = their_images.do_normalize = False
    theirs = transformers.Idefics2Processor(their_images, tokenizer, image_seq_len=5)
    memory = PixelMemory()
    file = PixelFile(memory.path)
    text = "a<image>b<image><image>\n<image> <c>"
    for is_cut in (True, False):
        edit_json(path / "preprocessor_config.json", do_image_splitting=is_cut)
        their_images.do_image_splitting = is_cut
        processor = read_processor(path, vision)
        images = RowImages(processor, IMAGE_ID, ImageFolders.of((), ()), vision.text)
        rng = np.random.default_rng(0)
        for sizes in ([(2, 2), (35, 47), (500, 129), (63, 65)], [(3, 90), (64, 64), (131, 17), (1000, 999)]):
            photos = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
            pixels = list(prepared(photos, processor, memory, file))
            written = images.write(text, pixels)
            assert isinstance(written, str)
            ids, placed = images.expand(tokenizer(written, add_special_tokens=False)["input_ids"], pixels)
            found = theirs(images=[photos], text=[text], add_special_tokens=False, truncation=False)
            assert ids == found["input_ids"][0]
            assert len({image.key for image in placed.images}) == len(placed.images) == 4 * (5 if is_cut else 1)
            for image, own, mask in zip(
                placed.images, found["pixel_values"][0], found["pixel_attention_mask"][0], strict=True
            ):
                assert image.patches is not None
                assert image.patches == (mask[:, 0].sum() // 8, mask[0].sum() // 8)
                height, width = (8 * count for count in image.patches)
                data = np.frombuffer(memory.read(image.offset, 3 * height * width), dtype=np.uint8)
                kept = own[:, :height, :width].transpose(1, 2, 0)
                np.testing.assert_array_equal(data.reshape(kept.shape), kept)
    edit_json(path / "preprocessor_config.json", size={"shortest_edge": 16, "longest_edge": 72})
    with pytest.raises(LoadError, match="`size`: is 16 to 72; supported: from 8 to 64"):
        read_processor(path, vision)


def test_prompts_of_got_ocr_without_a_template_are_those_of_transformers(tmp_path: Path) -> None:
    path = write_without_template(tmp_path / "model", "got-ocr 2")
    settings = read_row_settings(RunConfig(model=str(path)), path, load_model_config(path))
    tokenizer = Tokenizer.load(path, chat_template=settings.chat_template)
    photo = {"type": "image", "image": "a.png"}
    own = tokenizer.encode([tokenizer.render([{"role": "user", "content": [photo]}])], add_special_tokens=False)[0]
    images = GotOcr2ImageProcessorPil.from_pretrained(path)
    theirs = transformers.GotOcr2Processor(images, transformers.AutoTokenizer.from_pretrained(path))
    photos = [Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8))]
    _, *expected = theirs(images=photos, num_image_tokens=1)["input_ids"][0]
    assert own == expected, "the tiny tokenizer has a token for the beginning"


def prepared(photos: Sequence[Image.Image], processor: Any, memory: PixelMemory, file: PixelFile) -> Iterator[Pixels]:
    for photo in photos:
        offset = memory.reserve(1 << 24)
        found = answer(Question(encoded(photo, "PNG"), processor, "", offset), file)
        assert found.problem == ""
        yield Pixels(memory, offset, found.fit, found.key)
