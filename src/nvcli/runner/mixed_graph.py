"""MixedGraphs: steps with prompt slices as CUDA graphs, where launching them would take longer than running them.

A long job refills a slot as soon as a request ends, so that many of its steps carry a prompt or two beside the decode
rows. Launched one by one, the kernels of such a step keep a small model waiting. A graph holds `max_num_decodes` decode
rows, padded with the padding slot, and a number of prompt tokens, padded with tokens that go to the null block; the
attention backend lists the slices' tiles in static memory.

Rows of requests: decode rows first, then up to MAX_SLICES slices. Rows of tokens: decode rows, then slices' tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_cache import NULL_BLOCK, KVCache
from nvcli.distributed.tensor_parallel import StageState
from nvcli.kernels.decode_inputs import DecodeInputs
from nvcli.messages import ForwardMode, StepInput
from nvcli.models.causal_lm import CausalLM
from nvcli.runner.batch_builder import build_batch
from nvcli.runner.cuda_graph import CapturedGraph, GraphPool
from nvcli.runner.sampler import Sampler
from nvcli.runner.slot_table import SlotTable, unpack_ids
from nvcli.runner.stage_link import PassedOn, StageLink
from nvcli.runner.unowned import unowned
from nvcli.runner.uploader import Uploader
from nvcli.sizing.graph_sizes import mixed_sizes

MAX_SLICES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOutput:
    """Of the graph's rows of requests, padding included."""

    ids: Tensor
    """[rows] int32; the slot table has them already."""
    logits: Tensor
    """[rows, M] of this rank's part of the vocabulary."""
    slots: Tensor
    """[rows] int64."""
    positions: Tensor
    """[rows] int32, of the tokens to be sampled."""

    def unowned(self) -> MixedOutput:
        return replace(self, logits=unowned(self.logits))

    def rows(self, rows: Tensor) -> MixedOutput:
        """Copies of some rows."""
        return MixedOutput(
            ids=self.ids[rows], logits=self.logits[rows], slots=self.slots[rows], positions=self.positions[rows]
        )


class MixedGraphs:
    """Mixed steps of one rank."""

    def __init__(
        self,
        pool: GraphPool,
        model: CausalLM,
        table: SlotTable,
        kv_cache: KVCache,
        backend: AttentionBackend,
        sampler: Sampler,
        upload: Uploader,
        link: StageLink,
        *,
        max_num_decodes: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._pool = pool
        self._model, self._table, self._kv_cache = model, table, kv_cache
        self._backend, self._sampler, self._upload = backend, sampler, upload
        self._link = link
        self._num_decodes = max_num_decodes
        self.sizes = mixed_sizes(self._num_decodes, max_num_batched_tokens)
        most_tokens = self._num_decodes + (self.sizes[-1] if self.sizes else 0)
        num_rows = self._num_decodes + MAX_SLICES
        # One more row, of length 0: surplus tiles of the attention are its.
        device = table.device

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._input_ids, self._positions = ints(most_tokens), ints(most_tokens)
        self._slot_mapping = ints(most_tokens, dtype=torch.int64)
        self._seq_lens = ints(num_rows + 1)
        self._block_tables = ints(num_rows + 1, table.block_table.shape[1])
        self._slots = torch.full((num_rows,), table.padding_slot, dtype=torch.int64, device=device)
        self._logits_rows = torch.arange(num_rows, device=device)
        self._query_start_loc = ints(num_rows + 1)
        self._graphs: dict[int, CapturedGraph[MixedOutput | PassedOn]] = {}

    def capture(self, sizes: list[int] | None = None) -> None:
        """Capture graphs of these numbers of prompt tokens (None: all), largest first."""
        for size in sorted(self.sizes if sizes is None else sizes, reverse=True):
            self._logits_rows[self._num_decodes :] = 0
            self._backend.plan_captured_extend(self._num_decodes, [], np.zeros(0), size, MAX_SLICES)
            self._graphs[size] = self._pool.capture(lambda size=size: self._run(size))  # type: ignore[misc]
        torch.cuda.synchronize()

    def fits(self, step: StepInput) -> bool:
        """Whether a graph serves this step: enough decode rows to be worth their padding, and few prompt tokens."""
        num_tokens, num_slices = len(step.token_ids) // 4, len(step.extend_slots) // 4
        has_decodes = len(step.decode_slots) // 4 >= self._num_decodes // 2
        return has_decodes and num_slices <= MAX_SLICES and bool(self._graphs) and num_tokens <= max(self._graphs)

    def num_rows(self, step: StepInput) -> int:
        """Rows of tokens of the graph that serves the step."""
        return self._num_decodes + self._size_for(len(step.token_ids) // 4)

    def replay(self, step: StepInput) -> tuple[MixedOutput | PassedOn, Tensor, tuple[int, ...]]:
        """Run the step: (output, its rows of the requests that sample in the order of the batch, their slots)."""
        table, first = self._table, self._num_decodes
        decode_slots = unpack_ids(step.decode_slots)
        samples = unpack_ids(step.extend_samples)
        num_decodes, num_slices = len(decode_slots), len(samples)
        table.num_computed_host[decode_slots] += 1
        slices = build_batch(
            msgspec.structs.replace(step, mode=ForwardMode.EXTEND, decode_slots=b""),
            table,
            self._kv_cache,
            self._backend,
            self._upload,
        ).forward
        num_tokens = slices.num_tokens
        size = self._size_for(num_tokens)

        slots = np.full(first + MAX_SLICES, table.padding_slot, dtype=np.int64)
        slots[:num_decodes] = decode_slots
        slots[first : first + num_slices] = np.where(samples, unpack_ids(step.extend_slots), table.padding_slot)
        last_tokens = np.zeros(MAX_SLICES, dtype=np.int64)
        last_tokens[:num_slices] = first + np.cumsum(unpack_ids(step.extend_lens)) - 1
        sampling_rows = np.concatenate([np.arange(num_decodes), first + np.flatnonzero(samples)])
        slots_there, last_tokens_there, rows_there = self._upload(slots, last_tokens, sampling_rows)
        self._slots.copy_(slots_there)
        self._logits_rows[first:].copy_(last_tokens_there)

        tokens = slice(first, first + num_tokens)
        self._input_ids[tokens].copy_(slices.input_ids)
        self._positions[tokens].copy_(slices.positions)
        self._slot_mapping[tokens].copy_(slices.slot_mapping[0])
        self._slot_mapping[first + num_tokens : first + size].fill_(NULL_BLOCK)
        rows = slice(first, first + num_slices)
        self._seq_lens[first:].zero_()
        self._seq_lens[rows].copy_(slices.seq_lens)
        self._block_tables[rows, : slices.block_tables.shape[1]].copy_(slices.block_tables)
        self._backend.plan_captured_extend(first, slices.extend_lens, slices.seq_lens_host, size, MAX_SLICES)
        return self._graphs[size].replay(), rows_there.long(), tuple(slots[sampling_rows].tolist())

    def _size_for(self, num_tokens: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_tokens)]

    def _run(self, size: int) -> MixedOutput | PassedOn:
        table = self._table
        inputs = DecodeInputs(
            input_ids=self._input_ids,
            positions=self._positions,
            slot_mapping=self._slot_mapping,
            seq_lens=self._seq_lens,
            block_tables=self._block_tables,
        )
        table.advance(self._slots[: self._num_decodes], inputs)
        batch = self._batch(size)
        self._backend.plan_decode_on_device(batch)
        hidden = self._model.forward(batch, self._link.received(self._num_decodes + size))
        if isinstance(hidden, StageState):
            return PassedOn(hidden)
        logits = self._model.compute_logits(hidden[self._logits_rows])
        positions = self._seq_lens[: len(self._slots)]
        ids = self._sampler.sample_simply(logits, self._slots, positions)
        table.keep(self._slots, positions, ids)
        return MixedOutput(ids=ids, logits=logits, slots=self._slots, positions=positions)

    def _batch(self, size: int) -> ForwardBatch:
        num_tokens = self._num_decodes + size
        return ForwardBatch(
            mode=ForwardMode.MIXED,
            input_ids=self._input_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens].unsqueeze(0),
            block_tables=self._block_tables,
            seq_lens=self._seq_lens,
            seq_lens_host=np.zeros(0),
            query_start_loc=self._query_start_loc,
            logits_rows=self._logits_rows,
            num_decodes=self._num_decodes,
            extend_lens=[size],
            kv_cache=self._kv_cache,
            backend=self._backend,
        )
