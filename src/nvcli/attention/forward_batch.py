"""ForwardBatch: one step's batch as the model and the attention backend see it.

Made by the runner (`runner/batch_builder.py`), read by models and backends, passed explicitly: there is no global
context. It lives in this room because backends are its lowest readers.

Order of rows: the `num_decodes` requests with one token each come first, then the prompt slices.
Every token's K/V is stored before attention reads, layer by layer, so a slice may attend to blocks which another
slice of the same batch fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nvcli.attention.kv_cache import KVCache
from nvcli.messages import ForwardMode

if TYPE_CHECKING:
    from nvcli.attention.backend import AttentionBackend


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """Shapes: T tokens computed in this step, S requests, N of them that sample."""

    mode: ForwardMode
    input_ids: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int32, position of each token in its request, from 0."""
    slot_mapping: Tensor
    """[G, T] int64, where each token's K/V go: block id × block_size + offset, for each of G KV groups."""
    block_tables: Tensor
    """[S, max_blocks] int32, KV block ids; entries behind a request's last block are 0, the null block."""
    seq_lens: Tensor
    """[S] int32, tokens of each request in the cache once this step is stored."""
    seq_lens_host: np.ndarray
    """[S] integers: `seq_lens` as far as the host knows them; at least as large, and equal unless steps whose outcome
    the host does not know yet accept a number of tokens of their own."""
    query_start_loc: Tensor
    """[S + 1] int32, first row of each request in the [T] tensors; the last entry is T."""
    logits_rows: Tensor
    """[N] int64, rows of the [T] tensors whose hidden state is multiplied by the LM head."""
    num_decodes: int
    """Host value: leading requests with exactly one token."""
    extend_lens: Sequence[int]
    """Host values: tokens of each prompt slice, S - num_decodes of them."""
    kv_cache: KVCache
    backend: AttentionBackend

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + len(self.extend_lens)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.extend_lens)
