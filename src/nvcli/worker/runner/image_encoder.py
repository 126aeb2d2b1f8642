"""ImageEncoder: computes the embeddings of images by the tower, and keeps them while rows that need them are near.

Every rank of a stage has the whole tower. Each computes the embeddings of its part of a step's images, and all gather
them: cutting the tower's layers would take two sums over the ranks in each, and its heads do not always divide.

Embeddings are kept by the digest of the image, the least recently used are dropped. The pixels stay in the parent's
memory until the request has ended, so that an image can be computed again at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest

import torch
from torch import Tensor

from nvcli.core.engine_config import EngineConfig
from nvcli.core.lru_cache import LruCache
from nvcli.core.prompt_image import PromptImage
from nvcli.core.system.pixel_file import PixelFile
from nvcli.models.vision.image_processor import read_processor
from nvcli.models.vision.tower import VisionTower
from nvcli.sizing.images import kept_image_bytes, largest_tower_batch, tower_batch_tokens
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.memory import device_bytes

_MOST_FILES = 4
"""Memories that are kept open, of runs that use the rank one after the other."""


class ImageEncoder:
    """The tower of a stage's ranks, and the embeddings that each of them keeps."""

    def __init__(
        self, config: EngineConfig, tower: VisionTower, group: TensorParallelGroup, device: torch.device
    ) -> None:
        """Raises LoadError."""
        self._tower, self._group, self._device = tower, group, device
        self._processor = read_processor(config.model_path, tower.config)
        self._dtype = tower.patch_embed.weight.dtype
        self._batch_tokens = tower_batch_tokens(config, tower.config)
        """The most tokens, or patches that latents read, of the images that the tower computes together, and of one
        image."""
        most_kept_bytes = group.min(kept_image_bytes(config, tower.config, device_bytes(device)))  # alike on all ranks
        self._kept = LruCache[bytes, Tensor](most_kept_bytes, lambda _, embeddings: embeddings.nbytes)
        """Digest → embeddings of an image's tokens."""
        self._files: dict[str, PixelFile] = {}
        """The parent's memories that hold pixels."""

    def embeddings(self, images: Iterable[PromptImage]) -> Mapping[bytes, Tensor]:
        """Return the embeddings of images by digest, [N, outputs × O] each, and keep them. All ranks ask for the same
        ones."""
        wanted = {image.key: image for image in images}
        found = {key: kept for key in wanted if (kept := self._kept.get(key)) is not None}
        missing = [image for key, image in wanted.items() if key not in found]
        for batches in zip_longest(*(self._batches(share) for share in self._shares(missing)), fillvalue=[]):
            for image, output in self._computed(batches):
                found[image.key] = output
        for image in missing:
            self._kept.put(image.key, found[image.key])
        return found

    def forget(self) -> None:
        """Drop all embeddings, which another tower would not give."""
        self._kept.clear()

    def run_largest(self) -> None:
        """Run the tower over the largest batch on a GPU, so that its memory is measured; on a CPU over the smallest
        image."""
        vision, device = self._tower.config, self._device
        side, sizes = vision.token_pixels, [(vision.smallest_side, vision.smallest_side)]
        if device.type != "cpu":
            sizes = largest_tower_batch(vision, self._batch_tokens)
        images = [
            torch.zeros(rows * side, columns * side, 3, dtype=torch.uint8, device=device) for rows, columns in sizes
        ]
        counts = [vision.num_tokens(*size) for size in sizes]
        self._of_all_ranks(self._tower(images, self._processor), [counts] * self._group.size)

    def _shares(self, images: Iterable[PromptImage]) -> list[list[PromptImage]]:
        """Divide images among the ranks, so that each computes about as many tokens."""
        shares: list[list[PromptImage]] = [[] for _ in range(self._group.size)]
        for image in sorted(images, key=_size, reverse=True):
            min(shares, key=lambda share: sum(map(_size, share))).append(image)
        return shares

    def _batches(self, images: Iterable[PromptImage]) -> Iterator[list[PromptImage]]:
        """Split images into batches of the tower."""
        batch: list[PromptImage] = []
        num_tokens = 0
        for image in images:
            size = _size(image)
            if batch and num_tokens + size > self._batch_tokens:
                yield batch
                batch, num_tokens = [], 0
            batch.append(image)
            num_tokens += size
        if batch:
            yield batch

    def _computed(self, batches: Sequence[Sequence[PromptImage]]) -> Iterator[tuple[PromptImage, Tensor]]:
        """Compute a batch of each rank, and yield the images of all with their embeddings."""
        own = batches[self._group.rank]
        outputs: Sequence[Tensor] = []
        if any(image.tiles is not None for image in own):
            outputs = [self._in_rows(image) for image in own]
        elif own:
            outputs = self._tower([self._read(image) for image in own], self._processor)
        found = self._of_all_ranks(outputs, [list(map(_num_tokens, batch)) for batch in batches])
        for image, output in zip(chain(*batches), found, strict=True):
            # a view would keep the embeddings of the whole batch.
            is_part = output.untyped_storage().nbytes() > output.nbytes
            yield image, output.clone() if is_part else output

    def _in_rows(self, image: PromptImage) -> Tensor:
        """Compute an image whose tiles are many for one batch, and whose tokens stand with vectors between them."""
        assert image.tiles is not None
        vision = self._tower.config
        most = max(1, self._batch_tokens // vision.tile_tokens**2) * vision.tile_pixels
        parts = [self._tower([part], self._processor)[0] for part in torch.split(self._read(image), most)]
        return self._tower.in_rows(torch.cat(parts), image.tiles)

    def _of_all_ranks(self, outputs: Sequence[Tensor], sizes: Sequence[list[int]]) -> Sequence[Tensor]:
        """Gather what the ranks computed, whose images have these numbers of tokens by rank: [N, outputs × O] each."""
        if self._group.size == 1:
            return outputs
        vision, counts = self._tower.config, [sum(size) for size in sizes]
        own = torch.empty(max(counts), vision.num_outputs * vision.out_size, dtype=self._dtype, device=self._device)
        if outputs:
            torch.cat([*outputs], out=own[: counts[self._group.rank]])
        ranks = self._group.all_gather(own).unbind()
        return [
            output
            for rows, count, size in zip(ranks, counts, sizes, strict=True)
            for output in torch.split(rows[:count], size)
        ]

    def _read(self, image: PromptImage) -> Tensor:
        """Copy the pixels of an image to the device: [height, width, 3] uint8."""
        file = self._files.get(image.file)
        if file is None:
            if len(self._files) == _MOST_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[image.file] = PixelFile(image.file)
        side, device = self._tower.config.token_pixels, self._device
        rows, columns = image.rows, image.columns - self._tower.config.has_row_ends
        if image.patches is not None:
            rows, columns = image.patches
        if image.tiles is not None:
            columns = self._tower.config.tile_tokens
            rows = (image.tiles.rows * image.tiles.columns + 1) * columns
        pixels = torch.empty(rows * side, columns * side, 3, dtype=torch.uint8, pin_memory=device.type == "cuda")
        file.read(pixels.numpy().data.cast("B"), image.offset)
        return pixels.to(device, non_blocking=True)  # whose allocator keeps the host's memory until it is read


def _num_tokens(image: PromptImage) -> int:
    return image.num_tokens


def _size(image: PromptImage) -> int:
    """Return the tokens that the tower computes for an image, or the patches that latents read."""
    return image.num_tokens if image.patches is None else math.prod(image.patches)
