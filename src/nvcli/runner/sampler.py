"""Sampler: logits → token ids, each row by its slot's parameters. A rank has the logits of its part of the vocabulary.

A row's outcome depends on its logits, its parameters and its counter alone, never on the rest of the batch. Work that
few rows ask for (filters, penalties, log-probabilities) is done for those rows only.

With several ranks, a batch that asks for no more than temperatures needs no gathered logits: each rank finds the best
token of its part, and the best of those is the very token that would be sampled from the whole. For other batches rank
0 gathers the logits and chooses, and all ranks learn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.distributed.tensor_parallel import TensorParallelGroup
from nvcli.kernels.sampling import apply_penalties, best_keys, likely_threshold, sample, tokens_of_keys
from nvcli.messages import SlotSampling, TokenLogprobs
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
    is_simple: bool
    """Whether `sample_simply` does all that the rows ask for."""


class Sampler:
    """Samples for the slots of one table. Its methods are collective: every rank calls them alike."""

    def __init__(self, table: SlotTable, group: TensorParallelGroup, vocab_size: int) -> None:
        self._table = table
        self._group = group
        self._vocab_size = vocab_size
        self._last_plan: SamplingPlan | None = None

    def plan(self, slots: tuple[int, ...]) -> SamplingPlan:
        """What a batch of these slots needs. Kept from step to step, as long as no slot changes hands."""
        last = self._last_plan
        if last is None or last.slots != slots or last.num_fills != self._table.num_fills:
            last = self._last_plan = self._make_plan(slots)
        return last

    def sample_simply(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Ids [N] int32 by temperature, and with one rank by top-k, top-p and min-p too. On a GPU it launches kernels
        only, for a CUDA graph; with several ranks it works on a CPU as well.

        logits: [N, M] as `CausalLM.compute_logits` gives them; slots: [N] int64; positions: [N] of the tokens to be
        sampled.
        """
        if self._group.size == 1:
            return self._choose(logits, slots, positions, None)
        table, shard_size = self._table, logits.shape[1]
        start = min(self._group.rank * shard_size, self._vocab_size)
        keys = best_keys(
            logits[:, : min(shard_size, self._vocab_size - start)],
            table.temperature,
            table.seed,
            positions,
            table.row,
            table.sample,
            slots=slots,
            start=start,
        )
        return tokens_of_keys(self._group.max(keys))

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, plan: SamplingPlan
    ) -> tuple[Tensor, list[TokenLogprobs | None]]:
        """Ids [N] int32, and on rank 0 the log-probabilities that rows asked for (empty where none did).

        The arguments are those of `sample_simply`.
        """
        if self._group.size > 1 and plan.is_simple:
            return self.sample_simply(logits, slots, positions), []
        whole = self._group.gather(logits)
        if whole is None:
            return self._share(slots, None), []
        logits, table = whole[:, : self._vocab_size], self._table
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
        needs_whole = bool(penalised or adjusted or num_logprobs >= 0)
        return SamplingPlan(
            slots,
            self._table.num_fills,
            self._rows(filtered),
            self._rows(penalised),
            adjusted,
            num_logprobs,
            is_simple=not needs_whole and (self._group.size == 1 or not filtered),
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
