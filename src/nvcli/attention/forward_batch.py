"""ForwardBatch: one step's batch as the model and the attention backend see it.

It is a view of the runner's `InputBuffers` and slot table, passed explicitly: there is no global context. It lives in
this room because backends are its lowest readers.

Decode rows come first, then prefill chunks. Every token's keys and values are stored before attention reads, layer by
layer, so a chunk may attend to blocks which another chunk of the same batch fills.

A batch may be padded to the shape of a captured graph. Padding decode rows belong to the padding slot: its blocks are
all the null block, and its length is the number of their tokens. Padding prefill rows come last and have no tokens and
a length of 0. Tokens after the last row's belong to nobody: they are stored to the null block. The results of padding
are finite, so that the null block stays finite, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from nvcli.attention.image_tokens import ImageTokens
from nvcli.attention.kept_states import KeptStates
from nvcli.attention.kv_cache import KVCache
from nvcli.attention.spec import AttentionCache, AttentionSpec, StateCache
from nvcli.kernels.chosen_keys import KeyWeights
from nvcli.kernels.chunk_prefixes import ChunkPrefixes
from nvcli.kernels.distance_bias import DistanceBias
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.key_copies import KeyCopies
from nvcli.kernels.lora_types import AdapterRows, BatchAdapters
from nvcli.kernels.segment_tables import SegmentTables
from nvcli.kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class BatchShape:
    """The size of a batch, padding included. A CUDA graph belongs to one shape."""

    decode_rows: int = 0
    tokens_per_row: int = 1
    """Tokens of each decode row, or with `uneven_tokens` the most that a row may have."""
    uneven_tokens: int = 0
    """Tokens of all decode rows together if they have different numbers of tokens; 0: all have `tokens_per_row`."""
    prefill_rows: int = 0
    """The number of prefill chunks, padding included."""
    prefill_tokens: int = 0
    """Tokens of all prefill chunks together."""
    shares_segments: bool = False
    """Whether decode rows share segments of keys that are read once for all of them."""
    shares_prefixes: bool = False
    """Whether prefill chunks share prefixes that are read for several of them at a time."""
    has_adapters: bool = False
    """Whether some rows may have LoRA adapters."""
    extends_drafts: bool = False
    """Whether a head that drafts tokens computes the batch's tokens too."""
    projects_latents: bool = False
    """Whether prefill chunks attend to keys and values that are projected from latents for each head
    (`AttentionBackend.choose_shape`)."""

    @property
    def num_rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def decode_tokens(self) -> int:
        return self.uneven_tokens or self.decode_rows * self.tokens_per_row

    @property
    def num_tokens(self) -> int:
        return self.decode_tokens + self.prefill_tokens

    @property
    def num_single_rows(self) -> int:
        """Leading rows that compute one token each."""
        return self.decode_rows if self.tokens_per_row == 1 else 0

    @property
    def traits(self) -> tuple[bool, ...]:
        """The kinds of work that a batch has besides computing its tokens, or instead of the usual."""
        return (
            self.shares_segments,
            self.shares_prefixes,
            self.has_adapters,
            self.extends_drafts,
            self.projects_latents,
        )

    def holds(self, other: BatchShape) -> bool:
        """Whether a batch of another shape can be padded to this one. If decode rows have different numbers of tokens,
        so may the padding rows, but none has more than `tokens_per_row`."""
        if (
            self.decode_rows < other.decode_rows
            or self.prefill_rows < other.prefill_rows
            or self.prefill_tokens < other.prefill_tokens
            or self.traits != other.traits
        ):
            return False
        if other.uneven_tokens == 0:
            same_rows = self.tokens_per_row == other.tokens_per_row and self.uneven_tokens == 0
            return same_rows or other.decode_rows == 0
        num_padding = self.uneven_tokens - other.uneven_tokens
        most_padding = (self.decode_rows - other.decode_rows) * self.tokens_per_row
        return self.tokens_per_row >= other.tokens_per_row and 0 <= num_padding <= most_padding


class AttentionLayer(NamedTuple):
    """A layer as backends attend in it."""

    spec: AttentionSpec
    number: int
    """Its index in the KV cache."""
    sinks: Tensor | None = None
    """[num_heads] float32, the layer's own, where `spec.has_sinks`; they are not scaled."""
    bias: DistanceBias | None = None
    """The batch's own, where `spec.bias_extent`."""

    def of(self, tokens: slice) -> AttentionLayer:
        """Return the layer for some of the batch's tokens."""
        return self if self.bias is None else self._replace(bias=self.bias.of(tokens))


class ProjectedAttention(Protocol):
    """The part of an attention backend that attends chunks to keys and values projected from latents."""

    def forward(self, layer: AttentionLayer, q: Tensor, weight: Tensor, batch: ForwardBatch, out: Tensor) -> None:
        """Attend the chunks of a batch that projects latents, causally, to their requests' past.

        q: [T, num_heads, size of a key], the chunks' tokens, rotated; they may be strided; weight: [num_heads × (plain
        numbers of a key + size of a value), size of a latent], which projects latents; out: [T, num_heads, size of a
        value], contiguous, written.
        """


class ChosenAttention(Protocol):
    """Attention to chosen or compressed keys (`ChosenKeys`)."""

    def plan(self, batch: ForwardBatch) -> None:
        """Find the keys of a step's tokens, on the device."""

    def store_pools(self, cache: AttentionCache, bias: Tensor, batch: ForwardBatch) -> None:
        """Store the index keys of the pools that a step's tokens fill; see `ChosenKeys.store_pools`."""

    def average_pools(self, cache: AttentionCache, weight: Tensor, eps: float, batch: ForwardBatch) -> None:
        """Store the index keys of the pools that a step's tokens fill; see `ChosenKeys.average_pools`."""

    def store_compressed(
        self, cache: AttentionCache, rows: Tensor, kinds: Sequence[KeyWeights], angles: Tensor, batch: ForwardBatch
    ) -> None:
        """Store the compressed keys that a step's tokens complete; see `ChosenKeys.store_compressed`."""

    def choose(self, cache: AttentionCache, queries: Tensor, weights: Tensor | None, batch: ForwardBatch) -> None:
        """Choose the keys of the first tokens in a layer; see `ChosenKeys.choose`."""

    def attend(self, layer: AttentionLayer, queries: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend to the keys that this layer or the last one before it has chosen, or to compressed ones; see
        `ChosenKeys.attend`."""


class LayerAttention(Protocol):
    """The part of an attention backend (`AttentionBackend`) that layers and heads call."""

    reads_new_keys: bool

    @property
    def projected(self) -> ProjectedAttention | None:
        """The attention of chunks of batches that project latents; None: there are no such batches."""

    @property
    def chosen_keys(self) -> ChosenAttention | None:
        """Attention of layers whose tokens see chosen or compressed keys; None: there are no such layers."""

    def num_decoded_rows(self, shape: BatchShape) -> int:
        """Return the number of leading rows that a kernel for decode rows serves; the others count as chunks."""

    def plan_on_device(self, batch: ForwardBatch) -> None:
        """Prepare for another batch within a step, if the backend `plans_on_device`."""

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor | None, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend causally in one layer; the shapes are those of `AttentionBackend.forward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's batch. It has T tokens and R rows, padding included, N rows of hidden states that need logits, and G
    KV groups."""

    shape: BatchShape
    input_ids: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int32, position of each token in its request, from 0."""
    slot_mapping: Tensor
    """[G, T] int64, where each token's keys and values go: block id × block_size + offset, for each KV group; undefined
    in groups in which tokens share keys."""
    slots: Tensor
    """[R] int64, each row's slot, by which its block table is found."""
    block_tables: Tensor
    """[G, slots, max_blocks] int32, the KV block ids of every slot, by KV group. Entries that hold no block of the
    request, or one that its window has left behind, are 0 (the null block) or stale: ids of other requests' blocks."""
    seq_lens: Tensor
    """[R] int32, tokens of each row's request in the cache once this step is stored."""
    query_start_loc: Tensor
    """[R + 1] int32, first token of each row in the [T] tensors; the last entry is where the last row ends."""
    logits_rows: Tensor | None
    """[N] int64, rows of the [T] tensors whose hidden state is multiplied by the LM head; None: all, in order."""
    num_tokens_host: np.ndarray
    """[R] integers on the host: tokens that each row computes."""
    seq_lens_host: np.ndarray
    """[R] integers on the host: upper bounds of `seq_lens`. They are exact unless steps in flight may accept a
    varying number of tokens."""
    kv_cache: KVCache
    backend: LayerAttention
    segments: SegmentTables | None = None
    """Key segments shared by decode rows and worth reading once for all of them; None where there are none, and for
    backends that ignore them."""
    prefixes: ChunkPrefixes | None = None
    """Prefixes shared by prefill chunks and worth reading for several of them at a time; None where there are none,
    and for backends that ignore them."""
    kept_states: KeptStates | None = None
    """The numbers that layers with recurrent states keep of decode rows with drafts; None where there are none."""
    earlier_rows: Tensor | None = None
    """[R] int32, each row's number in the last step with drafts, -1 where it was not in that; None without drafts."""
    key_copies: KeyCopies | None = None
    """Keys and values that each layer copies within its cache, after storing the batch's own and before attending;
    None: nothing."""
    adapters: BatchAdapters | None = None
    """The LoRA adapters of the tokens; None: they have none."""
    angle_positions: Tensor | None = None
    """[T] int32, the positions by which tokens are rotated, or [3, T] where those of time, height and width differ,
    or [4, T] with the image's number; None: `positions`."""
    gathered_rows: Tensor | None = None
    """[M] int64, if ranks have different rows: which hidden states every rank gets, as places among the N rows of each
    rank that need logits, rank after rank. None: all ranks have the same rows."""
    images: ImageTokens | None = None
    """The tokens that stand for parts of images; None: there are none."""

    @property
    def num_tokens(self) -> int:
        return self.shape.num_tokens

    @property
    def num_single_rows(self) -> int:
        return self.shape.num_single_rows

    @property
    def token_adapters(self) -> AdapterRows | None:
        """The LoRA adapters of all tokens; None: they have none."""
        return None if self.adapters is None else self.adapters.tokens

    def adapters_behind_attention(self, rows: Tensor | None) -> AdapterRows | None:
        """Return the LoRA adapters of the tokens `rows` that a stage's last layer computes further; None: of all."""
        return self.token_adapters if rows is None or self.adapters is None else self.adapters.kept

    def states(self, cache: StateCache) -> tuple[Tensor, Tensor, StateRows, KeptInputs | None]:
        """Return what `KVCache.state` returns for a layer, where the rows find their states in its KV group and leave
        them, and what is kept of drafts."""
        number, group = cache.number, cache.spec.kv_group
        kept = None if self.kept_states is None else self.kept_states.layer(number, group)
        return *self.kv_cache.state(number, group), self.state_rows(group), kept

    def state_rows(self, group: int) -> StateRows:
        """Return where the rows find their recurrent states in a KV group, and leave them."""
        pending = None
        if self.kept_states is not None and self.earlier_rows is not None:
            pending = self.kept_states.pending(group, self.earlier_rows)
        return StateRows(
            block_tables=self.block_tables[group],
            slots=self.slots,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            slot_mapping=self.slot_mapping[group],
            block_size=self.kv_cache.spec.block_size,
            num_single_rows=self.num_single_rows,
            num_draft_rows=self.shape.decode_rows - self.num_single_rows,
            pending=pending,
        )

    @property
    def num_decoded_rows(self) -> int:
        """Leading rows that the backend's kernel for decode rows serves; the others count as chunks."""
        return self.backend.num_decoded_rows(self.shape)

    @property
    def num_decoded_tokens(self) -> int:
        return self.shape.decode_tokens if self.num_decoded_rows else 0

    def gather_block_tables(self, group: int, rows: slice, num_columns: int) -> Tensor:
        """Copy the first columns of some rows' block tables: → [rows, num_columns] int32."""
        return self.block_tables[group, :, :num_columns].index_select(0, self.slots[rows])
