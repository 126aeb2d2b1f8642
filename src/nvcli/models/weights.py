"""How a model's parameters come from a checkpoint: each layer declares it, the loader carries it out.

A layer knows its geometry (which rows or columns of which checkpoint tensor this rank owns, and where they go); the
loader knows files and threads. Neither knows the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """One rectangular piece of a parameter of the declaring module, and the checkpoint tensor it is read from."""

    tensor: str
    """Full name in the checkpoint."""
    shape: tuple[int, ...]
    """Of the whole tensor, in the checkpoint."""
    read: tuple[slice, ...]
    """What this rank reads of it; may be empty, when only the tensor's existence and shape matter to this rank."""
    parameter: str
    """Attribute of the module."""
    write: tuple[slice, ...]
    """Where in the parameter it goes; as large as `read`."""


class WeightModule(nn.Module, ABC):
    """A module with parameters of its own. What its sources leave uncovered is padding and becomes zero."""

    @abstractmethod
    def weight_sources(self, path: str) -> Iterator[WeightSource]:
        """Sources of this module's own parameters; `path` is the module's dotted name in the model."""


class DerivedModule(nn.Module, ABC):
    """A module with buffers that follow from the config rather than from the checkpoint."""

    @abstractmethod
    def derive(self, device: torch.device) -> None:
        """Compute the buffers on `device`; called once, when the model leaves the meta device."""


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)
