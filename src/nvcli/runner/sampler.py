"""Sampler: hidden rows' logits → token ids, each row by its slot's parameters. Runs on rank 0.

A row's outcome depends on its logits, its parameters and its counter alone, never on the rest of the batch. Work that
few rows ask for (filters, penalties, log-probabilities) is done for those rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.kernels.sampling import apply_penalties, greedy, gumbel_max, keep_likely
from nvcli.messages import SlotSampling, TokenLogprobs
from nvcli.runner.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows of a batch need what; row numbers as device tensors, None where no row does."""

    random: bool
    filtered: Tensor | None
    penalised: Tensor | None
    adjusted: list[tuple[int, SlotSampling]]
    """Rows with biased or forbidden tokens."""
    num_logprobs: int
    """Most alternatives that a row wants; -1: none wants any."""


class Sampler:
    """Samples for the slots of one table."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._planned: tuple[tuple[int, ...], _Plan] | None = None

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, host_slots: tuple[int, ...], *, slots_changed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [N] int64, and where a row asks the log-probabilities [N, V] of the unmodified distribution.

        logits: [N, V]; slots: [N] int64, `host_slots` the same on the host; positions: [N] int64 of the tokens to be
        sampled. `slots_changed`: slots were filled since the last call.
        """
        table = self._table
        if slots_changed or self._planned is None or self._planned[0] != host_slots:
            self._planned = (host_slots, self._plan(host_slots))
        plan = self._planned[1]
        logits = logits.float()
        logprobs = logits.log_softmax(dim=-1) if plan.num_logprobs >= 0 else None
        if plan.penalised is not None or plan.adjusted:
            logits = logits.clone()
        if plan.penalised is not None:
            at = plan.penalised
            longest = max(int(table.num_computed_host[slot]) for slot in host_slots)
            logits[at] = self._penalise(logits[at], slots[at], positions[at], longest)
        for row, sampling in plan.adjusted:
            self._adjust(logits[row], sampling, positions[row])
        if not plan.random:
            return greedy(logits), logprobs
        temperature = table.temperature[slots]
        if plan.filtered is not None:
            at = plan.filtered
            chosen = slots[at]
            scale = temperature[at, None]
            kept = keep_likely(logits[at] / scale, table.top_k[chosen], table.top_p[chosen], table.min_p[chosen])
            logits = logits.index_copy(0, at, torch.where(kept == -torch.inf, kept, logits[at]))
        ids = gumbel_max(logits, temperature, table.seed[slots], positions, table.row[slots], table.sample[slots])
        return ids, logprobs

    def collect_logprobs(
        self, ids: Tensor, logprobs: Tensor, host_slots: tuple[int, ...]
    ) -> list[TokenLogprobs | None]:
        """What each row asked for, None where it asked for nothing. Waits for the device."""
        wanted = [s.num_logprobs if (s := self._table.sampling[slot]) else -1 for slot in host_slots]
        chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
        top = logprobs.topk(max(1, max(wanted)), dim=-1)
        top_ids, top_values = top.indices.tolist(), top.values.tolist()
        return [
            None
            if count < 0
            else TokenLogprobs(logprob=chosen[i], top_ids=top_ids[i][:count], top_logprobs=top_values[i][:count])
            for i, count in enumerate(wanted)
        ]

    def _plan(self, host_slots: tuple[int, ...]) -> _Plan:
        filtered, penalised, adjusted = [], [], []
        random, num_logprobs = False, -1
        for row, slot in enumerate(host_slots):
            s = self._table.sampling[slot]
            if s is None:
                continue
            if s.temperature > 0:
                random = True
                if s.top_k or s.top_p < 1 or s.min_p > 0:
                    filtered.append(row)
            if s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1:
                penalised.append(row)
            if s.bias_ids or s.stop_ids:
                adjusted.append((row, s))
            num_logprobs = max(num_logprobs, s.num_logprobs)
        return _Plan(random, self._rows(filtered), self._rows(penalised), adjusted, num_logprobs)

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
