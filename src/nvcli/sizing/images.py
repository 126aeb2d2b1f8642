"""Sizes of what a rank needs to read images: the embeddings that are kept, and the batches of the tower."""

from __future__ import annotations

from nvcli.core.engine_config import EngineConfig
from nvcli.models.tensor_spec import DTYPE_BYTES
from nvcli.models.vision.vision_config import VisionConfig

_KEPT_TOKENS, _KEPT_SHARE = 8192, 256
"""The most tokens of images whose embeddings are kept, and the most of the device's memory that they take, as its
`_KEPT_SHARE`th part."""
_BATCH_TOKENS = 4096
"""Tokens of the images that the tower computes together; a larger image goes alone."""
_COLUMNS = 128
"""Tokens in a row of an image that is made up."""


def kept_image_bytes(config: EngineConfig, vision: VisionConfig, total: int) -> int:
    """Return the most bytes of embeddings that a rank keeps for later steps, on a device of `total` bytes. Those of an
    image that ends in a later step are computed again if they were not kept."""
    tokens = min(_KEPT_TOKENS, config.max_num_seqs * config.max_image_tokens)
    return min(tokens * _token_bytes(config, vision), total // _KEPT_SHARE)


def image_buffer_bytes(config: EngineConfig, vision: VisionConfig, total: int) -> int:
    """Return the most bytes of embeddings on a device of `total` bytes: those that are kept, and those of a step,
    which a head that drafts may read, too."""
    of_head = vision.out_size * DTYPE_BYTES[config.dtype] if config.draft_head is not None else 0
    of_step = config.max_num_batched_tokens * (_token_bytes(config, vision) + of_head)
    return kept_image_bytes(config, vision, total) + of_step


def _token_bytes(config: EngineConfig, vision: VisionConfig) -> int:
    return vision.num_outputs * vision.out_size * DTYPE_BYTES[config.dtype]


def tower_batch_tokens(config: EngineConfig, vision: VisionConfig) -> int:
    """Return the most tokens of the images that the tower computes together, and of one image: their patches, where
    latents read these."""
    return max(_BATCH_TOKENS, config.max_image_tokens if vision.merger.latents is None else vision.num_positions)


def largest_tower_batch(vision: VisionConfig, num_tokens: int) -> list[tuple[int, int]]:
    """Return the rows and columns of tokens of images that have `num_tokens` together: one, if it has no tiles and the
    tower has positions for it."""
    if tile := vision.tile_tokens:
        return [(max(1, num_tokens // tile**2) * tile, tile)]
    if vision.encoder is not None:
        side = vision.encoder.sides[-1]
        return [(side, side)] * max(1, num_tokens // side**2)
    longest = vision.longest_side or num_tokens
    columns = min(_COLUMNS, longest, num_tokens)
    rows = num_tokens // columns
    return [(min(longest, rows - first), columns) for first in range(0, rows, longest)]


def tower_bytes(config: EngineConfig, vision: VisionConfig) -> int:
    """Return what the tower takes besides its weights, at its peak: in its layers or where the patches are cut, always
    beside the patches and the results of its mergers."""
    patches = tower_batch_tokens(config, vision) * vision.merge_size**2
    clamped = 2 * vision.has_bounds * vision.hidden_size
    in_mlp = (1 + 2 * vision.is_gated) * vision.intermediate_size + clamped
    in_attention = 6 * vision.hidden_size  # projections, and their copies where no kernel takes them as they are
    if vision.distance_window:
        most = vision.distance_side(is_whole=True) * vision.num_heads  # numbers that say where patches are
        in_attention = 9 * vision.hidden_size + 5 * most
    if vision.conv_layers:
        in_attention = 9 * vision.hidden_size  # gates and values, and sums in float32 with what is added to them
    in_merger = 3 * vision.merger.size // vision.merge_size**2 if vision.merger.kind in ("table", "latents") else 0
    results = vision.num_outputs * vision.out_size // vision.merge_size**2
    kept = vision.patch_values + 4 * vision.hidden_size + results
    size = DTYPE_BYTES[config.dtype]
    cut = vision.patch_values * (size + 4 / max(1, vision.temporal_patch_size))
    ranks = config.tensor_parallel_size
    gathered = 0 if ranks == 1 else (2 + ranks) * results * size  # own ones, their copy, and those of all ranks
    return patches * int(max((kept + max(in_mlp, in_attention, in_merger)) * size, cut, gathered))
