"""MTPConfig: the head for multi-token prediction that some checkpoints bring (https://arxiv.org/abs/2412.19437, section
2.2). `draft_heads/mtp.py` computes it. Torch-free.

The head has the embedding and the LM head of its target. The decoder's names of its tensors are those of Qwen's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.draft_head_config import DraftHeadConfig
from nvcli.models.layer_config import LayerConfig
from nvcli.models.mixers.mixer import Block, LayerContext, Mixer, NormConfig
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix

PREFIX = "mtp."
LAYER, FC, NORM = f"{PREFIX}layers.0", f"{PREFIX}fc", f"{PREFIX}norm"
NORM_OF_EMBEDDING, NORM_OF_HIDDEN = f"{PREFIX}pre_fc_norm_embedding", f"{PREFIX}pre_fc_norm_hidden"
Names = tuple[tuple[str, str], ...]
"""Beginnings of names: (in files, in the decoder)."""


def names_of_layer(layer: LayerConfig, stored: str, norm: str = "") -> Names:
    """Return the names of a head that files have as a layer `stored`, as DeepSeek-V3's do. `norm` follows the names
    of its norms of the embedding and the hidden state."""
    names = {
        f"enorm{norm}.": f"{NORM_OF_EMBEDDING}.",
        f"hnorm{norm}.": f"{NORM_OF_HIDDEN}.",
        "eh_proj.": f"{FC}.",
        "shared_head.norm.": f"{NORM}.",
    }
    parts = *(name for name, _ in layer.named_blocks), *layer.norms.names()
    names |= {f"{part}.": f"{LAYER}.{part}." for part in parts}
    return tuple((stored + found, wanted) for found, wanted in names.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(DraftHeadConfig):
    """A head with one layer, which is applied again for each further token."""

    module: ClassVar[str] = "nvcli.models.draft_heads.mtp:MTPHead"
    reads_images: ClassVar[bool] = True
    layer: LayerConfig
    norm: NormConfig
    stored_names: Names = ()
    """The names of its tensors in files; empty: they are the decoder's."""

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

    def for_length(self, max_model_len: int) -> Self:
        return replace(self, layer=self.layer.for_length(max_model_len))

    def unused_tensors(self) -> Iterator[str]:
        for name, block in self.layer.named_blocks:
            yield from block.unused_tensors(f"{LAYER}.{name}")

    def layout(self, layout: CheckpointLayout) -> CheckpointLayout:
        if not self.stored_names:
            return replace(layout, of_head=(PREFIX,))
        of_head = tuple(found for found, _ in self.stored_names)
        return replace(layout, of_head=of_head, renamed=(*self.stored_names, *layout.renamed))
