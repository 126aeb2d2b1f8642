"""Blocks: what everything else may ask of a block of a decoder layer, whatever its kind. Torch-free.

A layer has two blocks: one mixes the tokens (attention, a gated delta net), and one computes each token by itself (an
MLP, a mixture of experts). The tensor list, the KV groups, memory plans, costs, checks and the decoder ask the methods
below, and know no kinds: another kind of block is a file beside this one, and a family that chooses it. All sizes are
those of the whole model, not of one rank, unless `Ranks` are given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

from nvcli.attention.kv_layout import KVDtype
from nvcli.attention.spec import CacheSpec
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.expert_settings import Routing
from nvcli.models.rope_config import RopeConfig
from nvcli.models.tensor_spec import Part, Sharding, StoredDtype, TensorSpec

Rotation = tuple[RopeConfig, int]
"""The settings of a rotation and the head size, on which a table of angles depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """All norms of a decoder."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm without a bias."""
    weight_offset: float = 0.0
    """A number that is added to the weights of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The tensor-parallel ranks that share a layer."""

    size: int = 1
    expert_parallel: bool = False
    """Whether each has some experts whole, and not a part of every expert."""

    @property
    def parts_of_expert(self) -> int:
        """How many ranks share an expert."""
        return 1 if self.expert_parallel else self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The settings that the tensors of a block depend on beside its own configuration."""

    hidden_size: int
    norm: NormConfig
    dtype: StoredDtype
    """The type of the model's weights."""
    expert_parallel: bool = False

    def norm_weight(
        self, name: str, size: int, part: Part = "norms", *, weight_offset: float | None = None, factor: float = 1.0
    ) -> TensorSpec:
        """A norm's weight. One that is changed when it is loaded is kept in float32, so that nothing is rounded.

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
    """The rows, or columns, that a rank has where they are cut."""
    cut_by_inputs: str | None
    """The one that is cut by its input features, for people; None: all are cut by outputs."""
    fused_rows: int = 0
    """The rows that they have of a product that fuses several projections of the block's input."""
    is_of_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerCosts:
    """Bytes and operations of layers with equal mixers on one rank, beside those of their matrices."""

    window: int | None = None
    """How many tokens a token attends to, itself included; None: all before it."""
    kv_bytes_per_token: int = 0
    """Keys and values of one token in these layers."""
    flops_per_pair: int = 0
    """Operations for one token and one token that it attends to, in these layers."""
    state_bytes: int = 0
    """The recurrent states of one request. A step reads and writes them once for each of its rows."""
    flops_per_token: int = 0
    """Operations for one token and a recurrent state: what the state gives for its key, what is written to it, and what
    it gives for the query."""


class Block(ABC):
    """A block of a decoder layer."""

    name: ClassVar[str]
    """Its name in the layer and in checkpoints."""
    launch_seconds: ClassVar[float] = 0.0
    """Extra host time to launch the kernels of a layer with this block."""

    @property
    @abstractmethod
    def module(self) -> str:
        """The module that computes it: `package.file:Class`, made with the arguments of `build`."""

    def build(self, build: object, path: str, norm: NormConfig, *cache: object) -> Any:
        """Make what computes it in the layer `path`. Imports torch.

        `build` is a `BuildContext`; `cache` is, for a block with a `kv_spec`, that spec and the number of its layer
        in the KV cache.
        """
        module, _, name = self.module.partition(":")
        return getattr(import_module(module), name)(build, f"{path}.{self.name}", self, norm, *cache)

    @abstractmethod
    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """The tensors of the block `path`."""

    def unused_tensors(self, path: str) -> Iterator[str]:
        """The names of tensors that a checkpoint may have in it and that have no use."""
        return iter(())

    @abstractmethod
    def check(self, ranks: Ranks) -> Iterator[str]:
        """Say why the ranks cannot share it; nothing if they can."""

    @abstractmethod
    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        """Each rank's pieces of the projections that may be kept in FP8 or 4 bits."""

    @abstractmethod
    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """The most elements of the model's type that a rank takes for one token at a time, those of the residual stream
        included."""

    @property
    def batch_dependence(self) -> str | None:
        """The reason why a token's result depends on its batch, for people; None: it need not."""
        return None


class Mixer(Block):
    """A block that mixes the tokens of a request."""

    @property
    def reads_kv_of(self) -> int | None:
        """The number of an earlier layer whose keys and values it reads; None: it has its own, or none."""
        return None

    @property
    def rotation(self) -> Rotation | None:
        """How it rotates queries and keys; None: not at all."""
        return None

    @abstractmethod
    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> CacheSpec:
        """The KV cache that it keeps on one rank, or reads of another layer."""

    @abstractmethod
    def costs(self, num_layers: int, dtype: StoredDtype, kv_dtype: KVDtype, tensor_parallel_size: int) -> MixerCosts:
        """Bytes and operations of `num_layers` layers with it on one rank."""


class FeedForward(Block):
    """A block that computes each token by itself."""

    @property
    def routing(self) -> Routing | None:
        """How a token's experts are chosen; None: it has no experts."""
        return None


def code_elements(size: int) -> int:
    """The elements of 16 bits that take as much as `size` FP8 codes."""
    return -(-size // 2)
