#!/usr/bin/env python3
"""Images a second with made-up weights: preparing alone, the GPU alone, and both together.

    python3 scripts/bench_images.py qwen3-vl-8b|qwen2.5-vl-7b [--images 2000] [--size 1024x768] [--max-tokens 64]
        [--device cuda] [--result FILE.json]

Rows have one image each (JPEG), behind a text of their own so that nothing is found in the prefix cache. They are
answered by one `LLM` three times: first with images that nobody has prepared, then with the same images prepared, which
leaves the GPU's part, and again with other images. Before that a few rows compile kernels and capture graphs. Memory is
the most that this process, which is the parent, had resident in the first pass, and beside it the most that all pixels
took at a time.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nvcli import LLM
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.system.host_memory import peak_resident_bytes

_TEXT = {
    "qwen3-vl-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 5e6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "attention_bias": False,
    },
    "qwen2.5-vl-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
}
_VISION = {
    "qwen3-vl-8b": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "qwen2.5-vl-7b": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "in_chans": 3,
    },
}
_LIMITS = {"qwen3-vl-8b": (65_536, 16_777_216), "qwen2.5-vl-7b": (3_136, 12_845_056)}
_ARCHITECTURES = {
    "qwen3-vl-8b": "Qwen3VLForConditionalGeneration",
    "qwen2.5-vl-7b": "Qwen2_5_VLForConditionalGeneration",
}
_MARKS = ("<|end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TEMPLATE = """{%- for message in messages %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{%- endfor %}{{ 'a:' }}"""


def write_checkpoint(folder: Path, shape: str) -> None:
    """Write the configuration of a shape, a tokenizer of bytes and an image processor; there are no weights."""
    vocab = {mark: number for number, mark in enumerate(_MARKS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(list(_MARKS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    text = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "dtype": "bfloat16"}
    text |= {"tie_word_embeddings": False, "eos_token_id": 0, **_TEXT[shape]}
    config = {"architectures": [_ARCHITECTURES[shape]], "image_token_id": 2, "tie_word_embeddings": False}
    config |= {"text_config": text, "vision_config": _VISION[shape]}
    (folder / "config.json").write_text(json.dumps(config))
    least, most = _LIMITS[shape]
    sizes = {name: _VISION[shape][name] for name in ("patch_size", "temporal_patch_size")}
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "merge_size": 2, **sizes}
    limits = {"min_pixels": least, "max_pixels": most}
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **limits}))


def write_photo(path: Path, width: int, height: int, seed: int) -> None:
    """Write a JPEG as large as a photo of its size: smooth shapes with grain."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = rng.integers(-12, 13, (height, width, 1), dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    path.write_bytes(out.getvalue())


def write_photos(folder: Path, kind: str, count: int, size: tuple[int, int]) -> list[str]:
    """Write photos, and return their paths."""
    paths = [folder / f"{kind}{number}.jpg" for number in range(count)]
    seeds = range(zlib.crc32(kind.encode()), 1 << 40)
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_photo, paths, *([side] * count for side in size), seeds, chunksize=8))
    return [str(path) for path in paths]


def conversations(photos: list[str], text: str) -> list[list[dict[str, Any]]]:
    """Make a conversation about each photo, which begins with a number of its own."""
    return [
        [{"role": "user", "content": [{"type": "text", "text": f"{number} {text}"}, {"type": "image", "image": photo}]}]
        for number, photo in enumerate(photos)
    ]


class Bench:
    """An LLM and the memory of its pixels."""

    def __init__(self, llm: LLM, max_tokens: int) -> None:
        images = llm._session._feeder._images
        assert images is not None
        self.llm, self.images, self._max_tokens = llm, images, max_tokens
        self.most_pixel_bytes = 0

    def answer(self, photos: list[str], text: str) -> float:
        """Answer a row for each photo and return the photos a second."""
        started = time.perf_counter()
        sampling = {"max_tokens": self._max_tokens, "ignore_eos": True}
        for answer in self.llm.chat(conversations(photos, text), sampling=sampling):
            assert answer.error is None, answer.error
            self.most_pixel_bytes = max(self.most_pixel_bytes, self.images._memory.num_bytes)
        return len(photos) / (time.perf_counter() - started)

    def prepare(self, photos: list[str]) -> tuple[list[Any], float]:
        """Prepare photos and nothing else; return their pixels, and how many a second."""
        started = time.perf_counter()
        held = [self.images.read(conversations(photos[at : at + 256], "")) for at in range(0, len(photos), 256)]
        return held, len(photos) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=_TEXT)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", default="1024x768", help="width x height")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, options.shape)
        warm, photos = (
            write_photos(folder, kind, count, (width, height))
            for kind, count in (("warm", 96), ("photo", options.images))
        )
        run = RunConfig(
            model=name,
            load_format="dummy",
            device=options.device,
            enable_prefix_caching=False,
            max_model_len=32768,
            job=JobConfig(media_roots=[name]),
        )
        with LLM.from_config(run, note=print) as llm:
            bench = Bench(llm, options.max_tokens)
            print(f"warm: {bench.answer(warm, 'x'):.1f} images/s", flush=True)
            figures: dict[str, float] = {"images": options.images}
            figures["images_per_second"] = bench.answer(photos, "a")
            figures |= {"parent_bytes": peak_resident_bytes(), "most_pixel_bytes": bench.most_pixel_bytes}
            held, figures["prepared_per_second"] = bench.prepare(photos)
            figures["gpu_per_second"] = bench.answer(photos, "b")
            del held
            figures["again_per_second"] = bench.answer(photos, "c")
    print(json.dumps(figures, indent=1))
    if options.result is not None:
        options.result.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
