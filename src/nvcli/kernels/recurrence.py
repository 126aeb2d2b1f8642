"""The order in which a step's rows are computed in a recurrent layer, whatever its rule: in plain torch, the reference
of the Triton kernels in `kernels/triton/recurrent`.

Shapes: T tokens, R rows, N tokens of one row, Hv value heads, Dk and Dv the sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.advance_states import advance_states
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrent_types import RecurrentHeads
from nvcli.kernels.state_rows import StateRows


class RecurrentInputs(NamedTuple):
    """The inputs of a rule, float32."""

    q: Tensor
    """[T, Hv, Dk]."""
    k: Tensor
    """[T, Hv, Dk]."""
    v: Tensor
    """[T, Hv, Dv]."""
    decay: Tensor
    """[T, Hv], logarithms; [T, Hv, Dk] where each row of a state has its own; [T, Hv, Dv] step sizes in a scan by
    channels."""
    factor: Tensor
    """[T, Hv] or, in a scan by channels, [T, Hv, Dv]: the factor of what a token writes."""

    def part(self, tokens: slice) -> RecurrentInputs:
        return RecurrentInputs(*(tensor[tokens] for tensor in self))


StepRule = Callable[[RecurrentInputs, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Computes one token of each of R rows from their states [R, Hv, Dk, Dv]: its results [R, Hv, Dv], the states after it,
and what it writes along its key [R, Hv, Dv]."""
ChunkRule = Callable[[RecurrentInputs, Tensor], tuple[Tensor, Tensor]]
"""Computes N tokens of one row from its state [Hv, Dk, Dv]: their results [N, Hv, Dv], and the state after them."""


def split_heads(qkv: Tensor, heads: RecurrentHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Split the queries, keys and values of all heads, [T, heads.num_channels], in float32: [T, Hk, Dk] twice, and
    [T, Hv, Dv]."""
    key_size = heads.num_key_heads * heads.key_dim
    sizes = [key_size, key_size, heads.num_value_heads * heads.value_dim]
    q, k, v = torch.split(qkv.float(), sizes, dim=1)
    return q.view(len(q), -1, heads.key_dim), k.view(len(k), -1, heads.key_dim), v.view(len(v), -1, heads.value_dim)


def of_value_heads(x: Tensor, heads: RecurrentHeads) -> Tensor:
    """Repeat each key head for the value heads that use it: [T, Hk, Dk] → [T, Hv, Dk]. Value head h uses key head
    h // (Hv / Hk)."""
    return x.repeat_interleave(heads.num_value_heads // heads.num_key_heads, dim=1)


def compute_rows(
    qkv: Tensor,
    inputs: RecurrentInputs,
    pool: Tensor,
    rows: StateRows,
    heads: RecurrentHeads,
    kept: KeptInputs | None,
    step: StepRule,
    chunks: ChunkRule,
) -> Tensor:
    """Compute a step's tokens by a rule, and store the states after them.

    qkv: [T, heads.num_channels], from which `inputs` come; pool: [num_blocks, Hv, Dk, Dv] float32, the state of each
    block, written → [T, Hv, Dv] like qkv. Tokens that belong to no row get zeros. The states of rows with drafts take
    in what is pending, and not the step's tokens; what these would write goes to `kept`, which only these rows need.
    """
    num_single = rows.num_single_rows
    out = torch.zeros(len(qkv), heads.num_value_heads, heads.value_dim, dtype=qkv.dtype, device=qkv.device)
    if num_single:
        sources = rows.sources()[:num_single]
        state = torch.where((sources > 0)[:, None, None, None], pool[sources], 0.0)
        single = slice(0, num_single)
        out[single], state, _ = step(inputs.part(single), state)
        pool[rows.targets()] = state
    if rows.num_draft_rows:
        assert kept is not None
        assert rows.pending is not None
        earlier = rows.pending.earlier[: rows.num_draft_rows]
        of_layer = KeptInputs(*(tensor.unsqueeze(0) for tensor in kept))
        chosen, has_unit_keys = earlier[earlier >= 0], heads.rule == "delta"
        advance_states(of_layer, pool.unsqueeze(0), rows.pending, chosen, has_unit_keys=has_unit_keys)
        num_tokens, offset = int(rows.query_start_loc[rows.num_draft_rows]), int(rows.pending.turn) * len(kept.inputs)
        key_size, own = heads.num_key_heads * heads.key_dim, slice(offset, offset + num_tokens)
        kept.keys[own] = qkv[:num_tokens, key_size : 2 * key_size]
        kept.decay[own] = inputs.decay[:num_tokens].view_as(kept.decay[own])
        targets = torch.where(earlier >= 0, rows.pending.targets[earlier], 0).tolist()
        for target, (first, end, source) in zip(targets, rows.draft_spans(), strict=True):
            source = target or source
            state = torch.zeros_like(pool[:1]) if source is None else pool[source : source + 1]
            for token in range(first, end):
                one = slice(token, token + 1)
                out[one], state, written = step(inputs.part(one), state)
                kept.written[offset + token] = written[0]
    state = torch.zeros_like(pool[0])
    for start, end, begins_row, source, target in rows.spans():
        if begins_row:
            state = torch.zeros_like(pool[0]) if source is None else pool[source]
        part = slice(start, end)
        out[part], state = chunks(inputs.part(part), state)
        if target:
            pool[target] = state
    return out
