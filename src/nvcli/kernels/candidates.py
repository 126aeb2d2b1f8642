"""Top-k over a vocabulary that is cut into shards: each rank lists the tokens of its shard that a small top-k may keep,
and from the lists of all ranks every rank chooses the same token that one rank chooses from the whole vocabulary.

A list is exact in little room, however many logits are equal: fewer than k tokens are above the shard's k-th largest
logit, and of those that are equal to it only their number and the best one matter, since they are kept or dropped
together.

Shapes: N rows, M tokens of a shard, R ranks. CUDA tensors take the Triton kernels, others the plain torch below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.core.messages import NOT_FINITE
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.philox import uniforms_at
from nvcli.kernels.sampling import min_kept_scaled, noisy_scores, pack, packed_argmax, unpack_argmax
from nvcli.kernels.sampling_columns import INFINITE_SCORE, LIST_WIDTH, MAX_CANDIDATES, SamplingColumns


@with_kernel("sampling.sampling")
def shard_candidates(
    logits: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor, *, start: int
) -> tuple[Tensor, Tensor]:
    """Make one rank's part of each row's choice: (packed [N] int64, lists [N, LIST_WIDTH] int32).

    `packed` is the result of `packed_argmax`; it is used for rows without a small top-k, and the list for rows with
    one. Of those `packed` says whether the shard has a NaN or +inf, by the score +inf; then the list means nothing. The
    arguments are those of `packed_argmax`.
    """
    packed = packed_argmax(logits, columns, slots, positions, start=start)
    columns, last = columns.at(slots), MAX_CANDIDATES - 1
    scores = noisy_scores(logits.float(), columns, positions, start=start)
    padding = (0, MAX_CANDIDATES)  # every row has a k-th largest
    values = torch.nn.functional.pad(logits.float(), padding, value=-torch.inf)
    scores = torch.nn.functional.pad(scores, padding, value=-torch.inf)
    descending, tokens = values.sort(dim=-1, descending=True)
    kth = descending.gather(1, columns.top_k.long().clamp(1, MAX_CANDIDATES)[:, None] - 1)
    is_tie = (values == kth) & (kth > -torch.inf)
    lists = torch.zeros(len(logits), LIST_WIDTH, dtype=torch.int32)
    listed = lists[:, :MAX_CANDIDATES].view(torch.float32)
    listed[:, :last] = torch.where(descending > kth, descending, -torch.inf)[:, :last]
    listed[:, last:] = kth
    lists[:, MAX_CANDIDATES : 2 * MAX_CANDIDATES] = tokens[:, :MAX_CANDIDATES] + start
    lists[:, 2 * MAX_CANDIDATES - 1] = start + scores.masked_fill(~is_tie, -torch.inf).argmax(dim=-1)
    lists[:, -1] = is_tie.sum(dim=-1)
    return packed, lists


@with_kernel("sampling.candidates")
def choose_candidates(
    packed: Tensor, lists: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor
) -> Tensor:
    """Choose the tokens that `sample` chooses from the whole vocabulary: [N] int32.

    packed: [N] int64, the largest of all ranks; lists: [R, N, LIST_WIDTH] int32, those of all ranks. Rows without a
    small top-k take their token from `packed`, and must have no limits. The result is `NOT_FINITE` where that of
    `sample` is.
    """
    columns = columns.at(slots)
    by_row = lists.transpose(0, 1)
    values = by_row[:, :, :MAX_CANDIDATES].contiguous().view(torch.float32)
    counts = torch.ones_like(values)
    counts[:, :, -1] = by_row[:, :, -1].float()
    values, counts = values.flatten(1), counts.flatten(1)
    tokens = by_row[:, :, MAX_CANDIDATES : 2 * MAX_CANDIDATES].flatten(1).long()
    scaled = values / torch.where(columns.temperature > 0, columns.temperature, 1.0)[:, None]
    min_kept = min_kept_scaled(scaled, columns.top_k, columns.top_p, columns.min_p, counts)
    uniforms = uniforms_at(columns.seed, positions.long(), columns.row, columns.sample, tokens)
    scores = scaled + uniforms.log_().neg_().log_().neg_()
    is_kept = (scaled >= min_kept[:, None]) & (scaled > -torch.inf)
    chosen = pack(scores.masked_fill(~is_kept, -torch.inf), tokens.where(is_kept, NOT_FINITE)).amax(dim=-1)
    takes_packed = ~columns.has_small_top_k | (packed >= INFINITE_SCORE << 32)
    return unpack_argmax(torch.where(takes_packed, packed, chosen))
