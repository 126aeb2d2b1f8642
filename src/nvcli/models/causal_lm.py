"""CausalLM: what the runner, the loader and the tests may expect of every model family."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from torch import Tensor, nn

from nvcli.attention.backend import AttentionSpec
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.distributed.stage import Stage
from nvcli.distributed.tensor_parallel import StageState
from nvcli.models.config import ModelConfig
from nvcli.models.layers import Attention

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head, cut for one rank. Module names follow the checkpoint's tensor names."""

    def __init__(self, config: ModelConfig, stage: Stage) -> None:
        super().__init__()
        self.config = config
        self.stage = stage

    @abstractmethod
    def forward(self, batch: ForwardBatch, received: StageState | None = None) -> Tensor | StageState:
        """Hidden states behind the final norm: [T, H], alike on every rank of the stage; of a stage that is not the
        last, what the next one needs. Stores K/V in the batch's cache.

        `received`: what the stage before handed over, which is written over; None in the first one.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, M] in the model's dtype: of this rank's part of the vocabulary, M tokens from rank × M on.

        All ranks have the same M: tokens from vocab_size on are padding. For the last stage only.
        """

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """One for each layer of this rank, in the order of the KV cache's layers."""
        return tuple(module.spec for module in self.modules() if isinstance(module, Attention))

    @property
    def kv_groups(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        return ((None, tuple(range(len(self.attention_layers)))),)

    def is_ignored(self, tensor: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model has no use for."""
        return self._is_tied_head(tensor) or tensor.endswith("rotary_emb.inv_freq") or self._is_elsewhere(tensor)

    def original_of(self, tensor: str) -> str | None:
        """The tensor that this one, which is ignored, must be a copy of; None: its values do not matter here."""
        return _EMBEDDING if self._is_tied_head(tensor) and self.stage.is_last else None

    def _is_tied_head(self, tensor: str) -> bool:
        return self.config.tie_word_embeddings and tensor == _HEAD

    def _is_elsewhere(self, tensor: str) -> bool:
        """Whether it is another stage's, which looks for it."""
        if match := _LAYER.match(tensor):
            number, num_layers = int(match[1]), self.config.num_layers
            return number < num_layers and number not in self.stage.layers(num_layers)
        if tensor == _EMBEDDING:
            return not self.stage.is_first
        return tensor in ("model.norm.weight", _HEAD) and not self.stage.is_last
