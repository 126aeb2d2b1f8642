"""The kinds of attention of a model's layers, and the run that a backend is asked to serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvcli.attention.state_size import state_bytes

Geometry = tuple[int, int, int]
"""Query heads, KV heads and head size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One kind of attention on this rank. Layers that attend alike have equal specs and share the plans of a step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it before the softmax; positive."""
    window: int | None = None
    """A token attends to itself and the `window - 1` tokens before it; None: to all tokens before it."""
    soft_cap: float | None = None
    """Scaled scores are taken through soft_cap × tanh(score / soft_cap); None: they are not."""
    has_sinks: bool = False
    """Whether each head has a sink: one score more in every softmax, which belongs to no key, so that the weights of
    the keys add up to less than 1."""
    kv_group: int = 0
    """Index of the KV group whose blocks hold its keys and values."""

    @property
    def geometry(self) -> Geometry:
        """What the tiles of kernels depend on."""
        return self.num_heads, self.num_kv_heads, self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The recurrent state that one layer keeps of a request on this rank, in place of keys and values."""

    conv_shape: tuple[int, int]
    """(last inputs, channels) of the layer's convolution, kept in the model's type."""
    recurrent_shape: tuple[int, int, int]
    """(heads, key size, value size), kept in float32."""
    kv_group: int = 0

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of the state, in a model of this type."""
        return state_bytes(self.conv_shape, self.recurrent_shape, dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """The run that a backend is asked to serve."""

    device: torch.device
    dtype: torch.dtype
    specs: tuple[AttentionSpec, ...]
    """The distinct kinds of attention of this rank's layers."""
    block_size: int
    kv_dtype: torch.dtype | None = None
    """The type in which the cache keeps keys and values; None: the model's."""
    max_num_seqs: int = 256
    """The most rows of a step, padding included; workspaces are sized by it."""
    max_num_batched_tokens: int = 8192
    """The most tokens of a step, padding included."""
    max_model_len: int = 8192
    """The most tokens of a request."""
    batch_invariant: bool = False
    """Whether a token's result must have the same bits in every batch, decoded or in any chunk."""
    has_states: bool = False
    """Whether some layers of this rank keep recurrent states in the pool's blocks."""
    max_shared_rows: int = 0
    """The most decode rows, padding included, of a step whose batch has shared segments; 0: there are none, and no
    shared prefixes of chunks either."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of keys and values in the cache."""
        return self.kv_dtype or self.dtype


def first_seen(position: int, window: int | None) -> int:
    """Return the position of the first key that a token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)
