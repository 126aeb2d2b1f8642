"""DraftHead: the interface of modules that draft tokens from a target's hidden states, for `worker/runner`.

A pass takes, for each position p, the token at p + 1 and a state for p, and predicts the token at p + 2. The state is
the target's where the target has computed p, and otherwise what the head itself returned for p - 1.
Shapes: T tokens, N of them computed to the end, H hidden, M tokens of this rank's part of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.image_tokens import ImageTokens
from nvcli.models.layers import Angles


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The parts of the target that heads use. A head keeps them outside its own submodules."""

    embed: Callable[[Tensor, ImageTokens | None], Tensor]
    """[T] ids → [T, H], the target's embeddings, with those of images in their places."""
    compute_logits: Callable[[Tensor], Tensor]
    """[N, H] → [N, M], the target's LM head."""
    angles: Callable[[ForwardBatch], Angles]
    """The angles of the target's and the head's rotations for the tokens of a batch."""
    vocab_size: int


class DraftHead(nn.Module, ABC):
    """One rank's part of a head, cut over the ranks as its target is. Its methods are collective."""

    def read(self, states: Tensor) -> Tensor:
        """Make what `forward` takes from the target's states: [T, K] → [T, H]. K is H, or H for each of the head's
        `aux_layers`."""
        return states

    @abstractmethod
    def forward(
        self, token_ids: Tensor, states: Tensor, batch: ForwardBatch, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a pass over the tokens of a batch, and store their keys.

        token_ids: [T], the token after each position, or with a model of its own the one at the position, among which
        `batch.images` stand for images; states: [T, H], which may be overwritten; rows: [N] int64, the tokens that are
        computed to the end; None: all. Returns what `compute_logits` takes, [N, H], and the states for the next pass,
        [N, H].
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the target's vocabulary, as `CausalLM.compute_logits` does: [N, H] → [N, M]. Tokens that
        the head does not know have -inf."""
