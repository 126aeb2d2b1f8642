"""MTPConfig: the head for multi-token prediction that some checkpoints bring (https://arxiv.org/abs/2412.19437, section
2.2). `draft_heads/mtp.py` computes it. Torch-free.

The head has the embedding and the LM head of its target. The decoder's names of its tensors are those of Qwen's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.draft_head_config import DraftHeadConfig
from nvcli.models.layer_config import LayerConfig
from nvcli.models.mixers.mixer import Block, LayerContext, Mixer, NormConfig
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix

PREFIX = "mtp."
LAYER, FC, NORM = f"{PREFIX}layers.0", f"{PREFIX}fc", f"{PREFIX}norm"
NORM_OF_EMBEDDING, NORM_OF_HIDDEN = f"{PREFIX}pre_fc_norm_embedding", f"{PREFIX}pre_fc_norm_hidden"
_NAMES_IN_LAYER = {
    "enorm.": f"{NORM_OF_EMBEDDING}.",
    "hnorm.": f"{NORM_OF_HIDDEN}.",
    "eh_proj.": f"{FC}.",
    "shared_head.norm.": f"{NORM}.",
}
"""Names in files whose head is one more layer of the decoder, as in DeepSeek-V3, and in the decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(DraftHeadConfig):
    """A head with one layer, which is applied again for each further token."""

    module: ClassVar[str] = "nvcli.models.draft_heads.mtp:MTPHead"
    layer: LayerConfig
    norm: NormConfig
    stored_layer: int | None = None
    """The number of the decoder's layer that files name it as; None: files have the decoder's names."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.layer.mixer,)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.layer.blocks

    def tensors(self, context: LayerContext, vocab_size: int) -> Iterator[TensorSpec]:
        hidden = context.hidden_size
        yield matrix(FC, (hidden, 2 * hidden), Sharding.REPLICATED, context.dtype, "MLP")
        for name in (NORM_OF_EMBEDDING, NORM_OF_HIDDEN, NORM):
            yield from context.norm_tensors(name)
        yield from self.layer.tensors(LAYER, context)

    def layout(self, layout: CheckpointLayout) -> CheckpointLayout:
        if self.stored_layer is None:
            return replace(layout, of_head=(PREFIX,))
        stored = f"model.layers.{self.stored_layer}."
        blocks = (*(f"{block.name}." for block in self.layer.blocks), *(f"{n}." for n in self.layer.norms.names()))
        return replace(
            layout,
            of_head=tuple(stored + name for name in (*_NAMES_IN_LAYER, *blocks)),
            renamed=(
                *((stored + found, wanted) for found, wanted in _NAMES_IN_LAYER.items()),
                (stored, f"{LAYER}."),
                *layout.renamed,
            ),
        )
