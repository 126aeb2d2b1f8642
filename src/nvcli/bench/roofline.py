"""The limit: the least time that a GPU needs for the work of a step, from counted bytes and operations.

A step's parts run one after the other, and each needs the longer of two times: the bytes that it must move, over the
memory's bandwidth, and its operations, over the matrix rate. Counted is what no implementation can do without:

    layer matrices      every weight read once; 2 operations for each weight and token
    LM head             likewise, for the rows that get a token
    decode attention    keys and values of each row read once (no row shares another's), the new ones written
    prompt attention    keys and values of each slice read once, the new ones written; 4 operations for each head, head
                        dimension and pair of tokens

Activations, norms, sampling, embeddings and collectives count nothing. For dense decoder models, of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nvcli.engine.request import StepRecord
from nvcli.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device gives, as measured (`nvcli.bench.ceilings`)."""

    bytes_per_second: float
    """Reading memory."""
    flops_per_second: float
    """Dense matrix products in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one part of a step has to do."""

    num_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What one rank's share of a model costs."""

    layer_weights: int
    """Elements of all layers' matrices."""
    lm_head_weights: int
    kv_elements_per_token: int
    """Keys and values of one token in all layers."""
    attention_flops_per_pair: int
    bytes_per_element: int

    @staticmethod
    def of(model: ModelConfig, *, bytes_per_element: int, tensor_parallel_size: int = 1) -> ModelCosts:
        tp = tensor_parallel_size
        kv_heads = max(1, model.num_kv_heads // tp)
        query_size = model.num_heads * model.head_dim // tp
        attention = model.hidden_size * (2 * query_size + 2 * kv_heads * model.head_dim)
        mlp = 3 * model.hidden_size * model.intermediate_size // tp
        return ModelCosts(
            layer_weights=model.num_layers * (attention + mlp),
            lm_head_weights=model.vocab_size * model.hidden_size // tp,
            kv_elements_per_token=model.num_layers * 2 * kv_heads * model.head_dim,
            attention_flops_per_pair=model.num_layers * 4 * query_size,
            bytes_per_element=bytes_per_element,
        )

    def parts(self, step: StepRecord) -> dict[str, Work]:
        """The step's work, part by part."""
        num_tokens = step.num_decodes + step.num_extend_tokens
        kv_bytes = self.kv_elements_per_token * self.bytes_per_element
        return {
            "layer matrices": self._matrices(self.layer_weights, num_tokens),
            "LM head": self._matrices(self.lm_head_weights, step.num_sampled),
            "decode attention": Work(
                (step.decode_keys + step.num_decodes) * kv_bytes, step.decode_keys * self.attention_flops_per_pair
            ),
            "prompt attention": Work(
                (step.extend_keys + step.num_extend_tokens) * kv_bytes,
                step.extend_pairs * self.attention_flops_per_pair,
            ),
        }

    def _matrices(self, weights: int, rows: int) -> Work:
        return Work(weights * self.bytes_per_element, 2 * weights * rows) if rows else Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Steps against the limit."""

    seconds: float
    """Measured, of the device."""
    limit_seconds: float
    limit_by_part: Mapping[str, float]
    bandwidth_share: float
    """Counted bytes over what the memory could have moved in `seconds`: model bandwidth utilisation."""
    flops_share: float
    """Counted operations, likewise: model FLOPs utilisation."""

    @property
    def share(self) -> float:
        return self.limit_seconds / self.seconds if self.seconds else 0.0

    @staticmethod
    def of(steps: Iterable[StepRecord], costs: ModelCosts, ceilings: Ceilings) -> Roofline:
        total, seconds = Work(), 0.0
        by_part: dict[str, float] = {}
        for step in steps:
            seconds += step.seconds
            for part, work in costs.parts(step).items():
                total += work
                by_part[part] = by_part.get(part, 0.0) + work.seconds(ceilings)
        return Roofline(
            seconds=seconds,
            limit_seconds=sum(by_part.values()),
            limit_by_part=by_part,
            bandwidth_share=total.num_bytes / ceilings.bytes_per_second / seconds if seconds else 0.0,
            flops_share=total.flops / ceilings.flops_per_second / seconds if seconds else 0.0,
        )
