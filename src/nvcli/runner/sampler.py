"""Sampler: logits → token ids, each row by its slot's parameters. Rank 0 has the logits and chooses; all ranks learn.

A row's outcome depends on its logits, its parameters and its counter alone, never on the rest of the batch. Work that
few rows ask for (filters, penalties, log-probabilities) is done for those rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.kernels.sampling import apply_penalties, likely_threshold, sample
from nvcli.messages import SlotSampling, TokenLogprobs
from nvcli.models.parallel import TensorParallelGroup
from nvcli.runner.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Which rows of a batch need more than greedy or temperature; row numbers as device tensors, None for no row."""

    slots: tuple[int, ...]
    num_fills: int
    """The batch this was made for, and the state of the slot table."""
    filtered: Tensor | None
    penalised: Tensor | None
    adjusted: list[tuple[int, SlotSampling]]
    """Rows with biased or forbidden tokens."""
    num_logprobs: int
    """Most alternatives that a row wants; -1: none wants any."""

    @property
    def is_simple(self) -> bool:
        """Whether `sample_simply` on a GPU does all that the rows ask for."""
        return self.penalised is None and not self.adjusted and self.num_logprobs < 0


class Sampler:
    """Samples for the slots of one table. Its methods are collective: every rank calls them alike."""

    def __init__(self, table: SlotTable, group: TensorParallelGroup) -> None:
        self._table = table
        self._group = group
        self._last_plan: SamplingPlan | None = None

    def plan(self, slots: tuple[int, ...]) -> SamplingPlan:
        """What a batch of these slots needs. Kept from step to step, as long as no slot changes hands."""
        last = self._last_plan
        if last is None or last.slots != slots or last.num_fills != self._table.num_fills:
            last = self._last_plan = self._make_plan(slots)
        return last

    def sample_simply(self, logits: Tensor | None, slots: Tensor, positions: Tensor) -> Tensor:
        """Ids [N] int32 by temperature, top-k, top-p and min-p, on a GPU: it launches kernels only, for a CUDA graph.

        logits: [N, V] on rank 0, else None; slots: [N] int64; positions: [N] of the tokens to be sampled.
        """
        return self._share(slots, None if logits is None else self._choose(logits, slots, positions, None))

    def sample(
        self, logits: Tensor | None, slots: Tensor, positions: Tensor, plan: SamplingPlan
    ) -> tuple[Tensor, list[TokenLogprobs | None]]:
        """Ids [N] int32, and on rank 0 the log-probabilities that rows asked for (empty where none did)."""
        if logits is None:
            return self._share(slots, None), []
        table = self._table
        original = logits
        if plan.penalised is not None or plan.adjusted:
            logits = logits.float().clone()
        if plan.penalised is not None:
            at = plan.penalised
            longest = int(table.num_computed_host[list(plan.slots)].max())
            logits[at] = self._penalise(logits[at], slots[at], positions[at].long(), longest)
        for row, sampling in plan.adjusted:
            self._adjust(logits[row], sampling, positions[row])
        ids = self._share(slots, self._choose(logits, slots, positions, plan.filtered))
        if plan.num_logprobs < 0:
            return ids, []
        return ids, self._collect_logprobs(ids.long(), original.float().log_softmax(dim=-1), plan)

    def _choose(self, logits: Tensor, slots: Tensor, positions: Tensor, filtered: Tensor | None) -> Tensor:
        """`filtered`: the rows that need a threshold, on a CPU; a GPU's kernel passes over the others by itself."""
        table = self._table
        threshold: Tensor | None = None
        limits = (table.temperature, table.top_k, table.top_p, table.min_p)
        if logits.is_cuda:
            threshold = likely_threshold(logits, *limits, slots=slots)
        elif filtered is not None:
            threshold = torch.full((len(slots),), -torch.inf)
            threshold[filtered] = likely_threshold(logits[filtered], *limits, slots=slots[filtered])
        return sample(
            logits,
            table.temperature,
            table.seed,
            positions,
            table.row,
            table.sample,
            slots=slots,
            threshold=threshold,
        )

    def _share(self, slots: Tensor, ids: Tensor | None) -> Tensor:
        """Rank 0's ids on every rank."""
        if ids is None:
            ids = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
        return self._group.broadcast(ids)

    def _make_plan(self, slots: tuple[int, ...]) -> SamplingPlan:
        filtered, penalised, adjusted, num_logprobs = [], [], [], -1
        for row, slot in enumerate(slots):
            s = self._table.sampling[slot]
            if s is None:
                continue
            if s.temperature > 0 and (s.top_k or s.top_p < 1 or s.min_p > 0):
                filtered.append(row)
            if s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1:
                penalised.append(row)
            if s.bias_ids or s.stop_ids:
                adjusted.append((row, s))
            num_logprobs = max(num_logprobs, s.num_logprobs)
        return SamplingPlan(
            slots, self._table.num_fills, self._rows(filtered), self._rows(penalised), adjusted, num_logprobs
        )

    def _rows(self, rows: list[int]) -> Tensor | None:
        return torch.tensor(rows, dtype=torch.int64, device=self._table.device) if rows else None

    def _penalise(self, logits: Tensor, slots: Tensor, positions: Tensor, longest: int) -> Tensor:
        table = self._table
        return apply_penalties(
            logits,
            token_ids=table.token_ids[slots, :longest],
            lengths=positions,
            prompt_lens=table.prompt_len[slots],
            presence=table.presence_penalty[slots],
            frequency=table.frequency_penalty[slots],
            repetition=table.repetition_penalty[slots],
        )

    def _adjust(self, logits: Tensor, sampling: SlotSampling, position: Tensor) -> None:
        """Add biases, and forbid stop ids while the answer is shorter than min_tokens. In place, one row [V]."""
        device = logits.device
        if sampling.bias_ids:
            ids = torch.tensor(sampling.bias_ids, device=device)
            logits[ids] += torch.tensor(sampling.bias_values, device=device)
        if sampling.stop_ids:
            ids = torch.tensor(sampling.stop_ids, device=device)
            too_short = position < sampling.prompt_len + sampling.min_tokens
            logits[ids] = torch.where(too_short, -torch.inf, logits[ids])

    def _collect_logprobs(self, ids: Tensor, logprobs: Tensor, plan: SamplingPlan) -> list[TokenLogprobs | None]:
        """What each row asked for, None where it asked for nothing. Waits for the device."""
        wanted = [s.num_logprobs if (s := self._table.sampling[slot]) else -1 for slot in plan.slots]
        chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
        top = logprobs.topk(max(1, plan.num_logprobs), dim=-1)
        top_ids, top_values = top.indices.tolist(), top.values.tolist()
        return [
            None
            if count < 0
            else TokenLogprobs(logprob=chosen[i], top_ids=top_ids[i][:count], top_logprobs=top_values[i][:count])
            for i, count in enumerate(wanted)
        ]
