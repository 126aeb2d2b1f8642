"""CausalLM: what the runner, the loader and the tests may expect of every model family."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from nvcli.attention.backend import AttentionSpec
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.models.config import ModelConfig
from nvcli.models.parallel import BuildContext


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head, cut for one rank. Module names follow the checkpoint's tensor names."""

    config: ModelConfig

    @abstractmethod
    def __init__(self, config: ModelConfig, build: BuildContext) -> None: ...

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states behind the final norm: [T, H], alike on every rank."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """[N, H] → [N, vocab_size] on rank 0, None on the other ranks; collective."""

    @property
    @abstractmethod
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One for each layer of this rank, in the order of the KV cache's layers."""

    @abstractmethod
    def is_ignored(self, tensor: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model has no use for."""
