"""The interface of attention backends.

A backend says why it cannot serve a given case (`unsupported`), prepares a step outside any CUDA graph (`plan`) and
stores and attends inside it (`forward`). The `torch` backend defines the semantics; the others are held to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Parameters of one layer's attention on this rank."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it before the softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """What a backend is asked to serve in a run."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class AttentionBackend(ABC):
    """One run's attention. Stateless between steps except for what `plan` prepares."""

    name: str

    @abstractmethod
    def __init__(self, case: AttentionCase) -> None: ...

    @classmethod
    @abstractmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        """Reasons why this backend cannot serve `case`; empty when it can. Imports nothing heavy when it cannot."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for the step's layers; called once a step, outside CUDA graphs."""

    @abstractmethod
    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Store k and v at `batch.slot_mapping`, then attend causally to each request's whole past.

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim] → [T, num_heads, head_dim].
        """
