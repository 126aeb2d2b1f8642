"""CausalLM: what the runner, the loader and the tests may expect of every model family."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from nvcli.attention.backend import AttentionSpec
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.models.config import ModelConfig
from nvcli.models.layers import Attention


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head, cut for one rank. Module names follow the checkpoint's tensor names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states behind the final norm: [T, H], alike on every rank. Stores K/V in the batch's cache."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, M] in the model's dtype: of this rank's part of the vocabulary, M tokens from rank × M on.

        All ranks have the same M: tokens from vocab_size on are padding.
        """

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One for each layer of this rank, in the order of the KV cache's layers."""
        return tuple(module.spec for module in self.modules() if isinstance(module, Attention))

    def is_ignored(self, tensor: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model has no use for."""
        is_tied_head = self.config.tie_word_embeddings and tensor == "lm_head.weight"
        return is_tied_head or tensor.endswith("rotary_emb.inv_freq")
