"""The tensors of a model: their names, shapes and types, how ranks share them, and what they belong to. Torch-free.

This list is the one place that says a model's shapes. The layers make their parameters from it, the loader checks a
checkpoint against it, and memory plans, limits and layouts add it up (`nvcli.sizing`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Literal

from nvcli.distributed.stage import WHOLE, Stage
from nvcli.models.config import ModelConfig

StoredDtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[StoredDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""

Part = Literal["embeddings", "attention", "MLP", "norms", "LM head"]
"""The items of a memory report that weights are counted under."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of the embedding and the LM head, whose tensors may be one."""


class Cut(Enum):
    """How the ranks of a tensor-parallel group share a tensor."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Each rank holds some of the rows of [out, in], or of a bias [out]."""
    COLUMNS = "columns"
    """Each rank holds some of the columns of [out, in]."""
    VOCAB = "vocab"
    """Each rank holds some of the rows of [vocabulary, hidden], padded so that all hold equally many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint, and what each rank keeps of it."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    dtype: StoredDtype
    """The type in which ranks keep it. The checkpoint may have another one."""
    part: Part
    max_shards: int | None = None
    """The most pieces that it can be cut into: with more ranks, neighbours hold the same piece. None: no limit."""

    def shard(self, rank: int, size: int) -> tuple[slice, ...]:
        """Which part rank `rank` of `size` has. It may be empty where a vocabulary is smaller than its padding."""
        whole = tuple(slice(0, length) for length in self.shape)
        if self.cut is Cut.REPLICATED:
            return whole
        if self.cut is Cut.VOCAB:
            num_rows = self.shape[0]
            rows = -(-num_rows // size)
            return slice(min(rank * rows, num_rows), min((rank + 1) * rows, num_rows)), *whole[1:]
        shard = rank * self._num_shards(size) // size
        if self.cut is Cut.ROWS:
            rows = self.kept_shape(size)[0]
            return slice(shard * rows, (shard + 1) * rows), *whole[1:]
        columns = self.kept_shape(size)[1]
        return whole[0], slice(shard * columns, (shard + 1) * columns)

    def kept_shape(self, size: int) -> tuple[int, ...]:
        """The shape of what each of `size` ranks keeps, padding included."""
        if self.cut is Cut.REPLICATED:
            return self.shape
        if self.cut is Cut.VOCAB:
            return -(-self.shape[0] // size), *self.shape[1:]
        num_shards = self._num_shards(size)
        if self.cut is Cut.ROWS:
            return self.shape[0] // num_shards, *self.shape[1:]
        return self.shape[0], self.shape[1] // num_shards

    def kept_bytes(self, size: int) -> int:
        """The bytes of what each of `size` ranks keeps, padding included."""
        return math.prod(self.kept_shape(size)) * DTYPE_BYTES[self.dtype]

    def _num_shards(self, size: int) -> int:
        num_shards = size if self.max_shards is None else min(size, self.max_shards)
        cut = self.shape[1 if self.cut is Cut.COLUMNS else 0]
        assert cut % num_shards == 0, "ModelConfig.check_tensor_parallel comes first"
        return num_shards


@lru_cache(maxsize=64)  # plans ask for the same few stages many times
def model_tensors(config: ModelConfig, dtype: StoredDtype, stage: Stage = WHOLE) -> tuple[TensorSpec, ...]:
    """Every tensor that a stage of the model needs, in the order of the layers; each name once.

    With a tied LM head the last of several stages needs the embedding, as its LM head.
    """
    return tuple(_tensors(config, dtype, stage))


def _tensors(config: ModelConfig, dtype: StoredDtype, stage: Stage) -> Iterator[TensorSpec]:
    hidden, head_dim, intermediate = config.hidden_size, config.head_dim, config.intermediate_size
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def matrix(name: str, shape: tuple[int, int], cut: Cut, part: Part, max_shards: int | None = None) -> TensorSpec:
        return TensorSpec(name=f"{name}.weight", shape=shape, cut=cut, dtype=dtype, part=part, max_shards=max_shards)

    def norm(name: str, size: int, part: Part = "norms") -> TensorSpec:
        return TensorSpec(name=f"{name}.weight", shape=(size,), cut=Cut.REPLICATED, dtype=dtype, part=part)

    def linear(weight: TensorSpec, *, bias: bool) -> Iterator[TensorSpec]:
        """A projection's weight, and its bias [out] where it has one."""
        yield weight
        if bias:
            cut = Cut.ROWS if weight.cut is Cut.ROWS else Cut.REPLICATED
            yield replace(weight, name=weight.name.replace(".weight", ".bias"), shape=weight.shape[:1], cut=cut)

    def layer(path: str) -> Iterator[TensorSpec]:
        attention, mlp = f"{path}.self_attn", f"{path}.mlp"
        q_shape, kv_shape, o_shape = (query_size, hidden), (kv_size, hidden), (hidden, query_size)
        up_shape, down_shape = (intermediate, hidden), (hidden, intermediate)
        kv_heads = config.num_kv_heads
        yield norm(f"{path}.input_layernorm", hidden)
        yield from linear(matrix(f"{attention}.q_proj", q_shape, Cut.ROWS, "attention"), bias=config.qkv_bias)
        for name in ("k_proj", "v_proj"):
            weight = matrix(f"{attention}.{name}", kv_shape, Cut.ROWS, "attention", max_shards=kv_heads)
            yield from linear(weight, bias=config.qkv_bias)
        yield from linear(matrix(f"{attention}.o_proj", o_shape, Cut.COLUMNS, "attention"), bias=config.o_bias)
        if config.qk_norm:
            yield norm(f"{attention}.q_norm", head_dim, "attention")
            yield norm(f"{attention}.k_norm", head_dim, "attention")
        yield norm(f"{path}.post_attention_layernorm", hidden)
        for name in ("gate_proj", "up_proj"):
            yield from linear(matrix(f"{mlp}.{name}", up_shape, Cut.ROWS, "MLP"), bias=config.mlp_bias)
        yield from linear(matrix(f"{mlp}.down_proj", down_shape, Cut.COLUMNS, "MLP"), bias=config.mlp_bias)

    if stage.is_first:
        yield matrix(EMBEDDING, (config.vocab_size, hidden), Cut.VOCAB, "embeddings")
    for number in stage.layers(config.num_layers):
        yield from layer(f"model.layers.{number}")
    if stage.is_last:
        yield norm("model.norm", hidden)
        if not config.tie_word_embeddings:
            yield matrix(HEAD, (config.vocab_size, hidden), Cut.VOCAB, "LM head")
        elif not stage.is_first:
            yield matrix(EMBEDDING, (config.vocab_size, hidden), Cut.VOCAB, "LM head")
