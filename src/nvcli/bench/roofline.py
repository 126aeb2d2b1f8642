"""The limit: the least time that a GPU needs for the work of a step, from counted bytes and operations.

A step's parts run one after the other, and each needs the longer of two times: the bytes that it must move, over the
memory's bandwidth, and its operations, over the matrix rate. Counted is what no implementation can do without:

    layer matrices      every weight read once; 2 operations for each weight and token
    LM head             likewise, for the rows that get a token
    decode attention    keys and values of each row read once (no row shares another's), the new ones written
    prompt attention    keys and values of each slice read once, the new ones written; 4 operations for each head, head
                        dimension and pair of tokens

Activations, norms, sampling, embeddings and collectives count nothing. For dense decoder models, of one rank; with
pipeline stages, of one of the last stage's, whose steps are the ones that are timed.

The prefill and decode phases share the matrices of a mixed step by their tokens, its LM head by the rows that get a
token, and its measured time by what their parts come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nvcli.distributed.stage import WHOLE, Stage
from nvcli.engine.request import StepRecord
from nvcli.models.config import ModelConfig
from nvcli.sizing.weights import kv_bytes_per_token, kv_heads_per_rank

Phase = Literal["prefill", "decode"]


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

    def times(self, share: float) -> Work:
        return Work(round(self.num_bytes * share), round(self.flops * share))

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
    def of(
        model: ModelConfig, *, bytes_per_element: int, tensor_parallel_size: int = 1, stage: Stage = WHOLE
    ) -> ModelCosts:
        """`stage`: the last one."""
        tp, num_layers = tensor_parallel_size, len(stage.layers(model.num_layers))
        kv_heads = kv_heads_per_rank(model, tp)
        query_size = model.num_heads * model.head_dim // tp
        attention = model.hidden_size * (2 * query_size + 2 * kv_heads * model.head_dim)
        mlp = 3 * model.hidden_size * model.intermediate_size // tp
        return ModelCosts(
            layer_weights=num_layers * (attention + mlp),
            lm_head_weights=model.vocab_size * model.hidden_size // tp,
            kv_elements_per_token=kv_bytes_per_token(model, tensor_parallel_size=tp, bytes_per_element=1, stage=stage),
            attention_flops_per_pair=num_layers * 4 * query_size,
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

    def prefill_shares(self, step: StepRecord) -> dict[str, float]:
        """What of each part is the prompts'; the rest is the decode rows'."""
        num_tokens = step.num_decodes + step.num_extend_tokens
        return {
            "layer matrices": step.num_extend_tokens / max(1, num_tokens),
            "LM head": 1 - step.num_decodes / max(1, step.num_sampled),
            "decode attention": 0.0,
            "prompt attention": 1.0,
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

    def divided(self, count: int) -> Roofline:
        """The same of one of `count` devices, on average."""
        return replace(
            self,
            seconds=self.seconds / count,
            limit_seconds=self.limit_seconds / count,
            limit_by_part={part: seconds / count for part, seconds in self.limit_by_part.items()},
        )

    @staticmethod
    def of(
        steps: Iterable[StepRecord], costs: ModelCosts, ceilings: Ceilings, *, phase: Phase | None = None
    ) -> Roofline:
        """Of the steps' work, or of what of it belongs to one phase."""
        total, seconds = Work(), 0.0
        by_part: dict[str, float] = {}
        for step in steps:
            prefill_shares = costs.prefill_shares(step) if phase is not None else {}
            step_limit = phase_limit = 0.0
            for part, work in costs.parts(step).items():
                part_limit = work.seconds(ceilings)
                share = 1.0 if phase is None else prefill_shares[part]
                if phase == "decode":
                    share = 1 - share
                step_limit += part_limit
                phase_limit += share * part_limit
                total += work.times(share)
                by_part[part] = by_part.get(part, 0.0) + share * part_limit
            seconds += step.seconds * phase_limit / step_limit
        return Roofline(
            seconds=seconds,
            limit_seconds=sum(by_part.values()),
            limit_by_part=by_part,
            bandwidth_share=total.num_bytes / ceilings.bytes_per_second / seconds if seconds else 0.0,
            flops_share=total.flops / ceilings.flops_per_second / seconds if seconds else 0.0,
        )
