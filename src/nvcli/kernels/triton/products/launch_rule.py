"""Choice of the kernel and launch of a product with an FP8 weight: the one with the least estimated time.

The estimate counts the bytes from memory and the steps of the busiest multiprocessor, and multiplies them by
coefficients. These are fitted to measurements (`scripts/fit_launches.py`) and kept in `launch_times.json`, which also
lists the launches: only a few, as each is compiled at the first start. The product of torch is one of them.

Shapes: `in` and `out` features.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from nvcli.core.config_types import FP8Accumulation
from nvcli.kernels import fp8_block_product
from nvcli.kernels.fp8_types import QuantisedRows
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.launch.triton_version import has_known_gluon
from nvcli.kernels.triton.products.product_launch import DecodeLaunch, HopperFP8Launch, ProductLaunch
from nvcli.kernels.weight_formats import FP8_ALIGNMENT, FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div

Kind = FP8Scaling | Literal["sum", "gated"]
"""Kinds of products. "channel", "block": that scaling. "sum": scales by rows, for a residual sum, which takes parts.
"gated": gate and up projection with scales by rows, and their activation."""

_CAPABILITY = (9, 0)
_OTHER_GPUS = tuple((rows, ProductLaunch(rows, 64, FP8_BLOCK, num_stages=3, num_warps=4)) for rows in (16, 32, 64))
"""(Maximum rows, launch) for GPUs that were not measured. With more rows torch multiplies where scales are by rows, and
the last launch serves scales by blocks."""
_NUM_PARTS = (2, 3)
"""Numbers of parts into which input features may be cut. The norm that follows is compiled for each of them."""
_STEP = 128
"""Input features."""
_SHARED_BYTES = 227 << 10
_PROGRAM_BYTES = 2 << 10
"""Shared memory of a program beside its tiles."""
_TORCH_TILE = 128
"""Rows and features of the tiles of torch's product, inferred from its times."""
_RAGGED_ROWS = 1024
"""Up to this number of rows, torch's product takes longer than estimated unless they fill whole tiles."""
_DECODE_TILES = 4
"""The most tiles of rows with which the kernel for decode steps was measured."""
_HOPPER_ROWS = 128
"""The kernel for many rows was measured with more rows than this, and for gated products with this number, too."""
_FINE_ROWS = 2048
"""Up to this number of rows, the choice distinguishes eight numbers of rows between two powers of two, and above it
only powers of two, so that the warm-up launches all that a run will (`worker/runner/warm_up.py`)."""


class TorchLaunch(NamedTuple):
    """Torch's own product."""

    accumulation: FP8Accumulation | Literal["block"]


AnyLaunch = ProductLaunch | DecodeLaunch | HopperFP8Launch | TorchLaunch


class Coefficients(NamedTuple):
    """Microseconds for each kind of work in a product."""

    fixed: float
    """A launch."""
    memory: float
    """A million bytes from memory."""
    latency: float
    """128 input features of a program on its own, with its waits for memory and the matrix units."""
    step: float
    """128 input features of a program, as far as they keep other programs of its multiprocessor waiting."""
    end: float
    """The end of a program, after its input features."""
    ragged: float
    """128 input features of a thousand tiles that are not full of rows."""
    parts: float
    """Writing and adding up a million numbers of parts."""
    sustained: float = 1.0
    """Factor with so many rows that the GPU's power is the limit."""


class Counts(NamedTuple):
    """The amounts of work of a product. The fit passes arrays."""

    programs: Any
    """The most programs of any multiprocessor."""
    rounds: Any
    """How many of these run one after another."""
    steps: Any
    """Steps of 128 input features in a program."""
    megabytes: Any
    """Millions of bytes read from memory or written to it."""
    ragged_steps: Any
    """Thousands of steps of all tiles that are not full of rows."""
    megaparts: Any
    """Millions of numbers in parts."""


def microseconds(counts: Counts, of: Coefficients, memory_scale: float = 1.0) -> Any:
    """Estimate the time of a product. Memory, the latency of steps and the work of a multiprocessor overlap: the
    longest counts, and somewhat more where two are about equal."""
    memory = counts.megabytes * of.memory * memory_scale
    latency = counts.rounds * counts.steps * of.latency
    work = counts.programs * counts.steps * of.step
    longest = (memory**4 + latency**4 + work**4) ** 0.25
    after = counts.rounds * of.end + counts.ragged_steps * of.ragged + counts.megaparts * of.parts
    return of.fixed + longest + after


def count(launch: AnyLaunch, kind: Kind, num_rows: int, out_features: int, in_features: int, num_sms: int) -> Counts:
    """Count the work of a product on a GPU of `num_sms` multiprocessors."""
    num_parts, out_bytes = 1, 2
    tiles: float
    if isinstance(launch, DecodeLaunch):
        from nvcli.kernels.triton.products import hopper_fp8_decode

        row_tile, num_parts = launch.row_tile, launch.num_parts
        work = hopper_fp8_decode.share_out(out_features, num_rows, launch.row_tile, num_parts, num_sms)
        tiles = work.num_items(num_parts)
        programs = rounds = work.cost(num_parts, num_sms)
        steps: float = ceil_div(ceil_div(in_features, _STEP), num_parts)
    elif isinstance(launch, ProductLaunch):
        row_tile, num_parts = launch.row_tile, launch.num_parts
        tiles = ceil_div(num_rows, row_tile) * ceil_div(out_features, launch.out_tile) * num_parts
        programs, rounds = ceil_div(tiles, num_sms), ceil_div(tiles, num_sms * residents(launch))
        steps = ceil_div(ceil_div(in_features, launch.in_tile), num_parts) * launch.in_tile / _STEP
    else:
        row_tile = out_tile = _TORCH_TILE
        if isinstance(launch, HopperFP8Launch):
            row_tile, out_tile = launch.groups * 64, launch.blocks * 128
        tiles = ceil_div(num_rows, row_tile) * ceil_div(out_features, out_tile)
        programs = rounds = ceil_div(tiles, num_sms)
        steps = ceil_div(in_features, _STEP)
    numbers = num_rows * out_features * num_parts
    if kind == "gated":
        numbers, out_bytes = numbers // 2, 1
    elif num_parts > 1:
        out_bytes = 4
    moved = out_features * in_features + num_rows * in_features + numbers * out_bytes
    ragged_steps = tiles / ceil_div(num_rows, row_tile) * steps / 1000 if num_rows % row_tile else 0.0
    return Counts(programs, rounds, steps, moved / 1e6, ragged_steps, numbers / 1e6 if num_parts > 1 else 0.0)


@lru_cache(maxsize=64)
def residents(launch: ProductLaunch) -> int:
    """Count the programs whose tiles fit in the shared memory of a multiprocessor."""
    tiles = launch.num_stages * (launch.row_tile + launch.out_tile) * launch.in_tile
    return max(1, _SHARED_BYTES // (tiles + _PROGRAM_BYTES))


class Times(NamedTuple):
    """The contents of `launch_times.json`."""

    bandwidth: float
    """Memory bandwidth of the GPU that was measured, in bytes per microsecond, from its clock and bus width."""
    ways: Mapping[str, Mapping[AnyLaunch, Coefficients]]
    """Launches and their coefficients by "channel", "block" and "gated"."""
    activation: tuple[float, float]
    """Microseconds of an activation by itself: for the launch, and for a million bytes."""


def choose(
    kind: Kind, x: QuantisedRows, weight: Tensor, accumulation: FP8Accumulation = "exact"
) -> ProductLaunch | DecodeLaunch | HopperFP8Launch | None:
    """Choose the launch of a product with a weight [out, in]. None: torch multiplies; or of a gated one with a weight
    [2 out, in], that the activation follows a product."""
    num_rows = len(x.codes)
    has_torch = weight.is_cuda and (kind != "block" or fp8_block_product.takes(x, weight))
    is_whole = num_rows % _TORCH_TILE == 0
    has_16_bits = x.dtype.itemsize == 2
    return choose_for(
        kind, rounded(num_rows), *weight.shape, weight.device, accumulation, has_torch, is_whole, has_16_bits
    )


def rounded(num_rows: int) -> int:
    """Round a number of rows up to one of the few that the choice distinguishes."""
    bits = max(0, num_rows - 1).bit_length()
    step = 1 << bits if num_rows > _FINE_ROWS else max(8, 1 << bits >> 4)
    return -(-num_rows // step) * step


@lru_cache(maxsize=8192)
def choose_for(
    kind: Kind,
    num_rows: int,
    out_features: int,
    in_features: int,
    device: torch.device,
    accumulation: FP8Accumulation = "exact",
    has_torch: bool = True,
    is_whole: bool = True,
    has_16_bits: bool = True,
) -> ProductLaunch | DecodeLaunch | HopperFP8Launch | None:
    """Choose as `choose` does. `has_torch` says whether torch has such a product, `is_whole` whether the rows are whole
    tiles of it, and `has_16_bits` whether the result has."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != _CAPABILITY:
        return None if kind == "gated" else _choose_for_other_gpus(num_rows, has_torch=has_torch)
    kernels: tuple[type, ...] = (ProductLaunch,)
    is_aligned = out_features % FP8_ALIGNMENT == in_features % FP8_ALIGNMENT == 0
    if device.type == "cuda" and is_aligned and has_known_gluon():
        kernels += (DecodeLaunch, HopperFP8Launch) if has_16_bits else (DecodeLaunch,)
    if has_torch and (is_whole or num_rows > _RAGGED_ROWS or HopperFP8Launch not in kernels):
        kernels += (TorchLaunch,)
    of_gpu = (num_multiprocessors(device), _times().bandwidth / _bandwidth(device))
    product = (num_rows, out_features, in_features)
    took, launch = fastest(_times(), kind, *product, *of_gpu, accumulation, kernels)
    if kind == "gated":
        separately, _ = fastest(_times(), "channel", *product, *of_gpu, accumulation, kernels)
        fixed, of_bytes = _times().activation
        separately += fixed + num_rows * out_features * 2.5e-6 * of_bytes * of_gpu[1]
        is_fused = out_features % (2 * FP8_BLOCK) == 0 and took < separately
        return launch if is_fused and isinstance(launch, HopperFP8Launch) else None
    return None if isinstance(launch, TorchLaunch) else launch


def _choose_for_other_gpus(num_rows: int, *, has_torch: bool) -> ProductLaunch | None:
    launch = next((launch for most_rows, launch in _OTHER_GPUS if num_rows <= most_rows), None)
    return launch if launch is not None or has_torch else _OTHER_GPUS[-1][1]


def fastest(
    times: Times,
    kind: Kind,
    num_rows: int,
    out_features: int,
    in_features: int,
    num_sms: int,
    memory_scale: float,
    accumulation: FP8Accumulation,
    kernels: tuple[type, ...],
) -> tuple[float, AnyLaunch | None]:
    """Return the least estimated time among the launches of `kernels`, and that launch. `memory_scale`: time of a byte
    from memory, relative to the GPU where `times` were measured."""

    def time(way: tuple[AnyLaunch, Coefficients]) -> float:
        counts = count(way[0], kind, num_rows, out_features, in_features, num_sms)
        sustained = way[1].sustained if num_rows > _FINE_ROWS else 1.0
        return float(microseconds(counts, way[1], memory_scale)) * sustained

    ways = (way for way in _ways(times, kind, num_rows, in_features, accumulation) if isinstance(way[0], kernels))
    return min(((time(way), way[0]) for way in ways), key=lambda found: found[0], default=(math.inf, None))


def _ways(
    times: Times, kind: Kind, num_rows: int, in_features: int, accumulation: FP8Accumulation
) -> Iterator[tuple[AnyLaunch, Coefficients]]:
    """Yield the launches to choose from, with all numbers of parts."""
    for launch, of in times.ways[kind if kind in ("block", "gated") else "channel"].items():
        if not _adds_up(launch, accumulation) or not _was_measured(launch, kind, num_rows):
            continue
        yield launch, of
        if kind == "sum" and isinstance(launch, ProductLaunch | DecodeLaunch):
            in_tile = launch.in_tile if isinstance(launch, ProductLaunch) else _STEP
            yield from ((launch._replace(num_parts=n), of) for n in _NUM_PARTS if 2 * n * in_tile <= in_features)


def _adds_up(launch: AnyLaunch, accumulation: FP8Accumulation) -> bool:
    """Whether a launch has the accumulation that is asked for."""
    if isinstance(launch, TorchLaunch):
        return launch.accumulation in (accumulation, "block")
    return accumulation == "fast" or not isinstance(launch, HopperFP8Launch) or launch.unit_tiles is not None


def _was_measured(launch: AnyLaunch, kind: Kind, num_rows: int) -> bool:
    """Whether a launch was measured with this many rows. Others are not worth a try."""
    if isinstance(launch, ProductLaunch):
        most_tiles = (
            math.inf if kind == "block" and launch.out_tile == _STEP else (8 if launch.out_tile == _STEP else 4)
        )
        return num_rows <= most_tiles * launch.row_tile and (launch.row_tile <= 32 or launch.row_tile < 2 * num_rows)
    if isinstance(launch, DecodeLaunch):
        return num_rows <= _DECODE_TILES * launch.row_tile
    return not isinstance(launch, HopperFP8Launch) or num_rows + (kind == "gated") > _HOPPER_ROWS


@lru_cache(maxsize=1)
def _times() -> Times:
    return read_times(json.loads(files(__package__).joinpath("launch_times.json").read_text()))


def read_times(found: Mapping[str, Any]) -> Times:
    """Return what a file like `launch_times.json` says."""
    ways = {
        kind: {read_launch(name): Coefficients(*numbers) for name, numbers in found[kind].items()}
        for kind in ("channel", "block", "gated")
    }
    fixed, of_bytes = found["activation"]
    return Times(found["bandwidth"], ways, (fixed, of_bytes))


def read_launch(name: str) -> AnyLaunch:
    """Return the launch that `name` stands for: a word for the kernel, and its numbers."""
    kernel, *words = name.split(",")
    if kernel == "torch":
        return TorchLaunch(words[0])  # type: ignore[arg-type]
    if kernel == "hopper":
        groups, blocks, unit_tiles = map(int, words)
        return HopperFP8Launch(groups, blocks, unit_tiles or None)
    if kernel == "decode":
        return DecodeLaunch(*map(int, words))
    row_tile, out_tile, in_tile, num_stages, num_warps, *parts = map(int, words)
    return ProductLaunch(row_tile, out_tile, in_tile, num_stages, num_warps, num_parts=parts[0] if parts else 1)


@lru_cache(maxsize=64)
def _bandwidth(device: torch.device) -> float:
    """Return the bandwidth of a GPU's memory in bytes per microsecond, from its clock and bus width. A partition of a
    GPU may report zeros: it is taken to have the bandwidth of the GPU that was measured."""
    if device.type != "cuda":
        return _times().bandwidth
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    found = 2e-3 * properties["mem_clock_rate"] * properties["mem_bus_width"] / 8
    return float(found) or _times().bandwidth
