"""A rank that compares two models: it holds its share of both, and reads the same passages with each.

It runs as `nvcli.tools.quality.rank:main` in its own process. Because it has both models' logits of a position at the
same time, the divergence is exact and only sums are kept. It holds the logits of `_LOGITS_ROWS` positions at a time.
All figures are computed and summed in float64. The ranks exchange a few numbers per position, never logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_cache import KVCache
from nvcli.core.engine_config import EngineConfig
from nvcli.errors import LoadError
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.tools.quality.ranks import CompareTask, PassageSums, PassageTask
from nvcli.tools.quality.statistics import TokenSums
from nvcli.worker.distributed.rendezvous import store_path
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.executor.rank_messages import RankFailed
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.memory import oom_as_limits_error
from nvcli.worker.runner.model_runner import ModelRunner

CHUNK_TOKENS = 1024
"""Maximum tokens per step."""


class PassageReader(ModelRunner):
    """A model loaded on one rank, without a scheduler."""

    def __init__(
        self, config: EngineConfig, context: RankContext, *, max_tokens: int, say: Callable[[str], object]
    ) -> None:
        """`max_tokens` is the length of the longest passage. Raises LoadError, CapacityError and ConfigError."""
        self.config = msgspec.structs.replace(
            config, max_num_seqs=1, max_num_batched_tokens=CHUNK_TOKENS, enable_attention_dp=False
        )
        self._context = context
        self._seconds, self._notes = {}, []
        self._open_device()
        self._join_process_group()
        self._build_model()
        self._begin_weights()
        self._select_attention()
        self._finish_weights()
        for note in self._notes:
            say(note)
        # In every group, a passage's blocks run from its first token to its last; all passages use the same ones.
        num_groups, num_columns = self._attention.kv_spec.num_groups, ceil_div(max_tokens, config.block_size)
        self.kv_cache = KVCache(self._attention.kv_spec, 1 + num_groups * num_columns, self.device)
        blocks = torch.arange(1, 1 + num_groups * num_columns, dtype=torch.int32, device=self.device)
        self._block_tables = blocks.view(num_groups, 1, num_columns)

    def read_chunk(self, token_ids: Tensor, start: int) -> Tensor:
        """Compute a passage's tokens [n] int32 from position `start` on, after those before it. → their hidden states
        after the final norm [n, H]. `start` 0 begins a new passage."""
        num_tokens, block_size = len(token_ids), self.kv_cache.spec.block_size
        end = start + num_tokens
        positions = torch.arange(start, end, dtype=torch.int32, device=self.device)
        columns = (positions // block_size).long()
        batch = ForwardBatch(
            shape=BatchShape(prefill_rows=1, prefill_tokens=num_tokens),
            input_ids=token_ids,
            positions=positions,
            slot_mapping=self._block_tables[:, 0, columns].long() * block_size + positions % block_size,
            slots=torch.zeros(1, dtype=torch.int64, device=self.device),
            block_tables=self._block_tables,
            seq_lens=torch.tensor([end], dtype=torch.int32, device=self.device),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device),
            logits_rows=None,
            num_tokens_host=np.array([num_tokens], dtype=np.int32),
            seq_lens_host=np.array([end], dtype=np.int32),
            kv_cache=self.kv_cache,
            backend=self.backend,
        )
        self.group.sums_in_order = self.config.batch_invariant  # A and B share the group
        self.backend.plan(batch)
        self.backend.plan_on_device(batch)
        hidden = self.model.forward(batch)
        assert isinstance(hidden, Tensor), "there is one stage"
        return hidden


def compare_logits(
    group: TensorParallelGroup, a: Tensor, b: Tensor, targets: Tensor, *, vocab_size: int
) -> TokenSums | None:
    """Compare logits [N, M] of A and B, for this rank's part of the vocabulary: M tokens from rank × M on.

    targets: [n] int64, the tokens that follow the first n positions, n ≤ N. The call is collective. → the sums over
    the positions, on every rank; None if a logit is NaN.
    """
    first = group.rank * a.shape[1]
    is_token = torch.arange(first, first + a.shape[1], device=a.device) < vocab_size
    shards = [logits.double().masked_fill_(~is_token, -torch.inf) for logits in (a, b)]
    columns = []
    for logits in shards:
        best, place = logits.max(-1)
        columns += [logits.logsumexp(-1), best, (place + first).double(), _of_targets(logits, targets, first)]
    everyone = group.all_gather(torch.stack(columns, dim=-1))  # [ranks, N, 8]
    log_sums, best_tokens, target_logits = [], [], []
    for model in range(2):
        log_sum, best, token, target = everyone[..., 4 * model : 4 * model + 4].unbind(-1)
        log_sums.append(log_sum.logsumexp(0))
        best_tokens.append(token.gather(0, best.argmax(0)[None])[0])
        target_logits.append(target.amax(0))
    log_p, log_q = (logits - log_sum[:, None] for logits, log_sum in zip(shards, log_sums, strict=True))
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    divergences = group.all_gather(terms.sum(-1)).sum(0).clamp_min(0.0)  # rounding may go below 0; NaN stays
    if bool(divergences.isnan().any()):
        return None
    num_targets = len(targets)
    nll_a, nll_b = (
        float((log_sum - target)[:num_targets].sum()) for log_sum, target in zip(log_sums, target_logits, strict=True)
    )
    return TokenSums(
        positions=len(a),
        kl_sum=float(divergences.sum()),
        kl_max=float(divergences.max()),
        same_best=int((best_tokens[0] == best_tokens[1]).sum()),
        targets=num_targets,
        nll_a=nll_a,
        nll_b=nll_b,
    )


def _of_targets(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return the logit of each position's target, or -inf if another rank has it or there is no target. → [N]"""
    found = torch.full((len(logits),), -torch.inf, dtype=logits.dtype, device=logits.device)
    own = targets - first
    is_own = (own >= 0) & (own < logits.shape[1])
    picked = logits[: len(targets)].gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    found[: len(targets)] = torch.where(is_own, picked, -torch.inf)
    return found


_LOGITS_ROWS = 64
"""Positions whose logits are held at a time. For 152,000 tokens in float64 they take 78 MB per model."""


def main(task: CompareTask, control: Connection) -> None:
    """Load both models and send notes for the user; then reply to every `PassageTask` with its `PassageSums`, until the
    command ends the process."""
    try:
        with torch.inference_mode():
            _run(task, control)
    except Exception as error:
        control.send(RankFailed.of(error))


def _run(task: CompareTask, control: Connection) -> None:
    notes: list[str] = []
    with oom_as_limits_error("the comparison, which holds both models at once"):
        context = RankContext(rank=task.rank, report_phase=lambda phase: None, store_path=store_path(task.store_fd))
        a = PassageReader(task.configs[0], context, max_tokens=task.max_tokens, say=notes.append)
        context = replace(context, world=a.world)
        b = PassageReader(task.configs[1], context, max_tokens=task.max_tokens, say=notes.append)
        control.send(tuple(dict.fromkeys(notes)))
        while True:
            control.send(_compare(a, b, control.recv()))


def _compare(a: PassageReader, b: PassageReader, passage: PassageTask) -> PassageSums:
    """Read one passage with both models. Raises LoadError if one of them gives NaN."""
    ids = torch.from_numpy(np.frombuffer(passage.token_ids, dtype=np.int32).copy()).to(a.device)
    parts = [TokenSums(), TokenSums()]
    # No run predicts what follows an answer: few models have learned it, and they may differ there as nowhere else.
    num_read = len(ids) - (passage.answer_start < len(ids))
    for start in range(0, num_read, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, num_read)
        hidden_a, hidden_b = (reader.read_chunk(ids[start:end], start) for reader in (a, b))
        for first, last in _row_spans(start, end, passage.answer_start):
            rows = slice(first - start, last - start)
            found = compare_logits(
                a.group,
                a.model.compute_logits(hidden_a[rows]),
                b.model.compute_logits(hidden_b[rows]),
                ids[first + 1 : last + 1].long(),
                vocab_size=a.model_config.vocab_size,
            )
            if found is None:
                raise LoadError(
                    f"some logits after tokens {first} to {last - 1} of a passage are NaN, in A or in B: its weights "
                    "are damaged, or too large for its dtype; try --dtype float32"
                )
            parts[first >= passage.answer_start] += found
    prompt, answer = parts
    return prompt, answer


def _row_spans(start: int, end: int, answer_start: int) -> Iterator[tuple[int, int]]:
    """Split positions [start, end) at the start of the answer and into spans of at most `_LOGITS_ROWS`."""
    while start < end:
        last = min(start + _LOGITS_ROWS, end, answer_start if start < answer_start else end)
        yield start, last
        start = last
