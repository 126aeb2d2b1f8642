"""Attention both ways among the tokens of an image, beside any backend.

Backends attend causally. Where the tokens of an image attend to all of it, their results are computed here in plain
torch, from the cache, and take the place of the backend's. A chunk does not end inside such an image, so all its keys
are in the cache; it may begin inside, behind a prefix that was found there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.image_tokens import WholeImage
from nvcli.attention.spec import AttentionSpec, first_seen
from nvcli.attention.torch_backend import attend_tokens, read_blocks


def attend_both_ways(
    spec: AttentionSpec,
    layer: int,
    q: Tensor,
    images: Sequence[WholeImage],
    batch: ForwardBatch,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write the results of the tokens of images to their rows of `out` [T, num_heads, D]. A token sees the keys of its
    request up to its image's end, with a window only those that are less than the window before it.

    The arguments are those of `AttentionBackend.forward`."""
    block_size = batch.kv_cache.spec.block_size
    for image in images:
        rows = slice(image.first_row, image.first_row + image.num_tokens)
        first_block = first_seen(image.position, spec.window) // block_size
        columns = slice(first_block, -(-image.end // block_size))
        block_ids = batch.block_tables[spec.kv_group, batch.slots[image.request], columns].long()
        num_keys = image.end - first_block * block_size
        keys, values = (part[:num_keys] for part in read_blocks(batch.kv_cache, layer, block_ids, q.dtype))
        mask = _window_mask(spec, image, first_block * block_size, q)
        out[rows] = attend_tokens(spec, q[rows], keys, values, mask=mask, is_causal=False, sinks=sinks)


def _window_mask(spec: AttentionSpec, image: WholeImage, first_key: int, q: Tensor) -> Tensor | None:
    """Return the mask of an image's tokens [n, m] for keys from the position `first_key` on; None: they see all."""
    if spec.window is None or first_seen(image.end - 1, spec.window) <= first_key:
        return None
    own = torch.arange(image.position, image.end, device=q.device).unsqueeze(1)
    key = torch.arange(first_key, image.end, device=q.device)
    mask = torch.zeros(len(own), len(key), dtype=q.dtype, device=q.device)
    return mask.masked_fill_(key <= own - spec.window, float("-inf"))
