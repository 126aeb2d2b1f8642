"""The interface of attention backends.

A backend says why it cannot serve a given case (`unsupported`), prepares each step (`plan`, `plan_on_device`) and
attends in each layer (`forward`). Keys and values of all the batch's tokens are in the cache by then: storing them is
the layer's work. The `torch` backend defines the semantics; the others are held to it.

A step, as the runner drives it:

    backend.plan(batch)              host work; never inside a CUDA graph; before every step, replayed ones included
    backend.plan_on_device(batch)    device work only; the first of what a graph of the step captures
    model.forward(batch)             each layer stores k and v, then calls backend.forward

A decode step may be captured where `captures_decode` is true, after `prepare_capture(batch)`. The graph then serves
any lengths, as long as the batch's tensors stay where they are; `plan` before a replay is given the batch that was
captured, padding rows included. Padding rows have a sequence length of 0 or 1 and a block table of null blocks; they
get finite values that nobody reads.

A backend implements two halves, decode rows and prompt slices, so that two backends can share a run (`pair.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One kind of attention on this rank. Layers that attend alike have equal specs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it before the softmax; positive."""
    window: int | None = None
    """A token attends to itself and the `window - 1` tokens before it; None: to all tokens before it."""
    kv_group: int = 0
    """Index of the KV group whose blocks hold its keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """What a backend is asked to serve in a run."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_num_seqs: int = 256
    """Most decode rows of a step, padding included; workspaces are sized by it."""


class AttentionBackend(ABC):
    """One run's attention. Stateless between steps except for what the plans prepare; used on one stream."""

    name: str
    captures_decode: bool = False
    """Whether the decode half may be captured in a CUDA graph."""
    captures_extend: bool = False
    """Whether both may be in one graph: the decode rows planned on the device alone, the slices by
    `plan_captured_extend`."""

    @abstractmethod
    def __init__(self, case: AttentionCase) -> None: ...

    @classmethod
    @abstractmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        """Reasons why this backend cannot serve `case`; empty when it can. Imports nothing heavy when it cannot."""

    # ------------------------------------------------------------------ what the runner and the layers call

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for a step on the host, from host values alone; called outside CUDA graphs."""
        if batch.num_decodes:
            self.plan_decode(batch)
        if batch.extend_lens:
            self.plan_extend(batch)

    def plan_on_device(self, batch: ForwardBatch) -> None:
        """Prepare for a step on the device, behind `plan` and before the first layer; may be captured."""
        if batch.num_decodes:
            self.plan_decode_on_device(batch)

    def forward(self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend causally to each request's whole past, the batch's own tokens included.

        K/V of all tokens of the batch are in the cache already. q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads,
        head_dim]; they may be strided views of one buffer, each token's heads contiguous.
        → [T, num_heads, head_dim], contiguous.
        """
        num_decodes = batch.num_decodes
        if num_decodes and not batch.extend_lens:
            return self.decode(spec, layer, q, batch, None)
        if batch.extend_lens and not num_decodes:
            return self.extend(spec, layer, q, k, v, batch, None)
        out = new_or(None, q)
        if not num_decodes:  # an idle step
            return out
        self.decode(spec, layer, q[:num_decodes], batch, out[:num_decodes])
        self.extend(spec, layer, q[num_decodes:], k[num_decodes:], v[num_decodes:], batch, out[num_decodes:])
        return out

    # ------------------------------------------------------------------ the halves

    def prepare_capture(self, batch: ForwardBatch) -> None:  # noqa: B027  (most need nothing)
        """Set aside what a graph of this decode batch will use, and plan its warm-up; called outside the graph,
        before the first warm-up run. Calling it again, or while capturing, does no harm."""

    def plan_decode(self, batch: ForwardBatch) -> None:  # noqa: B027
        """`plan` for the decode rows."""

    def plan_extend(self, batch: ForwardBatch) -> None:  # noqa: B027
        """`plan` for the prompt slices."""

    def plan_captured_extend(  # noqa: B027
        self, first_request: int, extend_lens: Sequence[int], seq_lens: np.ndarray, num_tokens: int, max_slices: int
    ) -> None:
        """`plan_extend` for a graph that holds up to `max_slices` slices of up to `num_tokens` tokens in all.

        Called before the capture, with no slices, and before each replay. The slices' rows in the request tensors
        begin at `first_request`; the row behind the last possible one has a length of 0.
        """

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:  # noqa: B027
        """`plan_on_device` for the decode rows."""

    @abstractmethod
    def decode(self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        """Attend the decode rows. q: [num_decodes, num_heads, head_dim] → the same, in `out` where it is given."""

    @abstractmethod
    def extend(
        self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, out: Tensor | None
    ) -> Tensor:
        """Attend the prompt slices. q, k, v: their tokens' rows → like q, in `out` where it is given."""


def new_or(out: Tensor | None, q: Tensor) -> Tensor:
    """`out`, or a new contiguous tensor of q's shape."""
    return torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out


def copied_to(out: Tensor | None, result: Tensor) -> Tensor:
    """`result`, in `out` where that is given: for libraries that allocate what they return."""
    return result if out is None else out.copy_(result)
