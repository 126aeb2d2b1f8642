"""Changes to logits before a token is chosen: penalties for tokens that came up, biases, and stop ids that are
forbidden while an answer is too short.

Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it.
Shapes: N rows of logits; n of them with changes; V vocabulary; S slots, L tokens of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.core.messages import FORBIDDEN
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.sampling import apply_penalties
from nvcli.kernels.sampling_columns import LogitChanges


@with_kernel("sampling.logit_changes")
def forbid_tokens(logits: Tensor, changes: LogitChanges, slots: Tensor, positions: Tensor, *, start: int = 0) -> None:
    """Lower the logits of the tokens that `LogitChanges.num_forbidden` says, in place: those of stop ids to -inf while
    an answer is too short, the others to `FORBIDDEN`. Doing it once more changes nothing.

    logits: [N, M] of any type, the tokens from `start` on; slots, positions: as in `change_logits`. On CUDA nothing
    waits for the device, so that a CUDA graph can hold it.
    """
    counts = changes.num_forbidden[slots][:, None]
    most = int(counts.max())
    if not most:
        return
    ids, values = changes.entry_ids[slots, :most].long() - start, changes.entry_values[slots, :most]
    is_too_short = (positions < changes.min_len[slots])[:, None]
    is_forbidden = (torch.arange(most) < counts) & ((values > -torch.inf) | is_too_short)
    is_forbidden &= (ids >= 0) & (ids < logits.shape[1])
    values = torch.where(values > -torch.inf, lowest_logit(logits.dtype), values)
    values = torch.where(is_forbidden, values, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(is_forbidden, ids, 0), values, "amin")


def lowest_logit(dtype: torch.dtype) -> float:
    """Return `FORBIDDEN`, or the lowest number of a type that cannot hold it."""
    return max(FORBIDDEN, torch.finfo(dtype).min)


@with_kernel("sampling.logit_changes")
def change_logits(
    logits: Tensor,
    changes: LogitChanges,
    at: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    *,
    num_penalised: int,
    num_entries: int,
) -> None:
    """Make the changes of some rows of logits [N, V] float32, in place; rows may lie apart.

    at: [n] int32, the numbers of these rows, none twice, first the `num_penalised` of them that have penalties; slots:
    [N] int64, the slot of each row; positions: [N] int32, of the tokens to be chosen; token_ids: [S, L] int32, the
    tokens of each slot, of which those before its position count; num_entries: the most entries that a slot of theirs
    has, and more are not looked at. On CUDA nothing waits for the device.
    """
    rows = at.long()
    if num_penalised:
        penalised = rows[:num_penalised]
        chosen, lengths = slots[penalised], positions[penalised].long()
        logits[penalised] = apply_penalties(
            logits[penalised],
            token_ids=token_ids[chosen, : int(lengths.max())],
            lengths=lengths,
            prompt_lens=changes.prompt_len[chosen],
            presence=changes.presence_penalty[chosen],
            frequency=changes.frequency_penalty[chosen],
            repetition=changes.repetition_penalty[chosen],
        )
    if num_entries:
        chosen = slots[rows]
        values = changes.entry_values[chosen, :num_entries]
        is_too_short = (positions[rows] < changes.min_len[chosen])[:, None]
        values = torch.where((values > -torch.inf) | is_too_short, values, 0.0)
        values = torch.where(values < torch.inf, values, 0.0)
        ids = changes.entry_ids[chosen, :num_entries].long()
        logits.index_put_((rows[:, None].expand_as(ids), ids), values, accumulate=True)
