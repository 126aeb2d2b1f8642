"""The products of a mixture of experts, for few rows and for many: each expert's weight times the rows of its tokens.

One kernel goes over the work list of `expert_groups` twice. For the gate and up projection with the activation it
gathers its rows of x and writes them sorted by expert; for the down projection it writes every pair's result, times the
pair's weight, to its own place. So nothing depends on the order in which programs run, and the sum over a token's
experts is the norm's that comes next.

A program takes one item (up to `row_tile` pairs of one expert) and a strip of output features. Programs that follow one
another share an item's rows, and then the expert's next item its weight, in the L2 cache. With few rows the time is
that of reading the weights.

Weights are numbers like those of x, or in FP8, with scales of rows or blocks and with rows that are quantised or plain,
or in 4 bits (`tile_product.py`). The tensor memory accelerator fetches weights but those in 4 bits, and fills up what
is missing of the last tile with zeros.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertMatrix, ExpertScales, ExpertWeights, Routes, W4Scales, matrices
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.triton.elementwise.activation import activate_gated
from nvcli.kernels.triton.elementwise.fp8 import quantise
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.products.expert_groups import ITEM_FIELDS, WorkList, group_by_expert
from nvcli.kernels.triton.products.expert_launches import ExpertLaunch, choose_expert_launch
from nvcli.kernels.triton.products.operands import TileKind, codes_for, per_feature, per_row
from nvcli.kernels.triton.products.product_launch import ExpertTiles, HopperFP8Launch, HopperW4Launch
from nvcli.kernels.triton.products.tile_product import load_features, multiply_tile
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div


@triton.jit(do_not_specialize=["num_tokens"])
def _experts_kernel(
    x_ptr,  # with an ACTIVATION [T, in]; else [T × k, in], in the order of order_ptr
    x_tiles,  # by TMA, descriptor of the latter, tiles [row_tile, in_tile]; else None
    x_scales_ptr,  # quantised: [T or T × k] float32, or for blocks [T or T × k, groups]
    weight,  # descriptor of [E × ROWS, in], tiles [out_tile, in_tile]; in 4 bits [E, ROWS, words] int16
    weight_scales_ptr,  # [E, ROWS] float32, or for blocks [E, ROWS / GROUP, groups]; in 4 bits [E, groups, ROWS] int32
    bias_ptr,  # None, or [E, ROWS]
    order_ptr,  # [T × k] int32
    items_ptr,  # [N, ITEM_FIELDS] int32
    pair_weights_ptr,  # [T × k] float32, how much each pair counts
    out_ptr,  # with an ACTIVATION [T × k, out], in the order of order_ptr; else [k, T, out]; written
    num_tokens,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    NUM_SCALES: tl.constexpr,  # of an expert
    ACTIVATION: tl.constexpr,  # `ExpertActivation`, or None
    KIND: tl.constexpr,  # `TileKind`
    HALF_KIND: tl.constexpr,  # the same with half as many rows, for items of at most as many; None: these are not told
    DEPENDENT: tl.constexpr,
):
    """Program (strip of features of an item), the strips of one item after the other."""
    await_kernel_before(DEPENDENT)
    STRIPS: tl.constexpr = (OUT_FEATURES + KIND.out_tile - 1) // KIND.out_tile
    item_ptr = items_ptr + tl.program_id(0) // STRIPS * ITEM_FIELDS
    expert, first_row, num_rows = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    feature = tl.program_id(0) % STRIPS * KIND.out_tile
    if num_rows > (0 if HALF_KIND is None else KIND.row_tile // 2):
        _multiply_item(
            x_ptr, x_tiles, x_scales_ptr, weight, weight_scales_ptr, bias_ptr, order_ptr, pair_weights_ptr, out_ptr,
            expert, first_row, num_rows, feature, num_tokens, OUT_FEATURES, IN_FEATURES, EXPERTS_PER_TOKEN, NUM_SCALES,
            ACTIVATION, KIND,
        )  # fmt: skip
    elif HALF_KIND is not None:  # noqa: SIM102  # known when the kernel is compiled, unlike the number of rows
        if num_rows > 0:
            _multiply_item(
                x_ptr, x_tiles, x_scales_ptr, weight, weight_scales_ptr, bias_ptr, order_ptr, pair_weights_ptr,
                out_ptr, expert, first_row, num_rows, feature, num_tokens, OUT_FEATURES, IN_FEATURES,
                EXPERTS_PER_TOKEN, NUM_SCALES, ACTIVATION, HALF_KIND,
            )  # fmt: skip


@triton.jit
def _multiply_item(
    x_ptr, x_tiles, x_scales_ptr, weight, weight_scales_ptr, bias_ptr, order_ptr, pair_weights_ptr, out_ptr,
    expert, first_row, num_rows, feature, num_tokens,
    OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, EXPERTS_PER_TOKEN: tl.constexpr, NUM_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Multiply an item's rows, up to a tile from `first_row` on, by a tile of features of its expert. An expert's
    weight has ROWS rows: `out`, or gated 2 `out`, those of the gate first. Rows behind the item's last are those of
    other experts, or nobody's; their results are not stored."""
    GATED: tl.constexpr = KIND.is_gated
    ROWS_FIRST: tl.constexpr = KIND.rows_first
    IS_DOWN: tl.constexpr = ACTIVATION is None
    ROWS: tl.constexpr = 2 * OUT_FEATURES if GATED else OUT_FEATURES
    features = feature + tl.arange(0, KIND.out_tile)
    is_feature = features < OUT_FEATURES
    rows = tl.arange(0, KIND.row_tile)
    is_row = rows < num_rows
    sorted_rows = (first_row + rows).to(tl.int64)
    pair_ptrs = order_ptr + first_row + rows
    x_rows = sorted_rows
    if not IS_DOWN:
        x_rows = (tl.load(pair_ptrs, mask=is_row, other=0) // EXPERTS_PER_TOKEN).to(tl.int64)
    total, up = multiply_tile(
        x_tiles if KIND.x_by_tma else x_ptr, first_row, x_rows, is_row, x_scales_ptr, weight, expert * ROWS + feature,
        feature, is_feature, weight_scales_ptr + expert.to(tl.int64) * NUM_SCALES, OUT_FEATURES, IN_FEATURES, 0,
        IN_FEATURES, KIND,
    )  # fmt: skip
    row_features = expert * ROWS + features
    if bias_ptr is not None:
        total += load_features(bias_ptr + row_features, is_feature, ROWS_FIRST)
        if GATED:
            up += load_features(bias_ptr + row_features + OUT_FEATURES, is_feature, ROWS_FIRST)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if not IS_DOWN:
        # Rounded where the two-step version stores: both give the same bits but for the order of the sums.
        total = total.to(dtype).to(tl.float32)
        if GATED:
            total = activate_gated(total, up.to(dtype).to(tl.float32), ACTIVATION)
        else:
            total = tl.where(total <= 0.0, 0.0, total * total)
        out_rows = sorted_rows
    else:
        pairs = tl.load(pair_ptrs, mask=is_row, other=0)
        total *= per_row(tl.load(pair_weights_ptr + pairs, mask=is_row, other=0.0), ROWS_FIRST)
        out_rows = (pairs % EXPERTS_PER_TOKEN * num_tokens + pairs // EXPERTS_PER_TOKEN).to(tl.int64)
    out_ptrs = out_ptr + per_row(out_rows, ROWS_FIRST) * OUT_FEATURES + per_feature(features, ROWS_FIRST)
    tl.store(out_ptrs, total.to(dtype), mask=per_row(is_row, ROWS_FIRST) & per_feature(is_feature, ROWS_FIRST))


def apply_experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    scales: ExpertScales | W4Scales | None,
    activation: ExpertActivation,
    out: Tensor,
    launch: ExpertLaunch | HopperFP8Launch | HopperW4Launch | None = None,
    *,
    quantises: bool = False,
    batch_invariant: bool = False,
) -> None:
    """See `nvcli.kernels.experts.apply_experts`, for at least one token. All tensors are contiguous, and rows begin at
    multiples of 16 bytes. `launch`: by default what `choose_expert_launch` says."""
    gate_up, down = matrices(weights, scales)
    num_held = len(weights.gate_up)
    if launch is None:
        num_rows = routes.experts.numel() / (num_held + weights.num_others)
        launch = choose_expert_launch(
            num_rows, gate_up, down, x, activation, quantises=quantises, batch_invariant=batch_invariant
        )
    work = group_by_expert(
        routes.experts,
        num_held,
        launch.row_tile,
        first_expert=weights.first_expert,
        num_others=weights.num_others,
        has_places=isinstance(launch, HopperFP8Launch | HopperW4Launch),
    )
    if isinstance(launch, HopperFP8Launch):
        from nvcli.kernels.triton.products import hopper_fp8

        grouped = hopper_fp8.Grouped(work, routes)
        hopper_fp8.apply_experts(x, weights, gate_up, down, grouped, launch, activation, out)
        return
    size = weights.gate_up.shape[1] // (2 if activation.is_gated else 1)
    hidden = torch.empty(len(work.order), size, dtype=x.dtype, device=x.device)
    if isinstance(launch, HopperW4Launch):
        from nvcli.kernels.triton.products import hopper_w4

        # The rows of x, sorted by expert, are where the results will be, which are as large.
        assert work.places is not None
        sorted_rows = hopper_w4.sort_rows(x, work.places, out.view(-1, x.shape[1]))
        hopper_w4.multiply_experts(sorted_rows, gate_up, routes, work, launch, activation, hidden)
        hopper_w4.multiply_experts(hidden, down, routes, work, launch, None, out)
        return
    scaling: FP8Scaling = "block" if gate_up.kind == "block" else "channel"
    rows: Activations = quantise(x, scaling) if quantises else x
    _multiply(rows, gate_up, routes, work, launch.gate_up, activation, hidden)
    rows = quantise(hidden, scaling) if quantises else hidden
    _multiply(rows, down, routes, work, launch.down, None, out)


def _multiply(
    x: Activations,
    matrix: ExpertMatrix,
    routes: Routes,
    work: WorkList,
    launch: ExpertTiles,
    activation: ExpertActivation | None,
    out: Tensor,
) -> None:
    """Compute the gate and up projection of every pair with its activation: [T, H] → [T × k, I], sorted by expert; or
    without `activation` the down projection, times the pair's weight: [T × k, I] → [k, T, H]."""
    numbers, row_scales = (x.codes, x.scales) if isinstance(x, QuantisedRows) else (x, x)
    weight, bias, scales = matrix.weight, matrix.bias, matrix.scales
    for tensor in (numbers, weight, scales, out):
        assert tensor is None or tensor.is_contiguous()
    out_features, in_features = out.shape[-1], numbers.shape[1]
    assert matrix.kind != "block" or activation is None or out_features % matrix.group == 0
    assert matrix.format is None or out_features % matrix.format.row_block == 0
    weight_by_tma, has_whole_tiles = matrix.format is None, in_features % launch.in_tile == 0
    kind = TileKind(
        weight=matrix.kind,
        group=matrix.group,
        row_block=1 if matrix.format is None else matrix.format.row_block,
        is_quantised=isinstance(x, QuantisedRows),
        is_gated=activation is not None and activation.is_gated,
        row_tile=work.row_tile,
        out_tile=launch.out_tile,
        in_tile=launch.in_tile,
        rows_first=launch.rows_first,
        x_by_tma=launch.has_tiles,
        weight_by_tma=weight_by_tma,
        is_whole=(launch.has_tiles and weight_by_tma) or has_whole_tiles,
        is_packed=numbers.is_cuda,
        num_stages=launch.num_stages,
    )
    half_kind = replace(kind, row_tile=work.row_tile // 2, x_by_tma=False, is_whole=has_whole_tiles)
    _experts_kernel[(ceil_div(out_features, launch.out_tile) * len(work.items),)](
        numbers,
        TensorDescriptor.from_tensor(numbers, [work.row_tile, launch.in_tile]) if launch.has_tiles else None,
        row_scales,
        TensorDescriptor.from_tensor(_codes(x, matrix), [launch.out_tile, launch.in_tile]) if weight_by_tma else weight,
        numbers if scales is None else scales,
        bias,
        work.order,
        work.items,
        routes.weights,
        out,
        len(routes.experts),
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        EXPERTS_PER_TOKEN=routes.experts.shape[1],
        NUM_SCALES=0 if scales is None else scales[0].numel(),
        ACTIVATION=activation,
        KIND=kind,
        HALF_KIND=half_kind if launch.has_halves else None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **dependent(numbers.device),
    )


def _codes(x: Activations, matrix: ExpertMatrix) -> Tensor:
    """Return the rows of all experts' weights in the type that a product with `x` takes."""
    rows = matrix.weight.flatten(0, 1)
    return rows if matrix.scales is None else codes_for(x, rows)
