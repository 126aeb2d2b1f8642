"""Attention both ways among the tokens of an image, beside any backend.

Backends attend causally. Where the tokens of an image attend to all of it, their results are computed here in plain
torch, from the cache, and take the place of the backend's. A chunk does not end inside such an image, so all its keys
are in the cache; it may begin inside, after a prefix that was found there. Images with equally many tokens are
attended together. All of this is laid out once a step for each window and KV group.

Shapes: n images, t tokens of each, L keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.image_tokens import ImageGroup
from nvcli.attention.spec import first_seen
from nvcli.attention.torch_backend import read_blocks, softmax_attention
from nvcli.kernels.whole_numbers import ceil_div

_MOST_KEYS = 16_384
"""The most keys that are read together; an image that has more is attended by itself."""
_MOST_SCORES = 1 << 22
"""The most scores of a head that are computed together, likewise: those of 16,384 keys and 256 tokens, as images have,
while prompts that are attended both ways have thousands."""

Kind = tuple[int | None, int]
"""The window and the KV group of a layer."""


@dataclass(frozen=True, slots=True)
class WholeImage:
    """Tokens of an image in a batch that attend to all of the image's, those after them included."""

    first_row: int
    """The first of their rows in the batch's tokens, which follow each other."""
    num_tokens: int
    request: int
    """The row of their request in the batch."""
    position: int
    """The position of the first of them in the request."""

    @property
    def end(self) -> int:
        """The position after the image's last token."""
        return self.position + self.num_tokens


def plan_both_ways(
    images: Sequence[WholeImage], kinds: Iterable[Kind], batch: ForwardBatch
) -> Mapping[Kind, tuple[ImageGroup, ...]]:
    """Lay out the images of a batch for the layers of each kind."""
    return {kind: tuple(_groups(images, kind, batch)) for kind in dict.fromkeys(kinds)}


def attend_both_ways(
    layer: AttentionLayer, q: Tensor, groups: Sequence[ImageGroup], batch: ForwardBatch, out: Tensor
) -> None:
    """Write the results of the tokens of images to their rows of `out` [T, num_heads, D]. A token sees the keys of its
    request up to its image's end, or, with a window, only keys within it. The arguments are those of
    `AttentionBackend.forward`."""
    spec, number, sinks, bias = layer
    assert bias is None, "no family has one"
    num_kv_heads = spec.num_kv_heads
    size = spec.num_heads // num_kv_heads
    for group in groups:
        count, _, num_tokens, num_keys = group.mask.shape
        keys, values = (
            part.view(count, num_keys, *part.shape[1:])
            .masked_fill_(group.is_behind[:, :, None, None], 0)
            .transpose(1, 2)
            .reshape(count * num_kv_heads, 1, num_keys, -1)
            .expand(-1, size, -1, -1)
            for part in read_blocks(batch.kv_cache, number, group.block_ids, q.dtype)
        )
        own = q[group.rows].view(count, num_tokens, num_kv_heads, size, -1)
        own = own.permute(0, 2, 3, 1, 4).flatten(0, 1)  # [n × KV heads, heads of each, t, D]
        mask = group.mask.expand(-1, num_kv_heads, -1, -1).reshape(-1, 1, num_tokens, num_keys).expand(-1, size, -1, -1)
        sums = None if sinks is None else sinks.view(num_kv_heads, size, 1, 1).repeat(count, 1, 1, 1)
        found = softmax_attention(spec, own, keys, values, mask=mask, is_causal=False, sinks=sums)
        found = found.view(count, num_kv_heads, size, num_tokens, -1).permute(0, 3, 1, 2, 4)
        out[group.rows] = found.reshape(count * num_tokens, num_kv_heads * size, -1)


def _groups(images: Sequence[WholeImage], kind: Kind, batch: ForwardBatch) -> Iterator[ImageGroup]:
    """Group images with equally many tokens, as long as their keys can be read together, beginning with those that have
    few keys."""
    window, kv_group = kind
    block_size = batch.kv_cache.spec.block_size

    def num_blocks(image: WholeImage) -> int:
        return ceil_div(image.end, block_size) - first_seen(image.position, window) // block_size

    together: list[WholeImage] = []
    for image in sorted(images, key=lambda each: (each.num_tokens, num_blocks(each))):
        keys = (len(together) + 1) * num_blocks(image) * block_size
        is_too_much = keys > _MOST_KEYS or keys * image.num_tokens > _MOST_SCORES
        if together and (is_too_much or together[0].num_tokens != image.num_tokens):
            yield _group(together, window, kv_group, num_blocks(together[-1]), batch)
            together = []
        together.append(image)
    if together:
        yield _group(together, window, kv_group, num_blocks(together[-1]), batch)


def _group(
    images: Sequence[WholeImage], window: int | None, kv_group: int, num_blocks: int, batch: ForwardBatch
) -> ImageGroup:
    device, block_size = batch.positions.device, batch.kv_cache.spec.block_size
    firsts = np.array([first_seen(image.position, window) // block_size for image in images])
    numbers = np.array([[image.first_row, image.request, image.position, image.end] for image in images])
    rows, requests, positions, ends, blocks = (
        torch.from_numpy(column).to(device, non_blocking=True)
        for column in (*numbers.T.astype(np.int64), firsts.astype(np.int64))
    )
    tables = batch.block_tables[kv_group]
    columns = (blocks[:, None] + torch.arange(num_blocks, device=device)).clamp_(max=tables.shape[1] - 1)
    tokens = torch.arange(images[0].num_tokens, device=device)
    key = (blocks * block_size)[:, None] + torch.arange(num_blocks * block_size, device=device)  # [n, L]
    is_behind = key >= ends[:, None]
    hidden = is_behind[:, None].expand(-1, len(tokens), -1)
    if window is not None:
        hidden = hidden | (key[:, None] <= (positions[:, None] + tokens)[:, :, None] - window)
    mask = torch.zeros(hidden.shape, dtype=batch.kv_cache.spec.dtype, device=device)
    return ImageGroup(
        rows=(rows[:, None] + tokens).flatten(),
        block_ids=tables[batch.slots[requests][:, None], columns].long().flatten(),
        is_behind=is_behind,
        mask=mask.masked_fill_(hidden, float("-inf"))[:, None],
    )
