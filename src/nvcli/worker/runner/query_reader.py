"""PromptQueryReader: reads from prompts what the logits of their rows do not give: log-probabilities of given next
tokens, and sums of hidden states.

A step with such queries runs eagerly and keeps the hidden states that they need (`CausalLM.forward`). The LM head is
applied to a few hundred of them at a time, so that the logits of all tokens are never held: 256 rows with a vocabulary
of 152,000 tokens take 78 MB in bfloat16. With several ranks each one scores its shard of the vocabulary, and they
exchange a few numbers per token. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import PromptQuery, PromptQueryResult, StepInput
from nvcli.kernels.token_scores import ShardScores, merge_scores, shard_scores
from nvcli.models.causal_lm import CausalLM
from nvcli.models.dense_modules import DenseModules
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.slot_table import unpack_ids
from nvcli.worker.runner.uploader import to_device

LOGITS_ROWS = 256
"""Rows to which the LM head is applied at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPlan:
    """The hidden states of a step that are kept for queries. R rows are kept; each is used once or twice."""

    queries: Sequence[PromptQuery]
    kept: np.ndarray
    """[R] int64 on the host, the step's tokens whose hidden states are kept, ascending."""
    sampled: Tensor
    """[N] int64, the kept rows that give the step's own logits, in batch order."""
    scored: Tensor
    """[S] int64, the kept rows whose next tokens are scored, query by query."""
    targets: Tensor
    """[S] int64, the next tokens that are scored."""
    spans: Sequence[tuple[int, int]]
    """(first kept row, number of rows) of each query that wants hidden states."""

    @property
    def num_top(self) -> int:
        """The largest number of likeliest tokens that a query wants, at least 1."""
        return max(1, *(query.num_top for query in self.queries))


@dataclass(frozen=True, slots=True)
class PendingQueryResults:
    """The results of a step's queries, on their way to the host."""

    queries: Sequence[PromptQuery]
    logprobs: Tensor
    """[S] float32, the targets' log-probabilities."""
    top_ids: Tensor
    """[S, K] int32"""
    top_logprobs: Tensor
    """[S, K] float32"""
    hidden_sums: Tensor
    """[n, H] float32, for each query that wants hidden states: their sums, or their means where prompts are computed
    whole, or what dense modules make of these; or [n, L] a classifier's logits."""

    def result(self) -> list[PromptQueryResult]:
        """Return a result for each query. Call it once the step has finished, on any thread."""
        logprobs, sums = self.logprobs.numpy(), self.hidden_sums.numpy()
        top_ids, top_logprobs = self.top_ids.numpy(), self.top_logprobs.numpy()
        query_results = []
        first = num_sums = 0
        for query in self.queries:
            if not query.targets:
                query_results.append(PromptQueryResult(hidden_sum=sums[num_sums].tobytes()))
                num_sums += 1
                continue
            rows = slice(first, first + query.count)
            query_results.append(
                PromptQueryResult(
                    logprobs=logprobs[rows].tobytes(),
                    best_ids=top_ids[rows, 0].tobytes(),
                    top_ids=top_ids[rows, : query.num_top].tobytes(),
                    top_logprobs=top_logprobs[rows, : query.num_top].tobytes(),
                )
            )
            first += query.count
        return query_results


class PromptQueryReader:
    """Answers a rank's queries. `read` is collective: every rank of the last stage calls it alike."""

    def __init__(self, model: CausalLM, group: TensorParallelGroup, device: torch.device, config: EngineConfig) -> None:
        """Read the files of dense modules, if there are any. Raises LoadError."""
        self._model, self._group, self._device = model, group, device
        self._batch_invariant, self._gives_means = config.batch_invariant, config.keeps_prompts_whole
        self._dense: DenseModules | None = None
        """The layers that make embeddings of pooled hidden states; None: these are the embeddings."""
        if config.dense and model.stage.is_last:
            self._dense = DenseModules(config.dense, device, is_random=config.load_format == "dummy")

    def plan(self, step: StepInput) -> QueryPlan:
        """Lay out the queries of a step, which has at least one."""
        num_tokens, num_logits = unpack_ids(step.num_tokens), unpack_ids(step.num_logits)
        ends = np.cumsum(num_tokens)
        starts = ends - num_tokens
        sampled = np.repeat(ends, num_logits) + _count_up(-num_logits, num_logits)
        firsts = np.array([starts[query.row] + query.start for query in step.queries])
        counts = np.array([query.count for query in step.queries])
        read_tokens = np.repeat(firsts, counts) + _count_up(np.zeros_like(counts), counts)
        kept = np.union1d(sampled, read_tokens)
        wants_scores = np.array([bool(query.targets) for query in step.queries])
        spans = np.stack([np.searchsorted(kept, firsts), counts], axis=1)[~wants_scores]
        targets = unpack_ids(b"".join(query.targets for query in step.queries))
        scored = np.searchsorted(kept, read_tokens[np.repeat(wants_scores, counts)])
        return QueryPlan(
            queries=step.queries,
            kept=kept,
            sampled=self._to_device(np.searchsorted(kept, sampled)),
            scored=self._to_device(scored),
            targets=self._to_device(targets),
            spans=[(int(first), int(count)) for first, count in spans],
        )

    def read(self, hidden: Tensor, plan: QueryPlan) -> PendingQueryResults:
        """Read the kept hidden states [R, H], as `CausalLM.forward` gives them, and start the copies to the host."""
        logprobs, top_ids, top_logprobs = self._score(hidden, plan)
        sums = [hidden[first : first + count].sum(dim=0, dtype=torch.float32) for first, count in plan.spans]
        if self._gives_means:
            sums = [total / count for total, (_, count) in zip(sums, plan.spans, strict=True)]
        read = torch.stack([*map(self._model.read_states, sums)]) if sums else hidden.new_empty(0, dtype=torch.float32)
        if sums and self._dense is not None:
            apply = self._dense.apply
            read = torch.cat([apply(state[None]) for state in read]) if self._batch_invariant else apply(read)
        on_host = [x.to("cpu", non_blocking=True) for x in (logprobs, top_ids, top_logprobs, read)]
        return PendingQueryResults(plan.queries, *on_host)

    def _score(self, hidden: Tensor, plan: QueryPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Score all targets; return the result of `merge_scores`."""
        vocab_size, num_top = self._model.config.vocab_size, plan.num_top
        packed = torch.empty(len(plan.scored), 2 + 2 * num_top, dtype=torch.int32, device=hidden.device)
        for first in range(0, len(plan.scored), LOGITS_ROWS):
            rows = slice(first, first + LOGITS_ROWS)
            logits = self._model.compute_logits(hidden[plan.scored[rows]])
            shard, start = self._group.without_padding(logits, vocab_size)
            scores = shard_scores(
                shard, plan.targets[rows], start=start, num_top=num_top, batch_invariant=self._batch_invariant
            )
            floats = torch.cat([scores.log_sum[:, None], scores.target[:, None], scores.top], dim=1)
            packed[rows] = torch.cat([floats.view(torch.int32), scores.top_ids], dim=1)
        everyone = self._group.all_gather(packed)
        floats, ids = everyone[..., : 2 + num_top].contiguous().view(torch.float32), everyone[..., 2 + num_top :]
        return merge_scores(ShardScores(floats[..., 0], floats[..., 1], floats[..., 2:], ids))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array.astype(np.int64), self._device)


def _count_up(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return first, first + 1, … for each of `firsts`, `counts` numbers each, concatenated."""
    ends = np.cumsum(counts)
    counted: np.ndarray = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts) + np.repeat(firsts, counts)
    return counted
