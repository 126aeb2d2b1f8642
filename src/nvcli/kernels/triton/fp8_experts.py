"""The products of a mixture of experts with weights in FP8: each expert's weight times the rows of its tokens.

Like those of `experts.py` two kernels go over the work list of `expert_groups`: the gate and up projection with the
activation, which gathers its rows of x and writes them sorted by expert, and the down projection, which writes every
pair's result, times the pair's weight, to its own place. Between them one kernel quantises. 128 products at a time are
added up by FP8 units, then in float32; scales by blocks are applied to these sums, scales of rows to the whole.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes
from nvcli.kernels.fp8_types import QuantisedRows
from nvcli.kernels.triton.expert_groups import ITEM_FIELDS, WorkList, group_by_expert
from nvcli.kernels.triton.experts import ExpertLaunch, Launch, activate_gated
from nvcli.kernels.triton.fp8 import quantise
from nvcli.kernels.weight_formats import FP8_BLOCK


def choose_launch(num_pairs: int, num_experts: int) -> ExpertLaunch:
    """The launch for so many pairs. Not measured yet: the sizes follow those of the products of 16 bits."""
    rows = num_pairs / num_experts
    if rows <= 8:
        return ExpertLaunch(16, Launch(32, FP8_BLOCK, 4, 4), Launch(64, FP8_BLOCK, 4, 4))
    if rows <= 32:
        return ExpertLaunch(32, Launch(64, FP8_BLOCK, 3, 4), Launch(64, FP8_BLOCK, 4, 4))
    if rows <= 64:
        return ExpertLaunch(64, Launch(64, FP8_BLOCK, 3, 4), Launch(128, FP8_BLOCK, 3, 4))
    return ExpertLaunch(128, Launch(64, FP8_BLOCK, 3, 8), Launch(128, FP8_BLOCK, 3, 8))


@triton.jit
def _load(ptrs, start, has_row, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Load GROUP columns from `start` on of the rows at `ptrs` [rows, GROUP]; what is missing is 0."""
    mask = has_row[:, None]
    if SIZE % GROUP != 0:
        mask = mask & (start + tl.arange(0, GROUP) < SIZE)[None, :]
    return tl.load(ptrs + start, mask=mask, other=0.0)


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, IN_FEATURES] e4m3
    x_scales_ptr,  # [T] float32, or BY_BLOCKS [T, NUM_GROUPS]
    weight_ptr,  # [E, 2 OUT_FEATURES, IN_FEATURES] e4m3
    weight_scales_ptr,  # [E, 2 OUT_FEATURES] float32, or BY_BLOCKS [E, 2 OUT_FEATURES / GROUP, NUM_GROUPS]
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    out_ptr,  # [T × k, OUT_FEATURES], written, in the order of order_ptr
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (strip of features of an item), the strips of one item after the other."""
    NUM_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    item_ptr = items_ptr + tl.program_id(0) // OUT_TILES * ITEM_FIELDS
    num_rows = tl.load(item_ptr + 2)
    if num_rows == 0:
        return
    expert = tl.load(item_ptr).to(tl.int64)
    first_row = tl.load(item_ptr + 1)
    first_feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    features = first_feature + tl.arange(0, OUT_TILE)
    has_feature = features < OUT_FEATURES
    rows = tl.arange(0, ROW_TILE)
    has_row = rows < num_rows
    tokens = (tl.load(order_ptr + first_row + rows, mask=has_row, other=0) // EXPERTS_PER_TOKEN).to(tl.int64)
    inner = tl.arange(0, GROUP)
    x_ptrs = x_ptr + tokens[:, None] * IN_FEATURES + inner[None, :]
    gate_rows = expert * (2 * OUT_FEATURES) + features
    gate_ptrs = weight_ptr + gate_rows[:, None] * IN_FEATURES + inner[None, :]
    up_ptrs = gate_ptrs + OUT_FEATURES * IN_FEATURES
    gate = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    up = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    if BY_BLOCKS:  # OUT_FEATURES is whole blocks
        gate_scale_ptr = weight_scales_ptr + (expert * (2 * OUT_FEATURES) + first_feature) // GROUP * NUM_GROUPS
        up_scale_ptr = gate_scale_ptr + OUT_FEATURES // GROUP * NUM_GROUPS
        for group in tl.range(0, NUM_GROUPS, num_stages=NUM_STAGES):
            x = _load(x_ptrs, group * GROUP, has_row, IN_FEATURES, GROUP)
            scales = tl.load(x_scales_ptr + tokens * NUM_GROUPS + group, mask=has_row, other=0.0)[:, None]
            gate_weight = _load(gate_ptrs, group * GROUP, has_feature, IN_FEATURES, GROUP)
            gate += tl.dot(x, gate_weight.T) * (scales * tl.load(gate_scale_ptr + group))
            up_weight = _load(up_ptrs, group * GROUP, has_feature, IN_FEATURES, GROUP)
            up += tl.dot(x, up_weight.T) * (scales * tl.load(up_scale_ptr + group))
    else:
        for group in tl.range(0, NUM_GROUPS, num_stages=NUM_STAGES):
            x = _load(x_ptrs, group * GROUP, has_row, IN_FEATURES, GROUP)
            gate_weight = _load(gate_ptrs, group * GROUP, has_feature, IN_FEATURES, GROUP)
            gate = tl.dot(x, gate_weight.T, gate, max_num_imprecise_acc=GROUP)
            up_weight = _load(up_ptrs, group * GROUP, has_feature, IN_FEATURES, GROUP)
            up = tl.dot(x, up_weight.T, up, max_num_imprecise_acc=GROUP)
        row_scales = tl.load(x_scales_ptr + tokens, mask=has_row, other=0.0)[:, None]
        gate *= row_scales * tl.load(weight_scales_ptr + gate_rows, mask=has_feature, other=0.0)[None, :]
        up_scales = tl.load(weight_scales_ptr + gate_rows + OUT_FEATURES, mask=has_feature, other=0.0)
        up *= row_scales * up_scales[None, :]
    # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    result = activate_gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, ALPHA, LIMIT)
    target = out_ptr + (first_row + rows)[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, result.to(dtype), mask=has_row[:, None] & has_feature[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x_ptr,  # [T × k, IN_FEATURES] e4m3, in the order of order_ptr
    x_scales_ptr,  # [T × k] float32, or BY_BLOCKS [T × k, NUM_GROUPS]
    weight_ptr,  # [E, OUT_FEATURES, IN_FEATURES] e4m3
    weight_scales_ptr,  # [E, OUT_FEATURES] float32, or BY_BLOCKS [E, NUM_BLOCKS, NUM_GROUPS]
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    weights_ptr,  # [T × k] float32, how much each pair counts
    out_ptr,  # [k, T, OUT_FEATURES], written
    num_tokens,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (strip of features of an item), the strips of one item after the other."""
    NUM_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    NUM_BLOCKS: tl.constexpr = (OUT_FEATURES + GROUP - 1) // GROUP
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    item_ptr = items_ptr + tl.program_id(0) // OUT_TILES * ITEM_FIELDS
    num_rows = tl.load(item_ptr + 2)
    if num_rows == 0:
        return
    expert = tl.load(item_ptr).to(tl.int64)
    first_row = tl.load(item_ptr + 1)
    first_feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    features = first_feature + tl.arange(0, OUT_TILE)
    has_feature = features < OUT_FEATURES
    rows = tl.arange(0, ROW_TILE)
    has_row = rows < num_rows
    x_rows = (first_row + rows).to(tl.int64)
    inner = tl.arange(0, GROUP)
    x_ptrs = x_ptr + x_rows[:, None] * IN_FEATURES + inner[None, :]
    weight_rows = expert * OUT_FEATURES + features
    weight_ptrs = weight_ptr + weight_rows[:, None] * IN_FEATURES + inner[None, :]
    total = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    if BY_BLOCKS:
        scale_ptr = weight_scales_ptr + (expert * NUM_BLOCKS + first_feature // GROUP) * NUM_GROUPS
        for group in tl.range(0, NUM_GROUPS, num_stages=NUM_STAGES):
            x = _load(x_ptrs, group * GROUP, has_row, IN_FEATURES, GROUP)
            scales = tl.load(x_scales_ptr + x_rows * NUM_GROUPS + group, mask=has_row, other=0.0)[:, None]
            weight = _load(weight_ptrs, group * GROUP, has_feature, IN_FEATURES, GROUP)
            total += tl.dot(x, weight.T) * (scales * tl.load(scale_ptr + group))
    else:
        for group in tl.range(0, NUM_GROUPS, num_stages=NUM_STAGES):
            x = _load(x_ptrs, group * GROUP, has_row, IN_FEATURES, GROUP)
            weight = _load(weight_ptrs, group * GROUP, has_feature, IN_FEATURES, GROUP)
            total = tl.dot(x, weight.T, total, max_num_imprecise_acc=GROUP)
        row_scales = tl.load(x_scales_ptr + x_rows, mask=has_row, other=0.0)[:, None]
        total *= row_scales * tl.load(weight_scales_ptr + weight_rows, mask=has_feature, other=0.0)[None, :]
    pairs = tl.load(order_ptr + first_row + rows, mask=has_row, other=0)
    # Rounded where the two-step version stores.
    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    total *= tl.load(weights_ptr + pairs, mask=has_row, other=0.0)[:, None]
    out_rows = pairs % EXPERTS_PER_TOKEN * num_tokens + pairs // EXPERTS_PER_TOKEN
    target = out_ptr + out_rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_feature[None, :])


def apply_fp8_experts(
    x: QuantisedRows,
    routes: Routes,
    weights: ExpertWeights,
    scales: ExpertScales,
    activation: GatedActivation,
    out: Tensor,
    launch: ExpertLaunch | None = None,
) -> None:
    """See `nvcli.kernels.fp8_experts.apply_fp8_experts`, for at least one token. All tensors are contiguous. Without
    `launch` that of `choose_launch` is taken."""
    num_held = weights.gate_up.shape[0]
    if launch is None:
        launch = choose_launch(routes.experts.numel(), num_held + weights.num_others)
    if weights.num_others:
        out.zero_()
    work = group_by_expert(
        routes.experts,
        num_held,
        launch.row_tile,
        first_expert=weights.first_expert,
        num_others=weights.num_others,
    )
    hidden = _gate_up(x, routes, weights.gate_up, scales.gate_up, activation, work, launch.gate_up)
    _down(quantise(hidden, x.scaling), routes, weights.down, scales.down, work, launch.down, out)


def _gate_up(
    x: QuantisedRows,
    routes: Routes,
    weight: Tensor,
    scales: Tensor,
    activation: GatedActivation,
    work: WorkList,
    launch: Launch,
) -> Tensor:
    """Compute the activation of the gate and up projection of every pair: [T, H] → [T × k, I], sorted by expert."""
    assert x.codes.is_contiguous()
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    in_features = x.codes.shape[1]
    out_features = weight.shape[1] // 2
    assert x.scaling == "channel" or out_features % FP8_BLOCK == 0
    out = torch.empty(len(work.order), out_features, dtype=x.dtype, device=weight.device)
    _gate_up_kernel[(triton.cdiv(out_features, launch.out_tile) * len(work.items),)](
        x.codes,
        x.scales,
        weight,
        scales,
        work.order,
        work.items,
        out,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS_PER_TOKEN=routes.experts.shape[1],
        BY_BLOCKS=x.scaling == "block",
        ROW_TILE=work.row_tile,
        OUT_TILE=launch.out_tile,
        GROUP=FP8_BLOCK,
        ACTIVATION=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        ITEM_FIELDS=ITEM_FIELDS,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


def _down(
    x: QuantisedRows, routes: Routes, weight: Tensor, scales: Tensor, work: WorkList, launch: Launch, out: Tensor
) -> None:
    """Compute the down projection of every pair, times its weight: [T × k, I], sorted by expert → [k, T, H]."""
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert out.is_contiguous()
    out_features, in_features = weight.shape[1:]
    num_tokens, experts_per_token = routes.experts.shape
    _down_kernel[(triton.cdiv(out_features, launch.out_tile) * len(work.items),)](
        x.codes,
        x.scales,
        weight,
        scales,
        work.order,
        work.items,
        routes.weights,
        out,
        num_tokens,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS_PER_TOKEN=experts_per_token,
        BY_BLOCKS=x.scaling == "block",
        ROW_TILE=work.row_tile,
        OUT_TILE=launch.out_tile,
        GROUP=FP8_BLOCK,
        ITEM_FIELDS=ITEM_FIELDS,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
