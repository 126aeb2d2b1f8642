"""Eagle3Head: the computation of an EAGLE-3 head (`eagle3_config.py`), whose layer is cut over the ranks by heads and
by intermediate size. The product that combines states and an LM head of its own are whole on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import CacheLayer, CacheSpec
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.draft_heads.eagle3_config import (
    EMBEDDING,
    FC,
    HEAD,
    HIDDEN_NORM,
    INPUT_NORM,
    LAYER,
    MLP_NORM,
    NORM,
    NORM_OF_STATES,
    NORMS_OF_STATES,
    Eagle3Config,
)
from nvcli.models.draft_heads.head import DraftHead, SharedParts
from nvcli.models.layers import FeedForward, InputNorm, TokenMixer
from nvcli.models.parallel import BuildContext, TensorShard
from nvcli.models.weights import DerivedModule


class Eagle3Head(DraftHead):
    """A head with one layer, which is applied again for each further token."""

    def __init__(
        self, build: BuildContext, config: Eagle3Config, shared: SharedParts, caches: Sequence[CacheLayer[CacheSpec]]
    ) -> None:
        super().__init__()
        self.config = config
        self.group = build.group
        self.product = build.product
        self._shared = shared

        def norm(name: str) -> InputNorm:
            return InputNorm(build, name, config.norm)

        self.embed_tokens = TensorShard(build, f"{EMBEDDING}.weight") if config.has_embedding else None
        self.norm_of_states = norm(NORM_OF_STATES) if config.norms_states else None
        numbers = range(len(config.aux_layers)) if config.norms_each_state else ()
        self.norms_of_states = nn.ModuleList(norm(f"{NORMS_OF_STATES}.{number}") for number in numbers)
        self.fc = TensorShard(build, f"{FC}.weight")
        self.input_norm, self.hidden_norm = norm(INPUT_NORM), norm(HIDDEN_NORM)
        (cache,) = caches
        self.mixer: TokenMixer = config.attention.build(build, LAYER, config.norm, cache)
        self.mlp_norm = norm(MLP_NORM)
        self.mlp: FeedForward = config.mlp.build(build, LAYER, config.norm)
        self.norm = norm(NORM)
        self.lm_head: TensorShard | None = None
        if config.has_lm_head:
            self.lm_head = TensorShard(build, f"{HEAD}.weight")
        elif config.is_tied:
            self.lm_head = self.embed_tokens
        ids, per_rank = config.draft_ids, ceil_div(shared.vocab_size, build.group.size)
        first = build.group.rank * per_rank
        if ids is None:
            ids = tuple(range(shared.vocab_size))
        self.drafted = DraftTokens(ids, slice(first, first + per_rank)) if self.lm_head is not None else None

    def read(self, states: Tensor) -> Tensor:
        if self.norm_of_states is not None:
            states = self.norm_of_states(None, states)
        if self.norms_of_states:
            parts = torch.split(states, self.config.target_hidden_size, dim=1)
            pairs = zip(self.norms_of_states, parts, strict=True)
            states = torch.cat([norm(None, part.contiguous()) for norm, part in pairs], dim=1)
        return self.product(states, self.fc.weight)

    def forward(
        self, token_ids: Tensor, states: Tensor, batch: ForwardBatch, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.embed_tokens is None:
            embeddings = self._shared.embed(token_ids, batch.images)
        else:
            embeddings = F.embedding(token_ids, self.embed_tokens.weight)
        normed = self.hidden_norm(None, states)
        x = torch.cat([self.input_norm(None, embeddings), normed], dim=1)
        residual = normed if self.config.norms_residual else states
        mixed = self.mixer(x, self._shared.angles(batch), batch)
        if rows is not None:
            mixed, residual = mixed[rows], residual[rows]
        delta = self.mixer.o_proj(mixed, residual)
        delta = self.mlp(self.mlp_norm(delta, residual), residual)
        hidden: Tensor = self.norm(delta, residual)
        if self.config.feeds_normed:
            return hidden, hidden
        if self.group.size > 1:
            hidden = hidden.clone()  # it holds until the next sum
        return hidden, self.group.whole_residual(residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None or self.drafted is None:
            return self._shared.compute_logits(hidden)
        return self.drafted.spread(self.product(hidden, self.lm_head.weight[self.drafted.rows]))


class DraftTokens(DerivedModule):
    """The tokens of a head's own LM head that are in a rank's part of the target's vocabulary."""

    columns: Tensor
    """[D] int64, the places of these tokens in that part, ascending."""

    def __init__(self, ids: Sequence[int], part: slice) -> None:
        """`ids`: the target's tokens of all rows of the LM head, ascending; `part`: those of the rank."""
        super().__init__()
        own = [row for row, token in enumerate(ids) if part.start <= token < part.stop]
        self.rows = slice(own[0], own[-1] + 1) if own else slice(0, 0)
        self.num_columns = part.stop - part.start
        self._columns = [ids[row] - part.start for row in own]
        self.is_whole = self._columns == list(range(self.num_columns))
        self.register_buffer("columns", torch.empty(len(own), dtype=torch.int64), persistent=False)

    def derive(self, device: torch.device) -> None:
        self.columns = torch.tensor(self._columns, dtype=torch.int64, device=device)

    def spread(self, logits: Tensor) -> Tensor:
        """Put logits in their places, beside -inf for tokens that the head does not know: [N, D] → [N, columns]."""
        if self.is_whole:
            return logits
        spread = logits.new_full((len(logits), self.num_columns), -torch.inf)
        return spread.index_copy_(1, self.columns, logits)
