"""The products of a mixture of experts, for few rows and for many: each expert's weight times the rows of its tokens.

Two kernels go over the work list of `expert_groups`: the gate and up projection with the activation, which gathers its
rows of x and writes them sorted by expert, and the down projection, which writes every pair's result, times the pair's
weight, to its own place. So nothing depends on the order in which programs run, and the sum over a token's experts is
the norm's that comes next.

A program takes one item (up to `row_tile` pairs of one expert) and a strip of output features. Programs that follow one
another share an item's rows, and then the expert's next item its weight, in the L2 cache. The tensor memory accelerator
fetches weights, and fills up what is missing of the last tile with zeros. With few rows the time is that of reading the
weights.

Shapes: T tokens, H hidden, E experts, k experts per token, I intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertWeights, Routes
from nvcli.kernels.triton.activation import activate
from nvcli.kernels.triton.expert_groups import ITEM_FIELDS, WorkList, group_by_expert
from nvcli.kernels.whole_numbers import ceil_div


class Launch(NamedTuple):
    """The tile sizes of one product and how its programs work."""

    out_tile: int
    """Features of the result; the gated product multiplies as many of the gate and of the up projection."""
    in_tile: int
    num_stages: int
    num_warps: int


class ExpertLaunch(NamedTuple):
    """How both products are launched."""

    row_tile: int
    gate_up: Launch
    down: Launch


def choose_launch(num_pairs: int, num_experts: int, x: Tensor) -> ExpertLaunch:
    """The launch for so many pairs of rows of `x`, by how many rows one of all the experts has on average.

    Measured on an H200 with Qwen3-30B-A3B's experts (128 of which 8 are chosen, H 2048, I 768), both products together
    in microseconds: 25 for 1 token; 181 for 16, 276 for 64 and 296 for 256 tokens, where they read their weights at 4.1
    to 4.3 TB/s; 349 for 1,024 and 1,160 for 8,192 tokens.
    """
    rows = num_pairs / num_experts
    if x.element_size() > 2:
        return ExpertLaunch(16, Launch(32, 64, 3, 4), Launch(64, 64, 3, 4))
    if rows <= 8:
        return ExpertLaunch(16, Launch(32, 128, 3, 4), Launch(64, 128, 3, 4))
    if rows <= 32:
        return ExpertLaunch(32, Launch(64, 128, 3, 4), Launch(64, 128, 3, 4))
    if rows <= 64 or not _has_large_shared_memory(x):
        return ExpertLaunch(64, Launch(64, 64, 3, 4), Launch(128, 64, 3, 4))
    return ExpertLaunch(128, Launch(128, 64, 4, 8), Launch(128, 64, 3, 4))


def invariant_launch(x: Tensor) -> ExpertLaunch:
    """The one launch of runs that are batch-invariant, however many rows the experts have."""
    if x.element_size() > 2:
        return ExpertLaunch(16, Launch(32, 64, 3, 4), Launch(64, 64, 3, 4))
    return ExpertLaunch(64, Launch(64, 64, 3, 4), Launch(128, 64, 3, 4))


def _has_large_shared_memory(x: Tensor) -> bool:
    """Whether the tiles for the most rows fit, which take 197 kB."""
    if not x.is_cuda:
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(x.device.index)
    return bool(properties["max_shared_mem"] >= 200_000)


@triton.jit
def activate_gated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """See `GatedActivation`. float32."""
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
        return gate * tl.sigmoid(ALPHA * gate) * up
    return activate(gate, KIND == "gelu_tanh") * up


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, IN_FEATURES], contiguous
    weight,  # descriptor of [E × 2 OUT_FEATURES, IN_FEATURES], tiles [OUT_TILE, IN_TILE]
    bias_ptr,  # [E, 2 OUT_FEATURES], with HAS_BIAS
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    out_ptr,  # [T × k, OUT_FEATURES], written, in the order of order_ptr
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (strip of features of an item), the strips of one item after the other."""
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    item_ptr = items_ptr + tl.program_id(0) // OUT_TILES * ITEM_FIELDS
    num_rows = tl.load(item_ptr + 2)
    if num_rows == 0:
        return
    expert = tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1)
    feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    weight_row = expert * (2 * OUT_FEATURES) + feature
    rows = tl.arange(0, ROW_TILE)
    has_row = rows < num_rows
    tokens = tl.load(order_ptr + first_row + rows, mask=has_row, other=0) // EXPERTS_PER_TOKEN
    inner = tl.arange(0, IN_TILE)
    x_ptrs = x_ptr + tokens[:, None].to(tl.int64) * IN_FEATURES + inner[None, :]
    gate = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    up = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    for start in tl.range(0, IN_FEATURES, IN_TILE, num_stages=NUM_STAGES):
        if IN_FEATURES % IN_TILE == 0:
            x = tl.load(x_ptrs + start, mask=has_row[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=has_row[:, None] & (start + inner < IN_FEATURES)[None, :], other=0.0)
        gate = tl.dot(x, weight.load([weight_row, start]).T, gate, input_precision="ieee")
        up = tl.dot(x, weight.load([weight_row + OUT_FEATURES, start]).T, up, input_precision="ieee")
    features = feature + tl.arange(0, OUT_TILE)
    has_feature = features < OUT_FEATURES
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * (2 * OUT_FEATURES) + features
        gate += tl.load(bias_ptrs, mask=has_feature, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + OUT_FEATURES, mask=has_feature, other=0.0).to(tl.float32)[None, :]
    # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    result = activate_gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, ALPHA, LIMIT)
    target = out_ptr + (first_row + rows)[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, result.to(dtype), mask=has_row[:, None] & has_feature[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x,  # descriptor of [T × k, IN_FEATURES], in the order of order_ptr, tiles [ROW_TILE, IN_TILE]
    weight,  # descriptor of [E × OUT_FEATURES, IN_FEATURES], tiles [OUT_TILE, IN_TILE]
    bias_ptr,  # [E, OUT_FEATURES], with HAS_BIAS
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    weights_ptr,  # [T × k] float32, how much each pair counts
    out_ptr,  # [k, T, OUT_FEATURES], written
    num_tokens,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (strip of features of an item), the strips of one item after the other."""
    OUT_TILES: tl.constexpr = (OUT_FEATURES + OUT_TILE - 1) // OUT_TILE
    item_ptr = items_ptr + tl.program_id(0) // OUT_TILES * ITEM_FIELDS
    num_rows = tl.load(item_ptr + 2)
    if num_rows == 0:
        return
    expert = tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1)
    feature = tl.program_id(0) % OUT_TILES * OUT_TILE
    weight_row = expert * OUT_FEATURES + feature
    total = tl.zeros([ROW_TILE, OUT_TILE], tl.float32)
    for start in tl.range(0, IN_FEATURES, IN_TILE, num_stages=NUM_STAGES):
        # Rows behind the item's last are those of other experts, or nobody's; their results are not stored.
        total = tl.dot(x.load([first_row, start]), weight.load([weight_row, start]).T, total, input_precision="ieee")
    rows = tl.arange(0, ROW_TILE)
    has_row = rows < num_rows
    pairs = tl.load(order_ptr + first_row + rows, mask=has_row, other=0)
    features = feature + tl.arange(0, OUT_TILE)
    has_feature = features < OUT_FEATURES
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * OUT_FEATURES + features, mask=has_feature, other=0.0)
        total += bias.to(tl.float32)[None, :]
    total *= tl.load(weights_ptr + pairs, mask=has_row, other=0.0)[:, None]
    out_rows = pairs % EXPERTS_PER_TOKEN * num_tokens + pairs // EXPERTS_PER_TOKEN
    target = out_ptr + out_rows[:, None].to(tl.int64) * OUT_FEATURES + features[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_feature[None, :])


def apply_experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    activation: GatedActivation,
    out: Tensor,
    launch: ExpertLaunch | None = None,
) -> None:
    """See `nvcli.kernels.experts.apply_experts`, for at least one token. Rows of all tensors are dense and begin at
    multiples of 16 bytes. Without `launch` the measured one is taken."""
    num_held = weights.gate_up.shape[0]
    if launch is None:
        launch = choose_launch(routes.experts.numel(), num_held + weights.num_others, x)
    if weights.num_others:
        out.zero_()
    work = group_by_expert(
        routes.experts,
        num_held,
        launch.row_tile,
        first_expert=weights.first_expert,
        num_others=weights.num_others,
    )
    hidden = gate_up(x, routes, weights, activation, work, launch.gate_up)
    down(hidden, routes, weights, work, launch.down, out)


def gate_up(
    x: Tensor, routes: Routes, weights: ExpertWeights, activation: GatedActivation, work: WorkList, launch: Launch
) -> Tensor:
    """Compute the activation of the gate and up projection of every pair: [T, H] → [T × k, I], sorted by expert."""
    assert x.is_contiguous()
    assert weights.gate_up.is_contiguous()
    in_features = x.shape[1]
    out_features = weights.gate_up.shape[1] // 2
    out = torch.empty(len(work.order), out_features, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(ceil_div(out_features, launch.out_tile) * len(work.items),)](
        x,
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [launch.out_tile, launch.in_tile]),
        x if weights.gate_up_bias is None else weights.gate_up_bias,
        work.order,
        work.items,
        out,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS_PER_TOKEN=routes.experts.shape[1],
        ROW_TILE=work.row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        HAS_BIAS=weights.gate_up_bias is not None,
        ACTIVATION=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        ITEM_FIELDS=ITEM_FIELDS,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


def down(hidden: Tensor, routes: Routes, weights: ExpertWeights, work: WorkList, launch: Launch, out: Tensor) -> None:
    """Compute the down projection of every pair, times its weight: [T × k, I], sorted by expert → [k, T, H]."""
    assert weights.down.is_contiguous()
    assert out.is_contiguous()
    out_features, in_features = weights.down.shape[1:]
    num_tokens, experts_per_token = routes.experts.shape
    _down_kernel[(ceil_div(out_features, launch.out_tile) * len(work.items),)](
        TensorDescriptor.from_tensor(hidden, [work.row_tile, launch.in_tile]),
        TensorDescriptor.from_tensor(weights.down.flatten(0, 1), [launch.out_tile, launch.in_tile]),
        hidden if weights.down_bias is None else weights.down_bias,
        work.order,
        work.items,
        routes.weights,
        out,
        num_tokens,
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS_PER_TOKEN=experts_per_token,
        ROW_TILE=work.row_tile,
        OUT_TILE=launch.out_tile,
        IN_TILE=launch.in_tile,
        HAS_BIAS=weights.down_bias is not None,
        ITEM_FIELDS=ITEM_FIELDS,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
