"""Block: the interface of a decoder layer's block, whatever its kind. Torch-free.

A layer has two blocks: one mixes the tokens (attention, a gated delta net), and one computes each token by itself (an
MLP, a mixture of experts). The tensor list, the KV groups, memory plans, costs, checks and the decoder call the methods
below, and know no kinds: a new kind of block is one more file here, and a family that chooses it. All sizes are those
of the whole model, not of one rank, unless `Ranks` are given.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, NamedTuple, Self

from nvcli.attention.kv_layout import KVDtype
from nvcli.attention.spec import CacheSpec, StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.expert_settings import Routing
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.rope_config import RopeConfig
from nvcli.models.tensor_spec import DTYPE_BYTES, Part, Sharding, StoredDtype, TensorSpec, matrix, vector, with_bias

Rotation = tuple[RopeConfig, int]
"""The settings of a rotation and the head size, on which a table of angles depends."""

NO_CHOICE = "no row can have more keys than are chosen: all are attended, and indexers are neither loaded nor used"
"""The note about a choice of keys that a run leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """The settings of all norms of a decoder."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    has_bias: bool = False
    """Whether the norms of the residual stream have biases."""
    has_weight: bool = True
    """Whether the norms have weights; otherwise nothing multiplies what they norm."""
    weight_offset: float = 0.0
    """A number that is added to the checkpoint's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The tensor-parallel ranks that share a layer."""

    size: int = 1
    expert_parallel: bool = False
    """Whether each rank holds some experts whole rather than a part of every expert."""

    @property
    def parts_of_expert(self) -> int:
        """The number of ranks that share an expert."""
        return 1 if self.expert_parallel else self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The settings that a block's tensors depend on, besides its own configuration."""

    hidden_size: int
    norm: NormConfig
    dtype: StoredDtype
    """The type of the model's weights."""
    expert_parallel: bool = False
    attention_dp: bool = False
    """Whether each rank has all weights of token mixers (`ModelConfig.attention_dp`)."""
    stores_wide_routers: bool = False
    """Whether the checkpoint stores routers in float32 (`ModelConfig.stores_wide_routers`)."""
    normed_streams: int = 1
    """The residual streams that its norms have weights for."""

    def input_projection(
        self, name: str, size: int, part: Part, kept_with: tuple[str, ...] = (), *, bias: bool = False
    ) -> Iterator[TensorSpec]:
        """Yield a projection of the residual stream, of which ranks have rows, and its bias if it has one."""
        weight = matrix(name, (size, self.hidden_size), Sharding.ROWS, self.dtype, part, kept_with)
        return with_bias(weight, bias=bias)

    def output_projection(self, name: str, size: int, part: Part, *, bias: bool = False) -> Iterator[TensorSpec]:
        """Yield a projection to the residual stream, of which ranks have columns, and its bias if it has one."""
        kept_with = (name.rpartition(".")[2],)
        weight = matrix(name, (self.hidden_size, size), Sharding.COLUMNS, self.dtype, part, kept_with)
        return with_bias(weight, bias=bias)

    def norm_tensors(self, name: str, *, factor: float = 1.0) -> Iterator[TensorSpec]:
        """Yield the weight of a norm of the residual stream, if it has one, and its bias if it has one; the weight's
        `factor` applies to both."""
        if not self.norm.has_weight:
            assert factor == 1.0, "no family has one"
            return
        weight = self.norm_weight(name, self.normed_streams * self.hidden_size, factor=factor)
        yield weight
        if self.norm.has_bias:
            yield replace(weight, name=f"{name}.bias", offset=0.0)

    def norm_weight(
        self, name: str, size: int, part: Part = "norms", *, weight_offset: float | None = None, factor: float = 1.0
    ) -> TensorSpec:
        """Return a norm's weight. It is kept in float32 if loading changes its values, so that nothing is rounded.

        `weight_offset` None: that of the decoder's norms.
        """
        offset = self.norm.weight_offset if weight_offset is None else weight_offset
        return TensorSpec(
            name=f"{name}.weight",
            shape=(size,),
            sharding=Sharding.REPLICATED,
            dtype=self.dtype if offset == 0.0 and factor == 1.0 else "float32",
            part=part,
            offset=offset,
            factor=factor,
        )


class Piece(NamedTuple):
    """Each rank's piece of some projections of a block."""

    projections: str
    """Their names, for people."""
    length: int
    """The number of rows, or columns, that a rank has of the dimension that is cut."""
    cut_by_inputs: str | None
    """The projection that is cut by its input features, for people; None: all are cut by outputs."""
    fused_rows: int = 0
    """Their rows in a product that fuses several projections of the block's input."""
    is_of_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerCosts:
    """Bytes and operations of layers with equal mixers on one rank, besides those of their matrices."""

    window: int | None = None
    """The number of tokens that a token attends to, including itself; None: all earlier ones."""
    kv_bytes_per_token: int = 0
    """Keys and values of one token in these layers."""
    flops_per_pair: int = 0
    """Operations per pair of a token and a token that it attends to, in these layers."""
    fewest_prompt_flops_per_pair: int | None = None
    """The fewest operations per pair with which prompts can be attended, by which the limit is computed; None:
    `flops_per_pair`."""
    state_bytes: int = 0
    """The recurrent states of one request. A step reads and writes them once for each of its rows."""
    flops_per_token: int = 0
    """Operations of one token on a recurrent state: reading it by key, writing to it, and reading it by query."""

    @property
    def prompt_flops_per_pair(self) -> int:
        """The fewest operations per pair in prompts."""
        fewest = self.fewest_prompt_flops_per_pair
        return self.flops_per_pair if fewest is None else fewest

    def of_share(self, num_shares: int) -> MixerCosts:
        """Return the costs for one of `num_shares` shares of the rows, as means over all rows."""
        if num_shares == 1:
            return self
        fewest = self.fewest_prompt_flops_per_pair
        return replace(
            self,
            kv_bytes_per_token=self.kv_bytes_per_token // num_shares,
            flops_per_pair=self.flops_per_pair // num_shares,
            fewest_prompt_flops_per_pair=None if fewest is None else fewest // num_shares,
            state_bytes=self.state_bytes // num_shares,
            flops_per_token=self.flops_per_token // num_shares,
        )


class Block(ABC):
    """A block of a decoder layer."""

    name: ClassVar[str]
    """Its name in the layer and in checkpoints."""
    launch_seconds: ClassVar[float] = 0.0
    """Extra host time to launch the kernels of a layer with this block."""
    divided: ClassVar[tuple[str, str]]
    """The field with the number of what ranks divide evenly among them, and what that is, for people."""

    @property
    @abstractmethod
    def module(self) -> str:
        """The module that computes it: `package.file:Class`, created with the arguments of `build`."""

    def build(self, build: object, path: str, norm: NormConfig, *cache: object) -> Any:
        """Create the module that computes it in the layer `path`. Imports torch.

        `build` is a `BuildContext`; `cache` is, for a block with a `kv_spec`, that spec and the number of its layer
        in the KV cache.
        """
        return self.build_at(build, f"{path}.{self.name}", norm, *cache)

    def build_at(self, build: object, path: str, norm: NormConfig, *cache: object) -> Any:
        """Create it under another path than its own name in a layer, as a part of another block."""
        return resolve_name(self.module)(build, path, self, norm, *cache)

    @abstractmethod
    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors of the block `path`."""

    def unused_tensors(self, path: str) -> Iterator[str]:
        """Yield the names of tensors that a checkpoint may have for the block but that are not used."""
        return iter(())

    def check(self, ranks: Ranks) -> Iterator[str]:
        """Yield the reasons why the ranks cannot share it; none if they can."""
        field, what = self.divided
        if (count := getattr(self, field)) % ranks.size:
            yield f"{count} {what} do not divide by {ranks.size}"

    @abstractmethod
    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        """Yield each rank's pieces of the projections that may be kept in FP8 or 4 bits."""

    @abstractmethod
    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Return the peak number of elements per token on a rank, in the model's type, including the residual
        stream."""

    @abstractmethod
    def num_kernels(self, ranks: Ranks) -> int:
        """Return the number of kernels that a decode step launches for it, and for the norm of its input."""

    @property
    def batch_dependence(self) -> str | None:
        """The reason why a token's result depends on its batch, for people; None if it can be independent."""
        return None


class Mixer(Block):
    """A block that mixes the tokens of a request."""

    @property
    def reads_kv_of(self) -> int | None:
        """The number of an earlier layer whose keys and values it reads; None: it has its own, or none."""
        return None

    @property
    def most_chosen(self) -> int | None:
        """The most keys that a token attends to, where they are chosen for it; None: it attends to all."""
        return None

    @property
    def both_ways(self) -> bool:
        """Whether tokens attend to those after them, too."""
        return False

    def with_both_ways(self) -> Self | None:
        """Return it with tokens that attend to those after them as to those before them; None: it cannot do that."""
        return None

    needs_exact_keys: ClassVar[bool] = False
    """Whether its keys hold numbers that a cache in FP8 would round too much."""

    @property
    def reads_earlier_choice(self) -> bool:
        """Whether it attends to keys that an earlier layer has chosen."""
        return False

    def for_length(self, max_model_len: int) -> Self:
        """Return how runs of at most this many tokens compute it."""
        return self

    @property
    def note(self) -> str | None:
        """A note for the log about what runs leave out of it."""
        return None

    def choice_costs(self, num_layers: int, kv_dtype: KVDtype) -> MixerCosts | None:
        """Return the bytes and operations by which `num_layers` layers with it choose keys; None: they do not."""
        return None

    @property
    def rotation(self) -> Rotation | None:
        """How it rotates queries and keys; None: not at all."""
        return None

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """All rotations of its queries and keys, and of those by which keys are chosen."""
        return () if self.rotation is None else (self.rotation,)

    @abstractmethod
    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> CacheSpec:
        """Return the spec of the KV cache that it keeps on one rank, or reads from another layer."""

    @abstractmethod
    def costs(self, num_layers: int, dtype: StoredDtype, kv_dtype: KVDtype, tensor_parallel_size: int) -> MixerCosts:
        """Return the bytes and operations of `num_layers` layers with it on one rank."""

    def num_kernels(self, ranks: Ranks) -> int:
        return 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoosingMixer(Mixer):
    """A mixer of which runs may have each token attend to a choice of keys."""

    top_k: int | None = None
    """The most keys that a token attends to; None: all."""

    @property
    def most_chosen(self) -> int | None:
        return self.top_k

    def for_length(self, max_model_len: int) -> Self:
        """Return the layer without a choice where a token never sees more keys than it would choose."""
        return self if self.top_k is None or max_model_len > self.top_k else replace(self, top_k=None)


class RecurrentMixer(Mixer):
    """A mixer that keeps a state of fixed size, and no keys and values."""

    num_products: ClassVar[int] = 3
    """The multiplications and additions of a token with each number of the state."""

    @property
    def batch_dependence(self) -> str | None:
        return "layers with a recurrent state, which prompts and decode steps compute in other orders"

    def num_kernels(self, ranks: Ranks) -> int:
        return 6

    @abstractmethod
    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec: ...

    def state_flops(self, spec: StateSpec) -> int:
        """Return the operations of one token on the state of one layer."""
        return 2 * self.num_products * math.prod(spec.recurrent_shape)

    def costs(self, num_layers: int, dtype: StoredDtype, kv_dtype: KVDtype, tensor_parallel_size: int) -> MixerCosts:
        spec = self.kv_spec(tensor_parallel_size)
        state_bytes = num_layers * spec.num_bytes(DTYPE_BYTES[dtype])
        return MixerCosts(state_bytes=state_bytes, flops_per_token=num_layers * self.state_flops(spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedMixer(RecurrentMixer):
    """Such a mixer with a short convolution of its inputs."""

    conv_taps: int
    """The number of tokens that the convolution reads: the token itself, and those right before it."""

    def convolution(
        self, name: str, channels: int, context: LayerContext, *, bias: bool = False
    ) -> Iterator[TensorSpec]:
        """Yield the weights of the convolution `name`, and its biases if it has them."""
        yield matrix(name, (channels, 1, self.conv_taps), Sharding.ROWS, context.dtype, "attention")
        if bias:
            yield vector(f"{name}.bias", channels, Sharding.ROWS, "attention", context.dtype)

    def channel_spec(self, channels: int, state_size: int, kv_group: int) -> StateSpec:
        """Return the spec of a rank's channels, each with a state that decays by rates of its own."""
        return StateSpec(
            conv_shape=(self.conv_taps - 1, channels),
            recurrent_shape=(1, state_size, channels),
            has_unit_keys=False,
            num_decays=channels,
            has_rates=True,
            kv_group=kv_group,
        )


class FeedForward(Block):
    """A block that computes each token by itself."""

    def num_kernels(self, ranks: Ranks) -> int:
        return 3

    @property
    def routing(self) -> Routing | None:
        """How a token's experts are chosen; None: it has no experts."""
        return None

    @property
    def reads_stream(self) -> bool:
        """Whether it reads the residual stream besides its normed input."""
        return False


def choice_dependence(top_k: int) -> str:
    """Say why a token's result depends on its batch where at most so many keys are chosen for it."""
    return f"a choice of keys, which runs make unless `max_model_len` is at most {top_k:,}"


def code_elements(size: int) -> int:
    """Return the number of 16-bit elements that take as much memory as `size` FP8 codes."""
    return ceil_div(size, 2)
