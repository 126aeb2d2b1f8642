"""Which sizes of steps are captured as CUDA graphs. Torch-free: memory plans count them too."""

from __future__ import annotations

_MIXED_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Prompt tokens of captured mixed steps. A larger step keeps the GPU busy for longer than its launches take."""


def mixed_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Ascending numbers of prompt tokens, each beside `max_num_seqs` decode rows."""
    if max_num_seqs == 1:  # no prompt is beside a decode row
        return []
    return [size for size in _MIXED_TOKENS if max_num_seqs + size <= max_num_batched_tokens]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Ascending batch sizes to capture: padding costs at most a quarter, and the last is `max_num_seqs` itself."""
    sizes = [1, 2, 4, 8]
    step = 8
    while sizes[-1] < max_num_seqs:
        step = max(step, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def most_captured_tokens(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Of the largest step that is captured, padding included."""
    return max_num_seqs + max(mixed_sizes(max_num_seqs, max_num_batched_tokens), default=0)
