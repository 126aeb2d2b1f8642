"""Log-probabilities of sampled tokens and of the likeliest ones, for rows that ask for them, on their way to the
host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nvcli.core.messages import TokenLogprobs
from nvcli.kernels.token_scores import shard_scores


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host."""

    num_rows: int
    """Rows of the batch."""
    rows: np.ndarray
    """[n], the rows that asked for log-probabilities."""
    counts: np.ndarray
    """[n], the number of alternatives that each of them wants."""
    chosen: Tensor
    """[n] float32 on the host, the sampled tokens' log-probabilities."""
    top_ids: Tensor
    """[n, K] integers on the host, the likeliest tokens; K is at least the largest count."""
    top_values: Tensor
    """[n, K] float32 on the host."""

    def result(self) -> list[TokenLogprobs | None]:
        """Return each row's log-probabilities, None for rows that did not ask. Call it once the step has finished, on
        any thread."""
        found: list[TokenLogprobs | None] = [None] * self.num_rows
        chosen, top_ids, top_values = self.chosen.tolist(), self.top_ids.tolist(), self.top_values.tolist()
        for i, (row, count) in enumerate(zip(self.rows.tolist(), self.counts.tolist(), strict=True)):
            found[row] = TokenLogprobs(
                logprob=chosen[i], top_ids=top_ids[i][:count], top_logprobs=top_values[i][:count]
            )
        return found


def find_logprobs(
    logits: Tensor, ids: Tensor, rows: np.ndarray, at: Tensor, counts: np.ndarray, *, batch_invariant: bool
) -> PendingLogprobs:
    """Compute log-probabilities and start copying them to the host.

    logits: [n, V], unmodified; ids: [N] int32; rows: [n] of the batch, `at` on the device; counts: [n] alternatives;
    batch_invariant: the bits of a row are the same whatever the other rows are.
    """
    targets, num_top = ids[at].long().clamp_(min=0), max(1, int(counts.max()))  # `NOT_FINITE` is not a token
    if batch_invariant:
        scores = shard_scores(logits, targets, start=0, num_top=num_top, batch_invariant=True)
        chosen, top, top_ids = scores.target - scores.log_sum, scores.top - scores.log_sum[:, None], scores.top_ids
    else:
        logprobs = logits.float().log_softmax(dim=-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        top, top_ids = logprobs.topk(num_top, dim=-1)
    # An asynchronous copy to the host needs pinned memory.
    on_host = [x.to("cpu", non_blocking=True) for x in (chosen, top_ids, top)]
    return PendingLogprobs(len(ids), rows, counts, *on_host)
