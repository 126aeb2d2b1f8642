"""Roofline: the least time in which a GPU can do the work of a step, from counted bytes and operations.

A step's parts run one after the other, and each needs the longer of two times: the bytes that it must move, over the
memory's bandwidth, and its operations, over the matrix rate. Only what no implementation can avoid is counted:

    layer matrices      every weight read once; 2 operations for each weight and token
    experts             likewise, for the experts that at least one token uses
    LM head             likewise, for the rows that get a token
    decode attention    keys and values read once, even of a prefix that several rows share; the new ones written
    prompt attention    likewise for each chunk; 4 operations for each head, head dimension and pair of tokens
    decode states       the recurrent states of each row read and written once, and three products with a vector
    prompt states       likewise for each chunk, with three products for each token

Activations, norms, sampling, embeddings and collectives are not counted. The counts are of one rank's share of a
model; with pipeline stages a rank of the last stage, whose steps are the ones that are timed.

The prefill and decode phases share the matrices of a mixed step by their tokens, its LM head by the rows that get a
token, and its measured time in proportion to the limits of their parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nvcli.engine.request import StepRecord
from nvcli.sizing.costs import MatrixCosts, ModelCosts

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured rates of a device (`nvcli.tools.bench.ceilings`)."""

    bytes_per_second: float
    """Rate of reading from memory."""
    flops_per_second: float
    """Rate of dense matrix products in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes and operations of one part of a step."""

    num_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def times(self, share: float) -> Work:
        return Work(round(self.num_bytes * share), round(self.flops * share))

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


def work_of(step: StepRecord, costs: ModelCosts) -> dict[str, Work]:
    """Count the work of a step, part by part.

    A record holds only sums over its rows, so for layers with a window all rows are assumed to be equally long. That
    overestimates a step in which only some of them are longer than the window.
    """
    num_tokens = step.num_decodes + step.num_prefill_tokens
    decode, prefill = Work(), Work()
    for kind in costs.mixers:
        keys, pairs = step.decode_keys, step.prefill_pairs
        if kind.window is not None:
            keys, pairs = min(keys, step.num_decodes * kind.window), min(pairs, step.num_prefill_tokens * kind.window)
        decode_reads = min(keys, step.decode_keys - step.repeated_decode_keys)
        prefill_reads = step.prefill_keys - step.repeated_prefill_keys
        kv_bytes, flops = kind.kv_bytes_per_token, kind.flops_per_pair
        decode += Work((decode_reads + step.num_decodes) * kv_bytes, keys * flops)
        prefill += Work((prefill_reads + step.num_prefill_tokens) * kv_bytes, pairs * kind.prompt_flops_per_pair)
    experts = {"experts": _matrix_work(costs.experts, num_tokens)} if costs.experts.num_bytes else {}
    states, row_bytes, flops = {}, costs.state_bytes_per_row, costs.state_flops_per_token
    if row_bytes:
        states = {
            "decode states": Work(step.num_decodes * row_bytes, step.num_decodes * flops),
            "prompt states": Work(step.num_chunks * row_bytes, step.num_prefill_tokens * flops),
        }
    return {
        "layer matrices": _matrix_work(costs.layers, num_tokens),
        **experts,
        "LM head": _matrix_work(costs.lm_head, step.num_sampled),
        "decode attention": decode,
        "prompt attention": prefill,
        **states,
    }


def _matrix_work(costs: MatrixCosts, rows: int) -> Work:
    return Work(round(costs.read_bytes(rows)), costs.operations_per_row * rows)


def _prefill_shares(step: StepRecord) -> dict[str, float]:
    """Return the share of each part that belongs to prompts; the rest belongs to decode rows."""
    num_tokens = step.num_decodes + step.num_prefill_tokens
    return {
        "layer matrices": step.num_prefill_tokens / max(1, num_tokens),
        "experts": step.num_prefill_tokens / max(1, num_tokens),
        "LM head": 1 - step.num_decodes / max(1, step.num_sampled),
        "decode attention": 0.0,
        "prompt attention": 1.0,
        "decode states": 0.0,
        "prompt states": 1.0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The time of some steps, compared with the limit."""

    seconds: float
    """Measured device time of the steps."""
    limit_seconds: float
    limit_by_part: Mapping[str, float]
    bandwidth_share: float
    """Model bandwidth utilisation: counted bytes over those that the memory could have moved in `seconds`."""
    flops_share: float
    """Model FLOPs utilisation: likewise for the counted operations."""

    @property
    def share(self) -> float:
        return self.limit_seconds / self.seconds if self.seconds else 0.0

    def divided(self, count: int) -> Roofline:
        """Return the average for one of `count` devices."""
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
        """Compare the steps with the limit: all of their work, or that of one phase."""
        total, seconds = Work(), 0.0
        by_part: dict[str, float] = {}
        for step in steps:
            prefill_shares = _prefill_shares(step) if phase is not None else {}
            step_limit = phase_limit = 0.0
            for part, work in work_of(step, costs).items():
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
