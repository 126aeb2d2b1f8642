"""The products of a mixture of experts with weights of 4 bits: each expert's weight times the rows of its tokens.

Like those of `experts.py` two kernels go over the work list of `expert_groups`: the gate and up projection with the
activation, which gathers its rows of x and writes them sorted by expert, and the down projection, which writes every
pair's result, times the pair's weight, to its own place. Like in `w4_linear.py` codes become numbers in registers, and
are the first factor of the product.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertWeights, Routes, W4Scales
from nvcli.kernels.triton.expert_groups import ITEM_FIELDS, WorkList, group_by_expert
from nvcli.kernels.triton.experts import activate_gated
from nvcli.kernels.triton.w4_codes import add_tile
from nvcli.kernels.triton.w4_launches import EXPERTS, ExpertLaunch, Launch
from nvcli.kernels.triton.w4_linear import fit
from nvcli.kernels.whole_numbers import ceil_div


def choose_launch(num_pairs: int, num_experts: int) -> ExpertLaunch:
    """The launch for so many pairs, by how many rows one of all the experts has on average."""
    return next((launch for most, launch in EXPERTS if num_pairs <= most * num_experts), EXPERTS[-1][1])


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, IN_FEATURES]
    words_ptr,  # [E, 2 OUT_FEATURES, TILES × PART] int16
    scales_ptr,  # [E, groups, 2 OUT_FEATURES] int32
    bias_ptr,  # [E, 2 OUT_FEATURES], with HAS_BIAS
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    out_ptr,  # [T × k, OUT_FEATURES], written, in the order of order_ptr
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_SCALES: tl.constexpr,  # of a row
    EXPERTS_PER_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    PART: tl.constexpr,
    PACKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (strip of features of an item), the strips of one item after the other."""
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    TILES: tl.constexpr = (IN_FEATURES + 4 * PART - 1) // (4 * PART)
    WORDS: tl.constexpr = TILES * PART
    ROWS: tl.constexpr = 2 * OUT_FEATURES
    item_ptr = items_ptr + tl.program_id(0) // OUT_TILES * ITEM_FIELDS
    num_rows = tl.load(item_ptr + 2)
    if num_rows == 0:
        return
    expert = tl.load(item_ptr).to(tl.int64)
    first_row = tl.load(item_ptr + 1)
    feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    features = feature + tl.arange(0, OUT_TILE)
    is_feature = features < OUT_FEATURES
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    tokens = (tl.load(order_ptr + first_row + rows, mask=is_row, other=0) // EXPERTS_PER_TOKEN).to(tl.int64)
    inner = tl.arange(0, PART)
    x_ptrs = x_ptr + tokens[None, :] * IN_FEATURES + inner[:, None]
    gate_ptrs = words_ptr + (expert * ROWS + features)[:, None] * WORDS + inner[None, :]
    up_ptrs = gate_ptrs + OUT_FEATURES * WORDS
    scales_ptrs = scales_ptr + expert * (NUM_SCALES * ROWS) + features
    gate = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
    up = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
    for tile in tl.range(0, TILES, num_stages=NUM_STAGES):
        gate = add_tile(
            gate,
            gate_ptrs,
            scales_ptrs,
            x_ptrs,
            tile,
            is_row,
            is_feature,
            ROWS,
            IN_FEATURES,
            KIND,
            GROUP,
            PART,
            PACKED,
            IN_FEATURES % (4 * PART) == 0,
        )
        up = add_tile(
            up,
            up_ptrs,
            scales_ptrs + OUT_FEATURES,
            x_ptrs,
            tile,
            is_row,
            is_feature,
            ROWS,
            IN_FEATURES,
            KIND,
            GROUP,
            PART,
            PACKED,
            IN_FEATURES % (4 * PART) == 0,
        )
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * ROWS + features
        gate += tl.load(bias_ptrs, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptrs + OUT_FEATURES, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    result = activate_gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, ALPHA, LIMIT)
    target = out_ptr + (first_row + rows)[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, result.to(dtype).T, mask=is_row[:, None] & is_feature[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x_ptr,  # [T × k, IN_FEATURES], in the order of order_ptr
    words_ptr,  # [E, OUT_FEATURES, TILES × PART] int16
    scales_ptr,  # [E, groups, OUT_FEATURES] int32
    bias_ptr,  # [E, OUT_FEATURES], with HAS_BIAS
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    weights_ptr,  # [T × k] float32, how much each pair counts
    out_ptr,  # [k, T, OUT_FEATURES], written
    num_tokens,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    PART: tl.constexpr,
    PACKED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (strip of features of an item), the strips of one item after the other."""
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    TILES: tl.constexpr = (IN_FEATURES + 4 * PART - 1) // (4 * PART)
    WORDS: tl.constexpr = TILES * PART
    item_ptr = items_ptr + tl.program_id(0) // OUT_TILES * ITEM_FIELDS
    num_rows = tl.load(item_ptr + 2)
    if num_rows == 0:
        return
    expert = tl.load(item_ptr).to(tl.int64)
    first_row = tl.load(item_ptr + 1)
    feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    features = feature + tl.arange(0, OUT_TILE)
    is_feature = features < OUT_FEATURES
    rows = tl.arange(0, ROW_TILE)
    is_row = rows < num_rows
    weight_rows = expert * OUT_FEATURES + features
    inner = tl.arange(0, PART)
    x_ptrs = x_ptr + (first_row + rows).to(tl.int64)[None, :] * IN_FEATURES + inner[:, None]
    words_ptrs = words_ptr + weight_rows[:, None] * WORDS + inner[None, :]
    scales_ptrs = scales_ptr + expert * (NUM_SCALES * OUT_FEATURES) + features
    total = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
    for tile in tl.range(0, TILES, num_stages=NUM_STAGES):
        total = add_tile(
            total,
            words_ptrs,
            scales_ptrs,
            x_ptrs,
            tile,
            is_row,
            is_feature,
            OUT_FEATURES,
            IN_FEATURES,
            KIND,
            GROUP,
            PART,
            PACKED,
            IN_FEATURES % (4 * PART) == 0,
        )
    if HAS_BIAS:
        total += tl.load(bias_ptr + weight_rows, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    pairs = tl.load(order_ptr + first_row + rows, mask=is_row, other=0)
    total *= tl.load(weights_ptr + pairs, mask=is_row, other=0.0)[None, :]
    out_rows = pairs % EXPERTS_PER_TOKEN * num_tokens + pairs // EXPERTS_PER_TOKEN
    target = out_ptr + out_rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty).T, mask=is_row[:, None] & is_feature[None, :])


def apply_w4_experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    scales: W4Scales,
    activation: GatedActivation,
    out: Tensor,
    launch: ExpertLaunch | None = None,
) -> None:
    """See `nvcli.kernels.w4_experts.apply_w4_experts`, for at least one token. All tensors are contiguous. Without
    `launch` that of `choose_launch` is taken."""
    num_held = weights.gate_up.shape[0]
    if launch is None:
        launch = choose_launch(routes.experts.numel(), num_held + weights.num_others)
    launch = ExpertLaunch(
        fit(launch.gate_up, x, scales.gate_up_format, is_gated=True), fit(launch.down, x, scales.down_format)
    )
    if launch.gate_up.row_tile != launch.down.row_tile:
        rows = min(launch.gate_up.row_tile, launch.down.row_tile)
        launch = ExpertLaunch(*(one._replace(row_tile=rows) for one in launch))
    if weights.num_others:
        out.zero_()
    work = group_by_expert(
        routes.experts,
        num_held,
        launch.gate_up.row_tile,
        first_expert=weights.first_expert,
        num_others=weights.num_others,
    )
    hidden = _gate_up(x, routes, weights, scales, activation, work, launch.gate_up)
    _down(hidden, routes, weights, scales, work, launch.down, out)


def _gate_up(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    scales: W4Scales,
    activation: GatedActivation,
    work: WorkList,
    launch: Launch,
) -> Tensor:
    """Compute the activation of the gate and up projection of every pair: [T, H] → [T × k, I], sorted by expert."""
    words, bias = weights.gate_up, weights.gate_up_bias
    assert x.is_contiguous()
    assert words.is_contiguous()
    assert scales.gate_up.is_contiguous()
    out_features = words.shape[1] // 2
    out = torch.empty(len(work.order), out_features, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(ceil_div(out_features, launch.out_tile) * len(work.items),)](
        x,
        words,
        scales.gate_up,
        x if bias is None else bias,
        work.order,
        work.items,
        out,
        OUT_FEATURES=out_features,
        IN_FEATURES=x.shape[1],
        NUM_SCALES=scales.gate_up.shape[1],
        EXPERTS_PER_TOKEN=routes.experts.shape[1],
        KIND=scales.gate_up_format.kind,
        GROUP=scales.gate_up_format.group,
        ROW_TILE=work.row_tile,
        OUT_TILE=launch.out_tile,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        ITEM_FIELDS=ITEM_FIELDS,
        PART=scales.gate_up_format.part,
        PACKED=x.is_cuda,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


def _down(
    hidden: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    scales: W4Scales,
    work: WorkList,
    launch: Launch,
    out: Tensor,
) -> None:
    """Compute the down projection of every pair, times its weight: [T × k, I], sorted by expert → [k, T, H]."""
    words, bias = weights.down, weights.down_bias
    assert words.is_contiguous()
    assert scales.down.is_contiguous()
    assert out.is_contiguous()
    out_features = words.shape[1]
    num_tokens, experts_per_token = routes.experts.shape
    _down_kernel[(ceil_div(out_features, launch.out_tile) * len(work.items),)](
        hidden,
        words,
        scales.down,
        hidden if bias is None else bias,
        work.order,
        work.items,
        routes.weights,
        out,
        num_tokens,
        OUT_FEATURES=out_features,
        IN_FEATURES=hidden.shape[1],
        NUM_SCALES=scales.down.shape[1],
        EXPERTS_PER_TOKEN=experts_per_token,
        KIND=scales.down_format.kind,
        GROUP=scales.down_format.group,
        ROW_TILE=work.row_tile,
        OUT_TILE=launch.out_tile,
        HAS_BIAS=bias is not None,
        ITEM_FIELDS=ITEM_FIELDS,
        PART=scales.down_format.part,
        PACKED=hidden.is_cuda,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
