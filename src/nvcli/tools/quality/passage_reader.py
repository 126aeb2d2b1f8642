"""PassageReader: one rank's share of a model with a small KV cache, which reads passages of tokens one at a time.

It starts like a rank of a job, up to the loaded weights: the same layers, attention backend and cache. Passages are
read in chunks of at most `CHUNK_TOKENS`. It returns the hidden states of all positions, not only the last.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_cache import KVCache
from nvcli.core.engine_config import EngineConfig
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.worker.runner.interface import RankContext
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
