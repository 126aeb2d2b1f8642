"""The products of a mixture of experts with weights in FP8: each expert's weight times the rows of its tokens.

Like those of `experts.py` two kernels go over the work list of `expert_groups`: the gate and up projection with the
activation, which gathers its rows of x and writes them sorted by expert, and the down projection, which writes every
pair's result, times the pair's weight, to its own place. Between them one kernel quantises, unless the activations are
plain, as on GPUs without FP8 units (`fp8_linear.py`). 128 products at a time are added up by FP8 units, then in
float32; scales by blocks are applied to these sums, scales of rows to the whole.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.triton.expert_groups import ITEM_FIELDS, WorkList, group_by_expert
from nvcli.kernels.triton.experts import activate_gated
from nvcli.kernels.triton.fp8 import quantise
from nvcli.kernels.triton.fp8_launches import EXPERTS, ExpertLaunch, ExpertRanges, Launch
from nvcli.kernels.triton.operands import (
    codes_for,
    dot,
    has_rows_first,
    load_row_scales,
    max_imprecise,
    scaled_dot,
    zeros,
)
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div

_PLAIN: ExpertRanges = (
    (8, ExpertLaunch(Launch(16, 64, 64, 3, 4), Launch(16, 64, 64, 3, 4))),
    (32, ExpertLaunch(Launch(32, 64, 64, 3, 4), Launch(32, 64, 64, 3, 4))),
    (64, ExpertLaunch(Launch(64, 64, 64, 3, 4), Launch(64, 64, 64, 3, 4))),
)
"""Those of plain activations, which were not measured."""


def choose_launch(num_pairs: int, num_experts: int, scaling: FP8Scaling | None) -> ExpertLaunch:
    """Choose the launch for so many pairs, by how many rows one of all the experts has on average. `scaling` is that of
    the activations; None: they are plain."""
    ranges = _PLAIN if scaling is None else EXPERTS[scaling]
    return next((launch for most_rows, launch in ranges if num_pairs <= most_rows * num_experts), ranges[-1][1])


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, IN_FEATURES], QUANTISED in e4m3
    x_scales_ptr,  # QUANTISED: [T] float32, or BY_BLOCKS [T, NUM_GROUPS]
    weight,  # descriptor of [E × 2 OUT_FEATURES, IN_FEATURES] e4m3, for plain x uint8, tiles [OUT_TILE, IN_TILE]
    weight_scales_ptr,  # [E, 2 OUT_FEATURES] float32, or BY_BLOCKS [E, 2 OUT_FEATURES / GROUP, NUM_GROUPS]
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    out_ptr,  # [T × k, OUT_FEATURES], written, in the order of order_ptr
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    QUANTISED: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
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
    expert = tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1)
    feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    weight_row = expert * (2 * OUT_FEATURES) + feature
    features = feature + tl.arange(0, OUT_TILE)
    has_feature = features < OUT_FEATURES
    rows = tl.arange(0, ROW_TILE)
    has_row = rows < num_rows
    tokens = (tl.load(order_ptr + first_row + rows, mask=has_row, other=0) // EXPERTS_PER_TOKEN).to(tl.int64)
    inner = tl.arange(0, IN_TILE)
    x_ptrs = x_ptr + tokens[:, None] * IN_FEATURES + inner[None, :]
    x_scale_ptrs = x_scales_ptr + tokens * (NUM_GROUPS if BY_BLOCKS else 1)
    gate_scale_ptr = weight_scales_ptr + weight_row // GROUP * NUM_GROUPS  # OUT_FEATURES is whole blocks
    up_scale_ptr = gate_scale_ptr + OUT_FEATURES // GROUP * NUM_GROUPS
    gate = zeros(ROW_TILE, OUT_TILE, ROWS_FIRST)
    up = zeros(ROW_TILE, OUT_TILE, ROWS_FIRST)
    for start in tl.range(0, IN_FEATURES, IN_TILE, num_stages=NUM_STAGES):
        if IN_FEATURES % IN_TILE == 0:
            x = tl.load(x_ptrs + start, mask=has_row[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=has_row[:, None] & (start + inner < IN_FEATURES)[None, :], other=0.0)
        gate_weight = weight.load([weight_row, start])
        up_weight = weight.load([weight_row + OUT_FEATURES, start])
        if BY_BLOCKS:
            group = start // GROUP
            scales = load_row_scales(x_scale_ptrs + group, has_row, QUANTISED)
            gate = scaled_dot(x, gate_weight, scales * tl.load(gate_scale_ptr + group), gate, ROWS_FIRST)
            up = scaled_dot(x, up_weight, scales * tl.load(up_scale_ptr + group), up, ROWS_FIRST)
        else:
            gate = dot(x, gate_weight, gate, ROWS_FIRST, MAX_IMPRECISE)
            up = dot(x, up_weight, up, ROWS_FIRST, MAX_IMPRECISE)
    if not ROWS_FIRST:
        gate = gate.T
        up = up.T
    if not BY_BLOCKS:
        row_scales = load_row_scales(x_scale_ptrs, has_row, QUANTISED)[:, None]
        scale_ptrs = weight_scales_ptr + expert * (2 * OUT_FEATURES) + features
        gate *= row_scales * tl.load(scale_ptrs, mask=has_feature, other=0.0)[None, :]
        up *= row_scales * tl.load(scale_ptrs + OUT_FEATURES, mask=has_feature, other=0.0)[None, :]
    # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    result = activate_gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, ALPHA, LIMIT)
    target = out_ptr + (first_row + rows)[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, result.to(dtype), mask=has_row[:, None] & has_feature[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x,  # descriptor of [T × k, IN_FEATURES], QUANTISED in e4m3, in the order of order_ptr, tiles [ROW_TILE, IN_TILE]
    x_scales_ptr,  # QUANTISED: [T × k] float32, or BY_BLOCKS [T × k, NUM_GROUPS]
    weight,  # descriptor of [E × OUT_FEATURES, IN_FEATURES] e4m3, for plain x uint8, tiles [OUT_TILE, IN_TILE]
    weight_scales_ptr,  # [E, OUT_FEATURES] float32, or BY_BLOCKS [E, NUM_BLOCKS, NUM_GROUPS]
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    weights_ptr,  # [T × k] float32, how much each pair counts
    out_ptr,  # [k, T, OUT_FEATURES], written
    num_tokens,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    QUANTISED: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
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
    expert = tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1)
    feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    weight_row = expert * OUT_FEATURES + feature
    features = feature + tl.arange(0, OUT_TILE)
    has_feature = features < OUT_FEATURES
    rows = tl.arange(0, ROW_TILE)
    has_row = rows < num_rows
    x_scale_ptrs = x_scales_ptr + (first_row + rows).to(tl.int64) * (NUM_GROUPS if BY_BLOCKS else 1)
    weight_scale_ptr = weight_scales_ptr + (expert * NUM_BLOCKS + feature // GROUP) * NUM_GROUPS
    total = zeros(ROW_TILE, OUT_TILE, ROWS_FIRST)
    for start in tl.range(0, IN_FEATURES, IN_TILE, num_stages=NUM_STAGES):
        # Rows behind the item's last are those of other experts, or nobody's; their results are not stored.
        x_tile = x.load([first_row, start])
        weight_tile = weight.load([weight_row, start])
        if BY_BLOCKS:
            group = start // GROUP
            row_scales = load_row_scales(x_scale_ptrs + group, has_row, QUANTISED)
            scales = row_scales * tl.load(weight_scale_ptr + group)
            total = scaled_dot(x_tile, weight_tile, scales, total, ROWS_FIRST)
        else:
            total = dot(x_tile, weight_tile, total, ROWS_FIRST, MAX_IMPRECISE)
    if not ROWS_FIRST:
        total = total.T
    if not BY_BLOCKS:
        row_scales = load_row_scales(x_scale_ptrs, has_row, QUANTISED)[:, None]
        scale_ptrs = weight_scales_ptr + expert * OUT_FEATURES + features
        total *= row_scales * tl.load(scale_ptrs, mask=has_feature, other=0.0)[None, :]
    pairs = tl.load(order_ptr + first_row + rows, mask=has_row, other=0)
    # Rounded where the two-step version stores.
    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    total *= tl.load(weights_ptr + pairs, mask=has_row, other=0.0)[:, None]
    out_rows = pairs % EXPERTS_PER_TOKEN * num_tokens + pairs // EXPERTS_PER_TOKEN
    target = out_ptr + out_rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_feature[None, :])


def apply_fp8_experts(
    x: Activations,
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
        scaling = x.scaling if isinstance(x, QuantisedRows) else None
        launch = choose_launch(routes.experts.numel(), num_held + weights.num_others, scaling)
    if weights.num_others:
        out.zero_()
    work = group_by_expert(
        routes.experts,
        num_held,
        launch.down.row_tile,
        first_expert=weights.first_expert,
        num_others=weights.num_others,
    )
    hidden = _gate_up(x, routes, weights.gate_up, scales.gate_up, activation, work, launch.gate_up)
    inner = quantise(hidden, x.scaling) if isinstance(x, QuantisedRows) else hidden
    _down(inner, routes, weights.down, scales.down, work, launch.down, out)


def _gate_up(
    x: Activations,
    routes: Routes,
    weight: Tensor,
    scales: Tensor,
    activation: GatedActivation,
    work: WorkList,
    launch: Launch,
) -> Tensor:
    """Compute the activation of the gate and up projection of every pair: [T, H] → [T × k, I], sorted by expert."""
    numbers, row_scales = (x.codes, x.scales) if isinstance(x, QuantisedRows) else (x, scales)
    assert numbers.is_contiguous()
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    in_features = numbers.shape[1]
    out_features = weight.shape[1] // 2
    assert scales.dim() == 2 or out_features % FP8_BLOCK == 0
    out = torch.empty(len(work.order), out_features, dtype=x.dtype, device=weight.device)
    _gate_up_kernel[(ceil_div(out_features, launch.out_tile) * len(work.items),)](
        numbers,
        row_scales,
        TensorDescriptor.from_tensor(codes_for(x, weight.flatten(0, 1)), [launch.out_tile, launch.in_tile]),
        scales,
        work.order,
        work.items,
        out,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS_PER_TOKEN=routes.experts.shape[1],
        QUANTISED=isinstance(x, QuantisedRows),
        BY_BLOCKS=scales.dim() == 3,
        ROW_TILE=launch.row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        ROWS_FIRST=has_rows_first(launch.row_tile, launch.out_tile),
        MAX_IMPRECISE=max_imprecise(x),
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
    x: Activations, routes: Routes, weight: Tensor, scales: Tensor, work: WorkList, launch: Launch, out: Tensor
) -> None:
    """Compute the down projection of every pair, times its weight: [T × k, I], sorted by expert → [k, T, H]."""
    numbers, row_scales = (x.codes, x.scales) if isinstance(x, QuantisedRows) else (x, scales)
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert out.is_contiguous()
    out_features, in_features = weight.shape[1:]
    num_tokens, experts_per_token = routes.experts.shape
    _down_kernel[(ceil_div(out_features, launch.out_tile) * len(work.items),)](
        TensorDescriptor.from_tensor(numbers, [launch.row_tile, launch.in_tile]),
        row_scales,
        TensorDescriptor.from_tensor(codes_for(x, weight.flatten(0, 1)), [launch.out_tile, launch.in_tile]),
        scales,
        work.order,
        work.items,
        routes.weights,
        out,
        num_tokens,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS_PER_TOKEN=experts_per_token,
        QUANTISED=isinstance(x, QuantisedRows),
        BY_BLOCKS=scales.dim() == 3,
        ROW_TILE=launch.row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        ROWS_FIRST=has_rows_first(launch.row_tile, launch.out_tile),
        MAX_IMPRECISE=max_imprecise(x),
        GROUP=FP8_BLOCK,
        ITEM_FIELDS=ITEM_FIELDS,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
