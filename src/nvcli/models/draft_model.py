"""DraftModel: a small model that drafts for a larger one, cut over the ranks as that is.

Its keys lie in the KV blocks of the target, at the tokens' own positions, and it reads no states of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import CacheLayer, CacheSpec
from nvcli.models.causal_lm import CausalLM
from nvcli.models.draft_heads.head import DraftHead, SharedParts
from nvcli.models.draft_model_config import PREFIX, DraftModelConfig
from nvcli.models.parallel import BuildContext


class DraftModel(DraftHead):
    """The decoder of the small model with its LM head."""

    def __init__(
        self,
        build: BuildContext,
        config: DraftModelConfig,
        shared: SharedParts,
        caches: Sequence[CacheLayer[CacheSpec]],
    ) -> None:
        super().__init__()
        own = {name.removeprefix(PREFIX): spec for name, spec in build.tensors.items() if name.startswith(PREFIX)}
        build = replace(build, tensors=own, has_adapters=False)
        specs = [cache.spec for cache in caches]
        self.model = CausalLM(config.model, build, specs=specs, cache_layer=caches[0].number)

    def forward(
        self, token_ids: Tensor, states: Tensor, batch: ForwardBatch, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hidden = self.model(replace(batch, input_ids=token_ids, logits_rows=rows))
        return hidden, hidden.new_empty(len(hidden), 0)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)
