"""The mapping from checkpoint tensors to a model's parameters: layers declare it, and the loader carries it out.

A layer knows which part of which tensor this rank has (`geometry.py`) and where it goes; the loader knows files and
threads. Neither knows the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling, W4Format, scale_shape
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.tensor_spec import TensorSpec


class ScaleTarget(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The destination of the codes' scales, in the module that declares the source of the codes."""

    parameter: str
    write: tuple[int | slice, ...]
    scaling: FP8Scaling | W4Format
    """The scaling in FP8, or the format in 4 bits."""
    order_row: int | None = None
    """The row of the module's `column_order` that takes the order of the weight's columns; None: it has none."""


class WeightSource(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rectangular piece of a parameter, and the part of a checkpoint tensor that it is read from."""

    tensor: TensorSpec
    expert: int | None = None
    """The expert whose tensor it is, if the tensor is of experts."""
    read: tuple[slice, ...]
    """This rank's part of the stored tensor. It is empty if that is all padding."""
    parameter: str
    """The parameter's name in the module that declares the source."""
    write: tuple[int | slice, ...]
    """Its place in the parameter; as large as `read`, or as the words of 4-bit codes."""
    scales: ScaleTarget | None = None
    """The destination of the scales, for a parameter that holds codes; None for other parameters."""

    @property
    def stored_name(self) -> str:
        """The name of the checkpoint's tensor that is read."""
        return self.tensor.stored_name(self.expert)

    def in_fp8(self, parameter: str, scaling: FP8Scaling) -> WeightSource:
        """Return the same source for a parameter of FP8 codes, with its scales in `parameter`."""
        *outer, rows, _ = self.write
        assert isinstance(rows, slice)
        if scaling == "block":  # ModelConfig.check_tensor_parallel comes first
            assert rows.start % FP8_BLOCK == 0, "blocks of fused projections must not overlap"
            assert all(part.start % FP8_BLOCK == 0 for part in self.read), "blocks must not be cut"
            rows = slice(rows.start // FP8_BLOCK, ceil_div(rows.stop, FP8_BLOCK))
        return replace(self, scales=ScaleTarget(parameter=parameter, write=(*outer, rows), scaling=scaling))

    def in_w4(self, parameter: str, kept: W4Format, order_row: int | None = None) -> WeightSource:
        """Return the same source for a parameter of words, with its scales in `parameter`."""
        *outer, rows, _ = self.write
        scales = ScaleTarget(parameter=parameter, write=(*outer, slice(None), rows), scaling=kept, order_row=order_row)
        return replace(self, write=(*outer, rows, slice(None)), scales=scales)


class WeightModule(nn.Module, ABC):
    """A module with parameters of its own. Elements that its sources do not cover are padding and become zero."""

    @abstractmethod
    def weight_sources(self) -> Iterator[WeightSource]:
        """The sources of this module's own parameters. A module that uses another one's parameter declares none."""

    def fill_tables(self) -> None:
        """Fill parameters that zeros or random numbers would make invalid, until they are loaded."""

    def weight_problem(self) -> str | None:
        """Say why the loaded weights cannot be used together, and what to do; None if they can."""
        return None


class DerivedModule(nn.Module, ABC):
    """A module with buffers that follow from the config rather than from the checkpoint."""

    @abstractmethod
    def derive(self, device: torch.device) -> None:
        """Compute the buffers on `device`; called once, when the model leaves the meta device."""


def empty_parameter(tensor: TensorSpec, *shape: int) -> nn.Parameter:
    """Return a parameter of this shape, in the type in which ranks keep the tensor."""
    memory: Tensor = torch.empty(shape, dtype=getattr(torch, tensor.dtype))
    return nn.Parameter(memory, requires_grad=False)


def empty_fp8_scales(weight: nn.Parameter, scaling: FP8Scaling) -> nn.Parameter:
    """Return the scales of a weight [..., out, in]: [..., out], or for blocks [..., out / 128, in / 128], rounded
    up."""
    *outer, rows, columns = weight.shape
    scales = torch.empty(*outer, *scale_shape(rows, columns, scaling), dtype=torch.float32)
    return nn.Parameter(scales, requires_grad=False)


def empty_w4(shape: Sequence[int], kept: W4Format) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the words and the scales of a weight [..., out, in] in 4 bits: [..., out, words] int16 and [..., groups,
    out] int32."""
    *outer, rows, columns = shape
    words = torch.empty(*outer, rows, kept.words_of_row(columns), dtype=torch.int16)
    scales = torch.empty(*outer, kept.scales_of_row(columns), rows, dtype=torch.int32)
    return nn.Parameter(words, requires_grad=False), nn.Parameter(scales, requires_grad=False)


def stacked_rows(
    parameter: str, parts: Iterable[tuple[TensorSpec | None, tuple[slice, ...]]]
) -> Iterator[WeightSource]:
    """Yield the sources of a parameter that holds parts of tensors one after the other, by rows. `parts`: (tensor,
    what is read of it); without a tensor, as many rows are padding."""
    start = 0
    for tensor, read in parts:
        rows = slice(start, start + length(read[0]))
        if tensor is not None:
            write = rows, *(slice(0, length(part)) for part in read[1:])
            yield WeightSource(tensor=tensor, read=read, parameter=parameter, write=write)
        start = rows.stop


def length(part: slice) -> int:
    """Return the number of indices that the slice covers."""
    return int(part.stop) - int(part.start)
