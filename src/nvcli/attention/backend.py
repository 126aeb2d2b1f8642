"""The interface of attention backends.

A backend says why it cannot serve a given case (`unsupported`), prepares each step (`plan`, `plan_on_device`) and
attends in each layer (`forward`). Keys and values of all the batch's tokens are in the cache by then: storing them is
the layer's work. The `torch` backend defines the semantics; the others are held to it.

A step, as the runner drives it:

    backend.plan(batch)              host work; never inside a CUDA graph; before every step, replayed ones included
    backend.plan_on_device(batch)    device work only; the first of what a graph of the step captures
    model.forward(batch)             each layer stores k and v, then calls backend.forward

Plans are made once per step for each distinct `AttentionSpec`, not for each layer.

A step may be captured where `can_capture` says so, after `prepare_capture(batch)`. The graph then serves any lengths,
as long as the batch's tensors stay where they are. Before a replay, `plan` gets the batch that was captured, with the
host values of the step. `forward_batch.py` says what padding rows and tokens are; their results are finite.

A backend implements two halves, decode rows and prefill chunks, so that two backends can share a run (`hybrid.py`).
Decode rows of several tokens count as chunks, except where a backend says that it decodes them (`num_decoded_rows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import (
    AttentionLayer,
    BatchShape,
    ChosenAttention,
    ForwardBatch,
    ProjectedAttention,
)
from nvcli.attention.spec import AttentionSpec

NewKV = tuple[Tensor, Tensor] | None
"""The rotated keys and the values of the chunks' tokens, [tokens, num_kv_heads, head_dim] each; None for a backend that
reads them from the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """The run that a backend is asked to serve."""

    device: torch.device
    dtype: torch.dtype
    specs: tuple[AttentionSpec, ...]
    """The distinct kinds of attention of this rank's layers, other than `chosen`."""
    chosen: tuple[AttentionSpec, ...] = ()
    """The kinds whose tokens see chosen or compressed keys. `ChosenKeys` attends to these beside the backend, except
    for chunks that attend to projected latents."""
    block_size: int
    kv_dtype: torch.dtype | None = None
    """The type in which the cache keeps keys and values; None: the model's."""
    max_num_seqs: int = 256
    """The maximum rows of a step, padding included; workspaces are sized by it."""
    max_num_batched_tokens: int = 8192
    """The maximum tokens of a step, padding included."""
    max_decode_width: int = 1
    """The maximum tokens of a decode row: its last one and drafts."""
    max_draft_step_tokens: int = 0
    """The maximum tokens, padding included, of all decode rows of a step in which they have drafts."""
    max_model_len: int = 8192
    """The maximum tokens of a request."""
    batch_invariant: bool = False
    """Whether a token's result must have the same bits in every batch, in a decode row and in any chunk."""
    has_states: bool = False
    """Whether some layers of this rank keep recurrent states in the pool's blocks."""
    block_bytes: int = 0
    """The bytes of a block, for all layers of a KV group together. If layers have states, or keys of several shapes,
    this is the distance between a layer's blocks; 0: they lie one after another."""
    max_shared_rows: int = 0
    """The maximum decode rows, padding included, of a step whose batch has shared segments; 0: no shared segments,
    and no shared chunk prefixes either."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of keys and values in the cache."""
        return self.kv_dtype or self.dtype


class AttentionBackend(ABC):
    """The attention of one run. Between steps it keeps only its plans; it is used on one stream.

    A backend may read keys that no token of the batch sees if it masks them. Those of the null block are finite. Those
    after a row's last key, in its last block, may be NaN left by a broken request, unless the backend says that it
    reads them.
    """

    name: str
    reads_new_keys: bool = False
    """Whether the backend reads the keys of the step's tokens from `k`. If not, `k` is None and keys come from the
    cache."""
    reads_behind_rows: bool = False
    """Whether keys and values after a row's last key must be finite, because they are multiplied by 0. Blocks are then
    cleared before a row decodes into them."""

    plans_on_device: bool = False
    """Whether `plan_on_device` is all that a batch of decode rows needs, so that a step may run several batches."""

    needs_exact_lens: bool = False
    """Whether `ForwardBatch.seq_lens_host` must be exact; other backends accept upper bounds."""

    notes: tuple[str, ...] = ()
    """Notes for the log about the chosen kernels."""

    reads_segments: bool = False
    """Whether the backend reads key segments that decode rows share (`ForwardBatch.segments`) once for all of them.
    Other backends ignore segments and compute the same result."""

    prefix_tile_tokens: int = 0
    """Tokens that fill one of the backend's tiles, possibly from several chunks that share a prefix
    (`ForwardBatch.prefixes`); 0: the backend gains nothing from such prefixes, and computes the same result with
    them."""

    projected: ProjectedAttention | None = None
    """Attention of chunks to keys and values projected from latents; None: the backend never attends so."""

    chosen_keys: ChosenAttention | None = None
    """Attention of layers whose tokens see chosen or compressed keys, beside the backend; None: there are none."""

    @abstractmethod
    def __init__(self, case: AttentionCase) -> None: ...

    @classmethod
    @abstractmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        """Return the reasons why this backend cannot serve `case`; empty if it can. Imports nothing heavy if it
        cannot."""

    def num_decoded_rows(self, shape: BatchShape) -> int:
        """Return the number of leading rows that `decode` serves; the others count as chunks."""
        return shape.num_single_rows

    def can_capture(self, shape: BatchShape) -> bool:
        """Whether a step of this shape may be captured in a CUDA graph."""
        return False

    def choose_shape(self, shape: BatchShape, num_tokens: np.ndarray, seq_lens: np.ndarray) -> BatchShape:
        """Return the shape of a step without padding, with `projects_latents` where its chunks are to be attended by
        `projected`. num_tokens, seq_lens: [R], the tokens that each row computes, and its request's keys."""
        return shape

    # ------------------------------------------------------------------ what the runner and the layers call

    def prepare_capture(self, batch: ForwardBatch) -> None:  # noqa: B027  (most need nothing)
        """Allocate the buffers for a graph of this batch. Called outside the graph, before `plan`; idempotent."""

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for a step on the host, from host values alone; called outside CUDA graphs."""
        if batch.num_decoded_rows:
            self.plan_decode(batch)
        if batch.shape.num_rows > batch.num_decoded_rows:
            self.plan_prefill(batch)

    def plan_on_device(self, batch: ForwardBatch) -> None:
        """Prepare for a step on the device, after `plan` and before the first layer; may be captured."""
        if self.chosen_keys is not None:
            self.chosen_keys.plan(batch)
        if batch.num_decoded_rows:
            self.plan_decode_on_device(batch)
        if batch.shape.num_rows > batch.num_decoded_rows:
            self.plan_prefill_on_device(batch)

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor | None, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend causally to each request's past (`spec.window` of it), the batch's own tokens included; with
        `spec.both_ways`, to what follows in a chunk likewise.

        K/V of all tokens of the batch are in the cache already. q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads,
        head_dim]; they may be strided views of one buffer, each token's heads contiguous. k may be None unless the
        backend has `reads_new_keys`. → [T, num_heads, head_dim], contiguous; where values are a part of the keys, v and
        the result have `spec.result_dim` in place of head_dim. In a batch that projects latents only decode rows come
        here, and T counts their tokens.
        """
        num_rows, first = batch.num_decoded_rows, batch.num_decoded_tokens
        if batch.shape.num_rows == 0:
            return output_buffer(None, q, layer.spec)
        if num_rows == batch.shape.num_rows or batch.shape.projects_latents:
            return self.decode(layer, q, batch, None)
        if num_rows == 0:
            return self.prefill(layer, q, None if k is None else (k, v), batch, None)
        out = output_buffer(None, q, layer.spec)
        self.decode(layer.of(slice(first)), q[:first], batch, out[:first])
        new = None if k is None else (k[first:], v[first:])
        self.prefill(layer.of(slice(first, None)), q[first:], new, batch, out[first:])
        return out

    # ------------------------------------------------------------------ the halves

    def plan_decode(self, batch: ForwardBatch) -> None:  # noqa: B027
        """`plan` for the decode rows."""

    def plan_prefill(self, batch: ForwardBatch) -> None:  # noqa: B027
        """`plan` for the chunks: the rows from `batch.num_decoded_rows` on."""

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:  # noqa: B027
        """`plan_on_device` for the decode rows."""

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:  # noqa: B027
        """`plan_on_device` for the chunks."""

    @abstractmethod
    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        """Attend the decode rows. q: [their tokens, num_heads, head_dim] → as of `forward`, in `out` where it is
        given."""

    @abstractmethod
    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        """Attend the chunks. q, new: their tokens' → as of `forward`, in `out` where it is given."""


def output_buffer(out: Tensor | None, q: Tensor, spec: AttentionSpec) -> Tensor:
    """Return `out`, or a new contiguous tensor for the results of the queries `q` if `out` is None."""
    return torch.empty(*q.shape[:2], spec.result_dim, dtype=q.dtype, device=q.device) if out is None else out


def copied_to(out: Tensor | None, result: Tensor) -> Tensor:
    """Copy `result` to `out` if given; for libraries that allocate their own results."""
    return result if out is None else out.copy_(result)
