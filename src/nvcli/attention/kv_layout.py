"""How keys, values and states lie in a block, and how many bytes keys and values take. Torch-free.

A layer has two equal parts of each of its blocks: one for keys, one for values; it has one if values are a part of the
keys. In FP8 (e4m3) a part ends with the scales of its numbers, one for each token and head, so that a block and its
scales are one thing.
"""

from __future__ import annotations

from typing import Literal

from nvcli.kernels.whole_numbers import round_up

KVDtype = Literal["float32", "bfloat16", "float16", "fp8"]
"""The types in which keys and values are kept."""
KV_DTYPE_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one element."""
SCALE_BYTES = 2
"""A scale is a bfloat16 number. Numbers are divided by the scale as it is stored, so nothing is lost by its
rounding."""
_PART_ALIGNMENT = 128
"""Bytes: each part with scales takes a multiple of it, so that keys lie where they can be read fast."""
STATE_ALIGNMENT = 128
"""Bytes: each layer's state takes a multiple of it, so that float32 numbers lie where they can be read fast."""
SCRATCH_UNIT = 64
"""Tokens of a unit of a prefill scratch."""
_LEAST_SCRATCH_TOKENS = 65_536
_MOST_SCRATCH_TOKENS = 262_144
_MOST_PROJECTED_BYTES = 1 << 30
"""The most bytes that a longest request may take of a scratch of projected latents."""


def part_bytes(block_size: int, num_kv_heads: int, head_dim: int, dtype: KVDtype) -> int:
    """The bytes of one layer's keys in a block, scales included. Values that are kept apart take as many."""
    size = block_size * token_bytes(num_kv_heads, head_dim, dtype)
    return size if dtype != "fp8" else round_up(size, _PART_ALIGNMENT)


def token_bytes(num_kv_heads: int, head_dim: int, dtype: KVDtype) -> int:
    """The bytes of one token's keys in one layer, scales included. Values that are kept apart take as many."""
    scale = SCALE_BYTES if dtype == "fp8" else 0
    return num_kv_heads * (head_dim * KV_DTYPE_BYTES[dtype] + scale)


def projected_scratch_tokens(
    max_model_len: int, max_num_batched_tokens: int, row_bytes: int, top_k: int | None = None
) -> int:
    """The tokens that a scratch of projected latents (`kernels/triton/attention/projected_prefill.py`) has room for, a
    multiple of the unit: a step's own and a longest request, up to a size. `row_bytes`: those of a token; `top_k`:
    requests with more keys never attend to projected latents (None: all may)."""
    most = min(max_model_len, top_k or max_model_len, _MOST_PROJECTED_BYTES // row_bytes)
    return round_up(max_num_batched_tokens + most, SCRATCH_UNIT)


def scratch_tokens(max_model_len: int, max_num_seqs: int) -> int:
    """The tokens that a prefill scratch (`kernels/triton/attention/prefill_scratch.py`) has room for, a multiple of
    the unit.

    A step's chunks rarely see more together than the minimum, 256 MiB for the 8 KV heads of Qwen3-8B, except where
    requests are longer; then a longest one fits, up to a limit. Longer ones are attended more slowly.
    """
    most = round_up(max_model_len, SCRATCH_UNIT)
    return min(max(_LEAST_SCRATCH_TOKENS, min(most, _MOST_SCRATCH_TOKENS)), max_num_seqs * most)
