"""CausalLM: what the runner, the loader and the tests may expect of every model family."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec, CacheSpec, attention_kinds
from nvcli.distributed.tensor_parallel import StageState
from nvcli.models.config import ModelConfig
from nvcli.models.layers import TokenMixer
from nvcli.models.parallel import BuildContext
from nvcli.models.weights import WeightModule


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head, cut for one rank. Module names follow the checkpoint's tensor names."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.group = build.group
        self.stage = build.stage
        self.tensors = build.tensors
        """The checkpoint tensors that this rank's stage is made of, by name."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, received: StageState | None = None) -> Tensor | StageState:
        """Compute the hidden states behind the final norm of the tokens that need logits (`batch.logits_rows`): [N, H],
        alike on every rank of the stage. A stage that is not the last gives what the next one needs. Keys and values
        of all tokens are stored in the batch's cache.

        `received` is what the stage before sent, which is written over; None in the first stage.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute [N, H] → [N, M] in the model's dtype, for this rank's part of the vocabulary: M tokens from
        rank × M on. Only the last stage can.

        All ranks have the same M: tokens from vocab_size on are padding.
        """

    @property
    def mixers(self) -> tuple[TokenMixer, ...]:
        """What mixes the tokens in each layer of this rank."""
        return tuple(module for module in self.modules() if isinstance(module, TokenMixer))

    @property
    def cache_layers(self) -> tuple[CacheSpec, ...]:
        """What each layer of this rank keeps in the KV cache, in the order of the layers."""
        return tuple(mixer.spec for mixer in self.mixers)

    @property
    def attention_kinds(self) -> tuple[AttentionSpec, ...]:
        """The kinds of attention of this rank, each once."""
        return attention_kinds(self.cache_layers)

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of this rank's parameters by what they belong to. One that is shared counts where it is first."""
        parts: dict[str, int] = {}
        for module in self.modules():
            if isinstance(module, WeightModule):
                sources = list(module.weight_sources())
                found = {source.parameter: source.tensor.part for source in sources}
                found |= {source.scales.parameter: source.tensor.part for source in sources if source.scales}
                if any(source.scales is not None and source.scales.order_row is not None for source in sources):
                    found["column_order"] = sources[0].tensor.part
                for name, part in found.items():
                    parameter = getattr(module, name)
                    parts[part] = parts.get(part, 0) + parameter.numel() * parameter.element_size()
        return parts
