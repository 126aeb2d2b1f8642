"""PassageReader: one rank's share of a model over a small KV cache, which reads passages of tokens one at a time.

It runs the model as a rank of a job does: the same layers, attention backend and cache, with prompts cut into chunks
of at most `CHUNK_TOKENS`. It gives the hidden states of all positions, not only those of a row's last token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_cache import KVCache, KVCacheSpec, torch_kv_dtype
from nvcli.attention.selection import select_backend
from nvcli.config import EngineConfig
from nvcli.distributed.tensor_parallel import TensorParallelGroup
from nvcli.models.config import load_model_config
from nvcli.models.kv_groups import kv_groups
from nvcli.models.loader import load_kv_scales, load_weights
from nvcli.models.registry import build_model
from nvcli.runner.device import has_fp8_units
from nvcli.runner.memory import check_weights_fit

CHUNK_TOKENS = 1024
"""The most tokens that are computed in one step."""


class PassageReader:
    """A model that is loaded on one rank."""

    def __init__(
        self, config: EngineConfig, group: TensorParallelGroup, *, max_tokens: int, say: Callable[[str], object]
    ) -> None:
        """`max_tokens` is the length of the longest passage. Raises LoadError, CapacityError and ConfigError."""
        device, dtype = group.device, getattr(torch, config.dtype)
        self.config = load_model_config(
            config.model_path, expert_parallel=config.enable_expert_parallel, overrides=config.hf_overrides
        ).with_quantization(config.quantization)
        self.device = device
        self._batch_invariant = config.batch_invariant
        self.model = build_model(
            self.config,
            group,
            dtype,
            max_positions=config.max_model_len,
            has_fp8_units=has_fp8_units(device, config.fp8_accumulation),
            fp8_accumulation=config.fp8_accumulation,
            batch_invariant=config.batch_invariant,
        )
        check_weights_fit(sum(self.model.weight_bytes().values()), device)
        load_weights(self.model, config.model_path, device, say=say)
        kv_dtype = torch_kv_dtype(config.kv_dtype)
        if config.kv_dtype == "fp8" and (note := load_kv_scales(self.model, config.model_path, device)):
            say(note)
        block_size = config.block_size
        case = AttentionCase(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            specs=self.model.attention_kinds,
            block_size=block_size,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_model_len=config.max_model_len,
            batch_invariant=config.batch_invariant,
            has_states=any(layer.is_state for layer in self.model.cache_layers),
        )
        self.backend, notes = select_backend(config.attention_backend, case)
        for note in notes:
            say(note)
        groups = kv_groups(self.config)
        spec = KVCacheSpec.of_layers(
            self.model.cache_layers,
            tuple(group.layers for group in groups),
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        # A passage has blocks of its own in every group, from its first token to its last: the same for all passages.
        num_columns = -(-max_tokens // block_size)
        self._kv_cache = KVCache(spec, 1 + len(groups) * num_columns, device)
        blocks = torch.arange(1, 1 + len(groups) * num_columns, dtype=torch.int32, device=device)
        self._block_tables = blocks.view(len(groups), 1, num_columns)

    def read_chunk(self, token_ids: Tensor, start: int) -> Tensor:
        """Compute tokens [n] int32 of the passage, of which the first `start` were read before: → their hidden states
        behind the final norm [n, H]. A passage begins anew with `start` 0."""
        num_tokens, block_size = len(token_ids), self._kv_cache.spec.block_size
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
            kv_cache=self._kv_cache,
            backend=self.backend,
        )
        self.model.group.sums_in_order = self._batch_invariant  # A and B share the group
        self.backend.plan(batch)
        self.backend.plan_on_device(batch)
        hidden = self.model.forward(batch)
        assert isinstance(hidden, Tensor), "there is one stage"
        return hidden
