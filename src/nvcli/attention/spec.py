"""The state that each layer of a rank keeps for a request: keys and values, by its kind of attention, or a recurrent
state. Torch-free, as plans ask for its size too."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, NamedTuple, TypeVar

from nvcli.attention.kv_layout import KV_DTYPE_BYTES, STATE_ALIGNMENT, KVDtype, part_bytes, token_bytes
from nvcli.kernels.pool_settings import SINGLE_KEYS, Pools
from nvcli.kernels.whole_numbers import round_up

_MOST_SPANNED = 32
"""The most columns that a block fills, in multiples of which prefixes are reused. A block of keys for more tokens has
fewer keys than others."""
Geometry = tuple[int, int, int, int, bool]
"""Query heads, KV heads, the size of a key, that of a value, and whether values are kept apart from their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """The sizes of each head's key and value as they are projected from latents."""

    key_dim: int
    """Numbers of a query and a key, of which the last ones are rotated."""
    value_dim: int
    rope_dim: int
    """Rotated numbers, which all heads share."""

    @property
    def projected_dim(self) -> int:
        """The numbers that a latent is projected to: those of a key that are not rotated, and its value."""
        return self.key_dim - self.rope_dim + self.value_dim

    @property
    def has_kernels(self) -> bool:
        """Whether `kernels/triton/attention/projected_prefill.py` serves heads of these sizes."""
        return self.rope_dim == 64 and self.value_dim in (64, 128, 256) and self.key_dim - self.value_dim in (0, 64)


class CompressedKeys(NamedTuple):
    """Keys that stand for several tokens each, to which a token attends besides those of its window."""

    inputs: AttentionSpec
    """The numbers of each token of which these keys are made; its window is that of one key."""
    keys: AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One kind of attention on this rank. Layers that attend alike have equal specs and share the plans of a step."""

    is_state: ClassVar[bool] = False
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it before the softmax; positive."""
    window: int | None = None
    """A token attends to itself and the `window - 1` tokens before it; None: to all tokens before it."""
    both_ways: bool = False
    """Whether a token attends to as many tokens after it, too. Its chunk is then a whole prompt."""
    soft_cap: float | None = None
    """Soft cap: scaled scores become soft_cap × tanh(score / soft_cap); None: no cap."""
    has_sinks: bool = False
    """Whether each head has a sink: one extra score in every softmax that belongs to no key, so that the weights of
    the keys add up to less than 1."""
    bias_extent: int | None = None
    """The distances at which each token adds numbers of its own to scores (`DistanceBias`); None: it adds none."""
    kv_group: int = 0
    """Index of the KV group whose blocks hold its keys and values."""
    value_dim: int | None = None
    """The size of a value, up to `head_dim`; None: `head_dim`."""
    has_values: bool = True
    """Whether values are kept apart, in places with room for `head_dim` numbers; if not, a key's first numbers are its
    value."""
    projected: HeadSizes | None = None
    """The keys and values that a key is projected to, if it is a latent vector with rotated numbers after it, so that
    prompts may be attended as they are projected. None: it is not."""
    top_k: int | None = None
    """The most keys that a token attends to, which are chosen for it (`attention/chosen_keys.py`, beside any backend);
    None: it attends to all."""
    index_dim: int = 0
    """The last numbers of `head_dim`, by which keys are chosen and which are no part of a key."""
    index_part: tuple[int, int] | None = None
    """The range of them that the layer's own choice reads; the others belong to layers that read the same keys. None:
    all are its own."""
    index_pools: Pools = SINGLE_KEYS
    """Neighbouring keys that are chosen together; `top_k` also counts the keys that are always chosen. With one choice
    a token's index numbers are then its key, its gates in latent attention or its angles, and, behind or in place of
    these, the key of the pool that it fills."""
    row_heads: int = 0
    """The KV heads whose keys and then values of `row_dim` numbers stand side by side in what is kept of a token as one
    key; 0: a key is that of one head."""
    shares_choice: bool = False
    """Whether these heads attend to the same keys; otherwise each has a choice of its own."""
    rate: int = 1
    """The tokens that have one key together, from the last of them on."""
    compressed: CompressedKeys | None = None
    """With it tokens attend to compressed keys, too, beside any backend (`attention/chosen_keys.py`)."""

    @property
    def kept(self) -> tuple[AttentionSpec, ...]:
        """The specs of all that its layers keep, each in a KV group of its own: the keys of tokens first."""
        return (self,) if self.compressed is None else (self, *self.compressed)

    @property
    def num_choices(self) -> int:
        """The choices of a layer: one, or one of each KV head."""
        return 1 if self.shares_choice else max(1, self.row_heads)

    @property
    def is_beside_backends(self) -> bool:
        """Whether its layers attend to chosen or compressed keys."""
        return self.top_k is not None or self.compressed is not None

    @property
    def attended(self) -> AttentionSpec:
        """The spec of the keys that are attended beside a backend, but for those of a window."""
        return self if self.compressed is None else self.compressed.keys

    @property
    def span(self) -> int:
        """The columns of `block_size` tokens that a block fills."""
        span = self.rate
        while span > _MOST_SPANNED and span % 2 == 0:
            span //= 2
        return span

    def block_keys(self, block_size: int) -> int:
        """The keys in a block."""
        return block_size * self.span // self.rate

    @property
    def geometry(self) -> Geometry:
        """The head counts and sizes, which determine the tiles of kernels."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.result_dim, self.has_values

    @property
    def key_geometry(self) -> Geometry:
        """The same of keys alone, without what is kept beside them."""
        return self.num_heads, self.num_kv_heads, self.key_dim, self.result_dim, self.has_values

    @property
    def key_dim(self) -> int:
        """The size of a key."""
        return self.head_dim - self.index_dim

    @property
    def index_place(self) -> slice:
        """The place, in what is kept of a token, of the numbers by which the layer's keys are chosen."""
        first, end = self.index_part or (0, self.index_dim)
        return slice(self.key_dim + first, self.key_dim + end)

    @property
    def row_dim(self) -> int:
        """The size of each key and value where those of `row_heads` heads stand side by side."""
        return self.key_dim // (2 * self.row_heads)

    @property
    def result_dim(self) -> int:
        """The size of a value, and of each query head's result."""
        return self.row_dim if self.row_heads else self.value_dim or self.head_dim

    @property
    def num_parts(self) -> int:
        """The parts of a block for one layer: its keys, and its values where they are kept apart."""
        return 2 if self.has_values else 1

    def block_bytes(self, block_size: int, dtype: KVDtype, kv_dtype: KVDtype) -> int:
        """The bytes of a layer's keys and values in a block, in a model of type `dtype`."""
        return self.num_parts * part_bytes(self.block_keys(block_size), self.num_kv_heads, self.head_dim, kv_dtype)

    def token_bytes(self, kv_dtype: KVDtype) -> int:
        """The bytes of a token's keys and values in one layer."""
        return self.num_parts * token_bytes(self.num_kv_heads, self.head_dim, kv_dtype)

    def projected_size(self) -> int:
        """The numbers that a latent is projected to for all heads, with the rotated ones; 0: it is not one."""
        sizes = self.projected
        if sizes is None:
            return 0
        return self.num_heads * sizes.projected_dim + sizes.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The recurrent state that one layer keeps for a request on this rank, in place of keys and values."""

    conv_shape: tuple[int, int]
    """(last inputs, channels) of the layer's convolution, kept in the model's type; zeros: it has none."""
    recurrent_shape: tuple[int, int, int]
    """(heads, key size, value size), kept in float32; zeros for layers that only keep the convolution's inputs."""
    has_unit_keys: bool = True
    """Whether states are written along keys of length 1, as delta nets do."""
    num_decays: int = 1
    """The decays of a head: one, or one for each number of its key, or of its value if the state has rates."""
    has_rates: bool = False
    """Whether each number of a state decays at a rate of its own, and the convolution has values alone."""
    kv_group: int = 0

    is_state: ClassVar[bool] = True
    window: ClassVar[int] = 2
    """A token continues from the state after the previous one, as with a window of two tokens."""
    span: ClassVar[int] = 1

    @property
    def kept(self) -> tuple[StateSpec, ...]:
        """See `AttentionSpec.kept`."""
        return (self,)

    @property
    def key_size(self) -> int:
        """The size of a token's keys. The convolution's channels are queries and keys of this size, and values; if it
        has only values, each head has keys of its own. Without a recurrent state it is 0."""
        num_heads, key_dim, value_dim = self.recurrent_shape
        if self.has_rates or not self.conv_shape[1]:
            return num_heads * key_dim
        return (self.conv_shape[1] - num_heads * value_dim) // 2 if num_heads else 0

    def num_bytes(self, element_bytes: int) -> int:
        """The bytes of the state at this element size, padding included."""
        size = 4 * math.prod(self.recurrent_shape) + element_bytes * math.prod(self.conv_shape)
        return round_up(size, STATE_ALIGNMENT)

    def kept_bytes(self, element_bytes: int, num_tokens: int) -> int:
        """The bytes that a layer needs for this many tokens of rows with drafts (`kernels/kept_inputs.py`)."""
        num_heads, key_dim, value_dim = self.recurrent_shape
        of_token = element_bytes * self.conv_shape[1] + 2 * (
            element_bytes * self.key_size + 4 * num_heads * (value_dim + self.num_decays)
        )
        return num_tokens * of_token + (4 * key_dim * value_dim if self.has_rates else 0)

    def block_bytes(self, block_size: int, dtype: KVDtype, kv_dtype: KVDtype) -> int:
        """The bytes of a layer's state in a block; each block has one."""
        return self.num_bytes(KV_DTYPE_BYTES[dtype])


CacheSpec = AttentionSpec | StateSpec
"""A layer's contents in the KV cache."""
_Spec = TypeVar("_Spec", bound=CacheSpec, covariant=True)


@dataclass(frozen=True, slots=True)
class CacheLayer(Generic[_Spec]):
    """A layer's part of this rank's KV cache."""

    spec: _Spec
    number: int
    """Its index in the cache."""


AttentionCache = CacheLayer[AttentionSpec]
StateCache = CacheLayer[StateSpec]


def attention_kinds(specs: Iterable[CacheSpec]) -> tuple[AttentionSpec, ...]:
    """Return the distinct kinds of attention among layers' cache specs."""
    return tuple(dict.fromkeys(spec for spec in specs if isinstance(spec, AttentionSpec)))


def projected_kind(specs: Iterable[CacheSpec]) -> AttentionSpec | None:
    """Return the one kind of latents that layers with these specs may attend to as they are projected, without KV
    group and index keys; None: there are none, or several."""
    kinds = {
        replace(spec, kv_group=0, head_dim=spec.key_dim, index_dim=0, index_part=None, index_pools=SINGLE_KEYS)
        if isinstance(spec, AttentionSpec)
        else None
        for spec in specs
    }
    kind = kinds.pop() if len(kinds) == 1 else None
    return None if kind is None or kind.projected is None or not kind.projected.has_kernels else kind


def first_seen(position: int, window: int | None) -> int:
    """Return the position of the first key that a token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)
