"""DecodeStep: one decode step of a rank, from the slots that take part to their sampled ids in the slot table.

Everything it reads and writes has a fixed address, and nothing comes from the host but the slots, so that a CUDA graph
can hold the whole of it. On a CPU, and where graphs are off, the same code runs as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_cache import KVCache
from nvcli.distributed.tensor_parallel import StageState
from nvcli.kernels.decode_inputs import DecodeInputs
from nvcli.messages import ForwardMode
from nvcli.models.causal_lm import CausalLM
from nvcli.runner.sampler import Sampler
from nvcli.runner.slot_table import SlotTable
from nvcli.runner.stage_link import PassedOn, StageLink
from nvcli.runner.unowned import unowned


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Of B decode rows."""

    logits: Tensor
    """[B, M] of this rank's part of the vocabulary."""
    ids: Tensor | None
    """[B] int32, by `Sampler.sample_simply`, and in the slot table already; None where not asked for."""
    positions: Tensor
    """[B] int32, of the tokens to be sampled."""

    def unowned(self) -> DecodeOutput:
        return replace(self, logits=unowned(self.logits))

    def head(self, num_rows: int) -> DecodeOutput:
        """Views of the first rows."""
        ids = None if self.ids is None else self.ids[:num_rows]
        return DecodeOutput(self.logits[:num_rows], ids, self.positions[:num_rows])


class DecodeStep:
    """Runs decode steps over one slot table and KV cache."""

    def __init__(
        self,
        model: CausalLM,
        table: SlotTable,
        kv_cache: KVCache,
        backend: AttentionBackend,
        sampler: Sampler,
        link: StageLink,
    ) -> None:
        self._model = model
        self._link = link
        self._table = table
        self._kv_cache = kv_cache
        self._backend = backend
        self._sampler = sampler
        max_rows, num_columns = table.padding_slot, table.block_table.shape[1]
        ints = torch.zeros(max_rows, dtype=torch.int32, device=table.device)
        self._inputs = DecodeInputs(
            input_ids=ints,
            positions=ints.clone(),
            slot_mapping=ints.long(),
            seq_lens=ints.clone(),
            block_tables=torch.zeros(max_rows, num_columns, dtype=torch.int32, device=table.device),
        )
        self._row_numbers = torch.arange(max_rows + 1, device=table.device)

    def batch(self, seq_lens_host: np.ndarray) -> ForwardBatch:
        """The batch of a step over static tensors, for `seq_lens_host` [B]: lengths with the token to be computed."""
        num_rows = len(seq_lens_host)
        inputs = self._inputs
        num_columns = inputs.block_tables.shape[1]
        if self._table.device.type == "cpu":  # nothing is captured: leave out columns that no request has reached
            num_columns = -(-int(seq_lens_host.max()) // self._table.block_size)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=inputs.input_ids[:num_rows],
            positions=inputs.positions[:num_rows],
            slot_mapping=inputs.slot_mapping[:num_rows].unsqueeze(0),
            block_tables=inputs.block_tables[:num_rows, :num_columns],
            seq_lens=inputs.seq_lens[:num_rows],
            seq_lens_host=seq_lens_host,
            query_start_loc=self._row_numbers[: num_rows + 1],
            logits_rows=self._row_numbers[:num_rows],
            num_decodes=num_rows,
            extend_lens=[],
            kv_cache=self._kv_cache,
            backend=self._backend,
        )

    def advance(self, slots: Tensor) -> None:
        """Look up what each slot computes next, and count it as computed. slots: [B] int64 on the device."""
        self._table.advance(slots, self._inputs)

    def compute(self, slots: Tensor, batch: ForwardBatch, *, sample: bool) -> DecodeOutput | PassedOn:
        """The step itself, behind `advance` and the backend's `plan`; with `sample` ids are chosen and kept, by the
        last stage."""
        self._backend.plan_on_device(batch)
        hidden = self._model.forward(batch, self._link.received(len(slots)))
        if isinstance(hidden, StageState):
            return PassedOn(hidden)
        logits = self._model.compute_logits(hidden)
        if not sample:
            return DecodeOutput(logits, None, batch.seq_lens)
        ids = self._sampler.sample_simply(logits, slots, batch.seq_lens)
        self._table.keep(slots, batch.seq_lens, ids)
        return DecodeOutput(logits, ids, batch.seq_lens)
