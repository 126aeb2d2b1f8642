"""DraftHeadConfig: a head that drafts tokens from the hidden states of a model, its target. Torch-free.

A head's keys at position p are made from the token at p + 1 and the target's hidden state at p, so that they lie in the
same KV blocks as the target's own. Its layers are numbered after the target's in the KV cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from nvcli.attention.spec import CacheLayer, CacheSpec
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.mixers.mixer import Block, LayerContext, Mixer
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.tensor_spec import TensorSpec


class DraftHeadConfig(ABC):
    """The settings of a head; subclasses are frozen dataclasses."""

    module: ClassVar[str]
    """The module that computes it, a `DraftHead`: `package.file:Class`, created with the arguments of `build`."""

    reads_states: ClassVar[bool] = True
    """Whether it reads states of the target, and so the token after each position. A model of its own reads the tokens
    at the positions themselves."""

    reads_images: ClassVar[bool] = False
    """Whether it reads the embeddings of images in place of those of their tokens, as its target does. Others learn of
    images from the target's states, or not at all."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers before which the head reads the residual stream, ascending; empty: it reads the hidden
        states after the target's final norm."""
        return ()

    @property
    @abstractmethod
    def mixers(self) -> tuple[Mixer, ...]:
        """The token mixers of its layers, which have keys and values in the target's blocks."""

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of its layers, which are cut over the ranks."""

    def state_size(self, hidden_size: int) -> int:
        """Return the size of its own states, under a target of this hidden size."""
        return hidden_size

    @abstractmethod
    def tensors(self, context: LayerContext, vocab_size: int) -> Iterator[TensorSpec]:
        """Yield its own tensors, without those that it shares with the target."""

    def for_length(self, max_model_len: int) -> Self:
        """Return how runs of at most this many tokens compute it."""
        return self

    def unused_tensors(self) -> Iterator[str]:
        """Yield the names of tensors that files may have for it but that are not used."""
        return iter(())

    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        """Return the tensors that the head has in files of its own, by the decoder's names; empty: they are among its
        target's, or have random weights."""
        return {}

    def layout(self, layout: CheckpointLayout) -> CheckpointLayout:
        """Return the layout of the target's files, with the head's tensors among those that are read."""
        return layout

    def build(self, build: object, shared: object, caches: Sequence[CacheLayer[CacheSpec]]) -> Any:
        """Create the `DraftHead` that computes it. Imports torch.

        `build` is a `BuildContext`; `shared` are the target's `SharedParts`; `caches` are the parts of
        the rank's KV cache that `mixers` have.
        """
        return resolve_name(self.module)(build, self, shared, caches)
