#!/usr/bin/env python3
"""Images a second with made-up weights: preparing alone, the GPU alone, and both together.

    python3 scripts/bench_images.py qwen3-vl-8b|qwen2.5-vl-7b [--images 2000] [--size 1024x768] [--max-tokens 64]
        [--device cuda] [--result FILE.json]

Rows have one image each (JPEG), behind a text of their own so that nothing is found in the prefix cache. One `LLM`
answers them twice: while it prepares the images, and with the images prepared before, which leaves the GPU's part.
Before that a few rows compile kernels and capture graphs. Memory is the most that this process, which is the parent,
had resident in the first pass, and beside it the most that all pixels took at a time.
"""

from __future__ import annotations

import argparse
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
from nvcli.tools.bench.made_up_images import make_photo
from nvcli.tools.bench.shapes import SHAPES, write_shape

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
    write_shape(shape, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_token_id": vocab["<|image_pad|>"], "eos_token_id": vocab["<|end|>"]}
    (folder / "config.json").write_text(json.dumps(config))


def write_photo(path: Path, size: tuple[int, int], seed: int) -> None:
    path.write_bytes(make_photo(np.random.default_rng(seed), size))


def write_photos(folder: Path, kind: str, count: int, size: tuple[int, int]) -> list[str]:
    """Write photos, and return their paths."""
    paths = [folder / f"{kind}{number}.jpg" for number in range(count)]
    seeds = range(zlib.crc32(kind.encode()), 1 << 40)
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_photo, paths, [size] * count, seeds, chunksize=8))
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
    parser.add_argument("shape", choices=[name for name, config in SHAPES.items() if "vision_config" in config])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", default="1024x768", help="width x height")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="ranks that the text part is cut over")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, options.shape)
        warm, photos = (
            write_photos(folder, kind, count, (width, height))
            for kind, count in (("warm", 64), ("photo", options.images))
        )
        run = RunConfig(
            model=name,
            load_format="dummy",
            device=options.device,
            tensor_parallel_size=options.tp,
            enable_prefix_caching=False,
            max_model_len=32768,
            job=JobConfig(media_roots=[name]),
        )
        with LLM.from_config(run, note=print) as llm:
            bench = Bench(llm, options.max_tokens)
            print(f"warm: {bench.answer(warm, 'x'):.1f} images/s", flush=True)
            figures: dict[str, float] = {"images": options.images}

            def take(**more: float) -> None:
                figures.update(more)
                print(", ".join(f"{key} {value:,.1f}" for key, value in more.items()), flush=True)
                if options.result is not None:
                    options.result.write_text(json.dumps(figures, indent=1) + "\n")

            take(images_per_second=bench.answer(photos, "a"))
            take(parent_bytes=peak_resident_bytes(), most_pixel_bytes=bench.most_pixel_bytes)
            held, rate = bench.prepare(photos)
            take(prepared_per_second=rate)
            take(gpu_per_second=bench.answer(photos, "b"))
            del held


if __name__ == "__main__":
    main()
