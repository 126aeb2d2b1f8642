"""tower_tensors: the tensors of a vision tower, as its description says. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from nvcli.models.tensor_spec import Sharding, StoredDtype, TensorSpec
from nvcli.models.vision.vision_config import (
    BOUNDS,
    CHANNELS,
    HALVING,
    NUM_MARKS,
    QKV,
    TOWER,
    LatentsConfig,
    QueryEncoderConfig,
    VisionConfig,
    turned_by_axis,
)


def tower_tensors(vision: VisionConfig, dtype: StoredDtype) -> Iterator[TensorSpec]:
    """Yield the tensors, which every rank holds whole."""
    hidden, inner = vision.hidden_size, vision.intermediate_size
    frames = (vision.temporal_patch_size,) if vision.temporal_patch_size else ()
    of_patch = (CHANNELS, *frames, vision.patch_size, vision.patch_size)
    of_patch = (vision.patch_values,) if vision.has_last_channels or vision.has_flat_patches else of_patch
    yield _tensor(dtype, "patch_embed.proj.weight", hidden, *of_patch)
    if vision.has_patch_bias:
        yield _tensor(dtype, "patch_embed.proj.bias", hidden)
    if vision.has_class_token:
        yield _tensor(dtype, "cls_token.weight", *(() if vision.has_flat_class_token else (1,)), hidden)
    if vision.num_registers:
        yield _tensor(dtype, "registers.weight", vision.num_registers, hidden)
    if vision.num_positions:
        yield _tensor(dtype, "pos_embed.weight", *vision.position_shape, hidden)
    if vision.has_patch_norm:
        yield from _norm(dtype, "patch_norm", vision.patch_values, vision.norm)
    for name, is_there in (("first_norm", vision.has_first_norm), ("last_norm", vision.has_last_norm)):
        if is_there:
            yield from _norm(dtype, name, hidden, vision.norm)
    up, down = vision.mlp_names
    head = hidden // vision.num_heads
    orders: dict[str | None, Callable[[int], tuple[int, ...]]] = {
        "columns": partial(_quarters, order=(1, 0, 3, 2)),
        "halves": partial(_quarters, order=(2, 0, 3, 1)),
        "turns": _turns_in_halves,
        "thirds": _thirds_in_turn,
    }
    order = orders[vision.rope](head) if vision.rope in orders else None
    if vision.has_paired_rows:
        paired = *range(0, head, 2), *range(1, head, 2)
        order = paired if order is None else tuple(paired[number] for number in order)
    for number in range(vision.depth):
        block = f"blocks.{number}"
        for name in ("norm1", "norm2", "result_norm1", "result_norm2")[: 4 if vision.has_result_norms else 2]:
            yield from _norm(dtype, f"{block}.{name}", hidden, vision.norm)
        if number in vision.conv_layers:
            yield _tensor(dtype, f"{block}.conv.in_proj.weight", 3 * hidden, hidden)
            yield _tensor(dtype, f"{block}.conv.spatial_conv.weight", hidden, 1, vision.conv_size, vision.conv_size)
            yield _tensor(dtype, f"{block}.conv.out_proj.weight", hidden, hidden)
        else:
            yield from _attention(vision, dtype, f"{block}.attn", order)
        if vision.distance_window:
            count = 2 * vision.distance_side(is_whole=number in vision.full_layers) - 1
            for name in ("row_distances", "distances"):
                yield _tensor(dtype, f"{block}.attn.{name}.weight", count, head)
        for name in up:
            yield from _linear(dtype, f"{block}.mlp.{name}", inner, hidden, has_bias=vision.mlp_bias)
        yield from _linear(dtype, f"{block}.mlp.{down}", hidden, inner, has_bias=vision.mlp_bias)
        linears = *(f"attn.{name}" for name in (*QKV, "proj")), *(f"mlp.{name}" for name in (*up, down))
        for name in linears if vision.has_bounds else ():
            yield from (_tensor(dtype, f"{block}.{name}.{bound}", 1) for bound in BOUNDS)
        for name in ("scale1", "scale2") if vision.has_layer_scales else ():
            yield _tensor(dtype, f"{block}.{name}.weight", hidden)
    if vision.early_merge > 1:
        count = vision.early_merge**2
        yield from _norm(dtype, "early_merger.norm1", hidden, vision.norm)
        yield from _attention(vision, dtype, "early_merger.attn", None)
        yield from _norm(dtype, "early_merger.norm", count * hidden, vision.norm)
        yield from _linear(dtype, "early_merger.linear_fc1", count * inner, count * hidden, has_bias=True)
        yield from _linear(dtype, "early_merger.linear_fc2", hidden, count * inner, has_bias=True)
    if vision.encoder is not None:
        yield from _encoder(vision, vision.encoder, dtype)
        yield _tensor(dtype, "separator.weight", vision.out_size)
    if vision.has_newlines:
        yield _tensor(dtype, "newline.weight", vision.out_size)
    yield from _merger(vision, dtype, "merger", norms_squares=vision.merger.norms_squares)
    deep = vision if vision.merger.kind == "queries" else replace(vision, merger=replace(vision.merger, kind="squares"))
    for number in range(len(vision.deepstack)):
        yield from _merger(deep, dtype, f"deepstack_merger_list.{number}", norms_squares=True)


def _attention(
    vision: VisionConfig, dtype: StoredDtype, path: str, order: tuple[int, ...] | None
) -> Iterator[TensorSpec]:
    hidden, kv_heads = vision.hidden_size, vision.num_kv_heads or vision.num_heads
    head = hidden // vision.num_heads
    for name, heads in zip(QKV, (vision.num_heads, kv_heads, kv_heads), strict=True):
        linear = _linear(dtype, f"{path}.{name}", heads * head, hidden, has_bias=vision.qkv_bias)
        yield from (replace(part, row_order=None if name == "v_proj" else order) for part in linear)
    yield from _linear(dtype, f"{path}.proj", hidden, hidden, has_bias=vision.out_bias)
    for name in ("q_norm", "k_norm") if vision.qk_norm else ():
        size, factor = (head if vision.qk_norm == "head" else hidden), 1.0
        if vision.norms_values and name == "q_norm":
            factor = head**0.5  # attention divides by it
        (norm,) = _norm(dtype, f"{path}.{name}", size, "rms")
        yield replace(norm, row_order=order, factor=factor)


def _merger(vision: VisionConfig, dtype: StoredDtype, path: str, *, norms_squares: bool) -> Iterator[TensorSpec]:
    merger, hidden, side, out = vision.merger, vision.hidden_size, vision.late_merge, vision.out_size
    merged, bias = hidden * side**2, merger.has_bias
    if merger.kind == "project":
        yield _tensor(dtype, f"{path}.projection.weight", out, hidden)
        for name in ("shift", "scale") if merger.is_standardised else ():
            yield _tensor(dtype, f"{path}.{name}.weight", hidden)
        return
    if merger.kind == "placed":
        yield from _norm(dtype, f"{path}.norm", hidden, merger.norm)
        yield from _linear(dtype, f"{path}.projection", out, merged, has_bias=False)
        yield from _norm(dtype, f"{path}.middle_norm", out, merger.norm)
        yield from _linear(dtype, f"{path}.linear_fc2", out, out, has_bias=False)
        yield from _norm(dtype, f"{path}.last_norm", out, merger.norm)
        return
    if merger.kind == "convolved":
        yield from _convolutions(vision, dtype, path)
        return
    if merger.kind == "linear":
        yield from _linear(dtype, f"{path}.projection", out, merged, has_bias=bias)
        return
    if merger.kind == "table":
        yield from _linear(dtype, f"{path}.projection", merger.size, merged, has_bias=bias)
        yield from _norm(dtype, f"{path}.norm", merger.size, merger.norm)
        yield _tensor(dtype, f"{path}.table.weight", merger.size + NUM_MARKS, out)
        return
    if merger.latents is not None:
        yield from _latents(vision, merger.latents, dtype, path)
        return
    if merger.kind == "queries":
        yield from _queries(vision, dtype, path)
        return
    if merger.kind == "gated":
        yield _tensor(dtype, f"{path}.downsample.weight", out, hidden, side, side)
        yield _tensor(dtype, f"{path}.downsample.bias", out)
        yield from _linear(dtype, f"{path}.proj", out, out, has_bias=bias)
        yield from _norm(dtype, f"{path}.norm", out, "layer")
        yield from _gated(dtype, path, merger.size, out, out, has_bias=bias)
        return
    if merger.has_norm:
        yield from _norm(dtype, f"{path}.norm", merged if norms_squares else hidden, merger.norm)
    if merger.kind == "pool":
        yield _tensor(dtype, f"{path}.projection.weight", hidden, out)
        return
    if merger.kind == "patches":
        yield _tensor(dtype, f"{path}.merging_layer.weight", hidden, merged)
        merged = hidden
    if merger.kind == "ended":
        yield _tensor(dtype, f"{path}.merging_layer.weight", merged, hidden, side, side)
        yield _tensor(dtype, f"{path}.merging_layer.bias", merged)
        yield _tensor(dtype, f"{path}.linear_fc1.weight", out, merged, 1, 1)
        yield _tensor(dtype, f"{path}.linear_fc1.bias", out)
        yield _tensor(dtype, f"{path}.newline.weight", out)
        return
    if merger.kind == "bordered":
        yield _tensor(dtype, f"{path}.merging_layer.weight", 2 * hidden, hidden, side, side)
        yield _tensor(dtype, f"{path}.merging_layer.bias", 2 * hidden)
        yield _tensor(dtype, f"{path}.linear_fc1.weight", merger.size, 2 * hidden, 1, 1)
        yield _tensor(dtype, f"{path}.linear_fc1.bias", merger.size)
        yield from _linear(dtype, f"{path}.linear_fc2", out, merger.size, has_bias=bias)
        for name, size in (("begin", out), ("newline", merger.size), ("end", out)):
            yield _tensor(dtype, f"{path}.{name}.weight", size)
        yield from _norm(dtype, f"{path}.last_norm", out, merger.norm)
        return
    if merger.patch_result_size is not None:
        yield from _linear(dtype, f"{path}.patch_linear_fc1", merger.size, hidden, has_bias=bias)
        yield from _linear(dtype, f"{path}.patch_linear_fc2", merger.patch_result_size, merger.size, has_bias=bias)
        merged = merger.patch_result_size * side**2
    yield from _linear(dtype, f"{path}.linear_fc1", merger.size, merged, has_bias=bias)
    result = merger.result_size or out
    yield from _linear(dtype, f"{path}.linear_fc2", result, merger.size // (1 + merger.is_gated), has_bias=bias)
    if merger.result_size is not None:
        yield from _linear(dtype, f"{path}.projector", out, result, has_bias=bias)


def _convolutions(vision: VisionConfig, dtype: StoredDtype, path: str) -> Iterator[TensorSpec]:
    """Yield the tensors of `convolved`."""
    merger, hidden = vision.merger, vision.hidden_size
    read, size = merger.neck_size or hidden, merger.size or 4 * hidden
    if merger.neck_size:
        yield _tensor(dtype, f"{path}.neck1.weight", read, hidden, 1, 1)
        yield _tensor(dtype, f"{path}.neck2.weight", read, read, HALVING, HALVING)
        for name in ("neck_norm1", "neck_norm2"):
            yield from _norm(dtype, f"{path}.{name}", read, "layer")
    for name, columns, rows in (("downsampler1", read, 2 * read), ("downsampler2", 2 * read, size)):
        yield _tensor(dtype, f"{path}.{name}.weight", rows, columns, HALVING, HALVING)
        if not merger.neck_size:
            yield _tensor(dtype, f"{path}.{name}.bias", rows)
    if vision.encoder is None:
        yield from _linear(dtype, f"{path}.projection", vision.out_size, size, has_bias=merger.has_bias)


def _encoder(vision: VisionConfig, encoder: QueryEncoderConfig, dtype: StoredDtype) -> Iterator[TensorSpec]:
    size, head = encoder.hidden_size, encoder.hidden_size // encoder.num_heads
    for number, side in enumerate(encoder.sides):
        yield _tensor(dtype, f"encoder.queries{number}.weight", side**2, size)
    for layer in range(encoder.depth):
        path = f"encoder.{layer}"
        for name in ("norm1", "norm2"):
            yield from _norm(dtype, f"{path}.{name}", size, "rms")
        for name, heads in zip(QKV, (encoder.num_heads, *[encoder.num_kv_heads] * 2), strict=True):
            yield from _linear(dtype, f"{path}.attn.{name}", heads * head, size, has_bias=True)
        yield from _linear(dtype, f"{path}.attn.proj", size, size, has_bias=False)
        yield from _gated(dtype, f"{path}.mlp", encoder.intermediate_size, size, size)
    yield from _norm(dtype, "encoder.norm", size, "rms")
    yield from _linear(dtype, "encoder.projection", vision.out_size, size, has_bias=True)


def _latents(vision: VisionConfig, latents: LatentsConfig, dtype: StoredDtype, path: str) -> Iterator[TensorSpec]:
    """Yield the tensors of `latents`."""
    out, head = vision.out_size, latents.head_dim
    yield from _gated(dtype, path, vision.merger.size, vision.hidden_size, out)
    yield _tensor(dtype, f"{path}.latents.weight", latents.count, out)
    for number in range(latents.depth):
        layer = f"{path}.layers.{number}"
        for name in ("norm1", "context_norm", "norm2"):
            yield from _norm(dtype, f"{layer}.{name}", out, "rms")
        for name, heads in zip(QKV, (latents.num_heads, *[latents.num_kv_heads] * 2), strict=True):
            yield from _linear(dtype, f"{layer}.attn.{name}", heads * head, out, has_bias=False)
        yield from _linear(dtype, f"{layer}.attn.proj", out, latents.num_heads * head, has_bias=False)
        yield from _gated(dtype, f"{layer}.mlp", 4 * out, out, out)
    yield from _norm(dtype, f"{path}.norm", out, "rms")


def _gated(
    dtype: StoredDtype, path: str, inner: int, columns: int, out: int, *, has_bias: bool = False
) -> Iterator[TensorSpec]:
    """Yield the tensors of a gated MLP."""
    for name in ("gate_proj", "up_proj"):
        yield from _linear(dtype, f"{path}.{name}", inner, columns, has_bias=has_bias)
    yield from _linear(dtype, f"{path}.down_proj", out, inner, has_bias=has_bias)


def _queries(vision: VisionConfig, dtype: StoredDtype, path: str) -> Iterator[TensorSpec]:
    """Yield the tensors of `queries`."""
    size, hidden, tokens = vision.merger.size, vision.hidden_size, vision.window_tokens**2
    yield _tensor(dtype, f"{path}.queries.weight", 1, tokens, hidden)
    yield _tensor(dtype, f"{path}.places.weight", 1, tokens * vision.late_merge**2, hidden)
    for name in ("norm", "first_norm", "attn.norm", "crossattn.norm", "last_norm"):
        yield from _norm(dtype, f"{path}.{name}", hidden, "layer")
    for attention in ("attn", "crossattn"):
        for name in (*QKV, "proj"):
            yield from _linear(dtype, f"{path}.{attention}.{name}", hidden, hidden, has_bias=True)
    yield from _linear(dtype, f"{path}.linear_fc1", size, hidden, has_bias=True)
    yield from _linear(dtype, f"{path}.linear_fc2", hidden, size, has_bias=True)
    yield from _linear(dtype, f"{path}.projection", vision.out_size, hidden, has_bias=True)


def _quarters(size: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of a head's numbers in which number i is turned with number i + size / 2, by rows and then by
    columns, of which files have a quarter each in another order."""
    quarter = size // 4
    return tuple(first * quarter + number for first in order for number in range(quarter))


def _turns_in_halves(size: int) -> tuple[int, ...]:
    """Return the order of `_quarters` where files have numbers of columns and rows in turn."""
    half = size // 2
    return tuple(start + number for start in (0, half) for axis in (1, 0) for number in range(axis, half, 2))


def _thirds_in_turn(size: int) -> tuple[int, ...]:
    """Return the order of a head's numbers in which number i is turned with number i + size / 2, where files have the
    numbers that are turned before the others, which are fewer than 6."""
    turned, half = 3 * turned_by_axis(size), size // 2
    middle = half + turned
    return *range(turned), *range(2 * turned, middle), *range(turned, 2 * turned), *range(middle, size)


def _tensor(dtype: StoredDtype, name: str, *shape: int, offset: float = 0.0) -> TensorSpec:
    return TensorSpec(
        name=f"{TOWER}.{name}", shape=shape, sharding=Sharding.REPLICATED, dtype=dtype, part="vision", offset=offset
    )


def _linear(dtype: StoredDtype, name: str, out: int, columns: int, *, has_bias: bool) -> Iterator[TensorSpec]:
    yield _tensor(dtype, f"{name}.weight", out, columns)
    if has_bias:
        yield _tensor(dtype, f"{name}.bias", out)


def _norm(
    dtype: StoredDtype, name: str, size: int, kind: Literal["rms", "layer", "rms from 1"]
) -> Iterator[TensorSpec]:
    yield _tensor(dtype, f"{name}.weight", size, offset=1.0 if kind == "rms from 1" else 0.0)
    if kind == "layer":
        yield _tensor(dtype, f"{name}.bias", size)
