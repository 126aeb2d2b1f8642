"""ModelRunner: the conductor of one rank. Made in the order below, then runs steps.

Every rank runs the same code; rank 0 holds the logits and samples, and its token ids go to the other ranks on the
device. A step's ids feed the next step through the slot table, never through the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.selection import select_backend
from nvcli.config import EngineConfig
from nvcli.messages import EngineReady, ForwardMode, NewSlot, SlotSampling, StepInput, StepOutput, TokenLogprobs, pack
from nvcli.models.config import load_model_config
from nvcli.models.loader import load_weights
from nvcli.models.registry import build_model
from nvcli.runner.batch_builder import Batch, build_batch
from nvcli.runner.interface import RankContext
from nvcli.runner.memory import plan_memory
from nvcli.runner.process_group import join_process_group
from nvcli.runner.sampler import Sampler
from nvcli.runner.slot_table import SlotTable


def create_runner(config: EngineConfig, context: RankContext) -> ModelRunner:
    """The runner that `Executor` starts by default."""
    return ModelRunner(config, context)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's ids on their way to the host."""

    step_id: int
    ids: Tensor
    """[N] int32."""
    logprobs: list[TokenLogprobs | None]
    copied: torch.cuda.Event | None
    """Set once a copy from the device is complete; None where nothing needs to be waited for."""

    def result(self) -> StepOutput:
        if self.copied is not None:
            self.copied.synchronize()
        return StepOutput(step_id=self.step_id, token_ids=self.ids.numpy().tobytes(), logprobs=self.logprobs)


class ModelRunner:
    """One rank of a replica."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        self.config = config
        self._context = context
        self._seconds: dict[str, float] = {}
        with torch.inference_mode():
            self._open_device()
            self._join_process_group()
            self._build_model()
            self._load_weights()
            self._make_slots()
            self._select_attention()
            self._warm_up()
            self._size_kv_cache()
            self._allocate_kv_cache()
        self.ready = EngineReady(
            num_blocks=self.kv_cache.num_blocks - 1,  # the null block is not for use
            block_size=config.block_size,
            kv_cache_bytes=self.kv_cache.num_bytes,
            weight_bytes=self._weight_bytes,
            attention_backend=self.backend.name,
            seconds=self._seconds,
            notes=self._notes,
        )

    # ------------------------------------------------------------------ start-up, in this order

    def _open_device(self) -> None:
        with self._phase("open device"):
            if self.config.device == "cuda":
                first = self.config.replica * self.config.tensor_parallel_size
                self.device = torch.device("cuda", first + self._context.rank)
                torch.cuda.set_device(self.device)
            else:
                self.device = torch.device("cpu")
                if "OMP_NUM_THREADS" not in os.environ:
                    num_cores = len(os.sched_getaffinity(0))
                    torch.set_num_threads(max(1, num_cores // self.config.tensor_parallel_size))
            self.dtype: torch.dtype = getattr(torch, self.config.dtype)

    def _join_process_group(self) -> None:
        with self._phase("process group"):
            self.group = join_process_group(self.config, self._context, self.device)

    def _build_model(self) -> None:
        with self._phase("build model"):
            self.model_config = load_model_config(Path(self.config.model_path))
            self.model = build_model(self.model_config, self.group, self.dtype, max_positions=self.config.max_model_len)

    def _load_weights(self) -> None:
        with self._phase("load weights"):
            self._weight_bytes = load_weights(self.model, Path(self.config.model_path), self.device)

    def _make_slots(self) -> None:
        self.slots = SlotTable(self.config, self.device)
        self.sampler = Sampler(self.slots)

    def _select_attention(self) -> None:
        spec = self.model.attention_specs[0]
        case = AttentionCase(
            device=self.device,
            dtype=self.dtype,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self.config.block_size,
        )
        self.backend, self._notes = select_backend(self.config.attention_backend, case)
        self._kv_spec = KVCacheSpec(
            num_layers=len(self.model.attention_specs),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self.config.block_size,
            dtype=self.dtype,
        )

    def _warm_up(self) -> None:
        """Run the largest batch once, on the null block, and measure what it needs over the weights."""
        with self._phase("warm up"):
            self.kv_cache = KVCache(self._kv_spec, 1, self.device)
            on_gpu = self.device.type == "cuda"
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
            # A CPU's KV cache has a budget of its own: there a small batch is enough to load what loads lazily.
            num_tokens = self.config.max_num_batched_tokens if on_gpu else 16
            self.launch(_warm_up_step(self.config, num_tokens))
            self._activation_bytes = torch.cuda.max_memory_allocated(self.device) - before if on_gpu else 0
            self._make_slots()
            if on_gpu:
                torch.cuda.empty_cache()

    def _size_kv_cache(self) -> None:
        plan = plan_memory(self.config, self._kv_spec, self.device, self._weight_bytes, self._activation_bytes)
        self.memory_plan = plan
        self._num_blocks = self.group.min(plan.num_blocks)

    def _allocate_kv_cache(self) -> None:
        with self._phase("kv cache"):
            self.kv_cache = KVCache(self._kv_spec, self._num_blocks, self.device)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Names what the rank is doing, and keeps the time it took."""
        self._context.report_phase(name)
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start

    # ------------------------------------------------------------------ steps

    @torch.inference_mode()
    def launch(self, step: StepInput) -> SampledTokens | None:
        """Run one step. On a GPU it is queued; nothing here waits for the device."""
        self.slots.apply(step)
        batch = build_batch(step, self.slots, self.kv_cache, self.backend)
        logits = self._forward(batch)
        ids, logprobs = self._sample(batch, logits, slots_changed=bool(step.new_slots))
        self._keep_ids(batch, ids)
        return self._post(step.step_id, ids, logprobs) if self._context.rank == 0 else None

    def _forward(self, batch: Batch) -> Tensor | None:
        """Logits [N, V] of the rows that sample, on rank 0."""
        self.backend.plan(batch.forward)
        hidden = self.model.forward(batch.forward)
        return self.model.compute_logits(hidden[batch.forward.logits_rows])

    def _sample(
        self, batch: Batch, logits: Tensor | None, *, slots_changed: bool
    ) -> tuple[Tensor, list[TokenLogprobs | None]]:
        """Token ids [N] int32, the same on every rank; log-probabilities on rank 0 where a row asked for them."""
        if logits is None:
            ids = torch.empty(len(batch.sampling_slots), dtype=torch.int32, device=self.device)
            return self.group.broadcast(ids), []
        collected: list[TokenLogprobs | None] = []
        slots = batch.slots[batch.sampling_rows]
        positions = batch.forward.seq_lens[batch.sampling_rows].long()
        if not batch.sampling_slots:
            return torch.empty(0, dtype=torch.int32, device=self.device), collected
        chosen, logprobs = self.sampler.sample(
            logits, slots, positions, batch.sampling_slots, slots_changed=slots_changed
        )
        if logprobs is not None:
            collected = self.sampler.collect_logprobs(chosen, logprobs, batch.sampling_slots)
        return self.group.broadcast(chosen.int()), collected

    def _keep_ids(self, batch: Batch, ids: Tensor) -> None:
        """Put sampled ids where the next step looks for its input."""
        rows = batch.sampling_rows
        self.slots.token_ids[batch.slots[rows], batch.forward.seq_lens[rows].long()] = ids

    def _post(self, step_id: int, ids: Tensor, logprobs: list[TokenLogprobs | None]) -> SampledTokens:
        if self.device.type == "cpu":
            return SampledTokens(step_id, ids, logprobs, None)
        host_ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        host_ids.copy_(ids, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return SampledTokens(step_id, host_ids, logprobs, copied)


def _warm_up_step(config: EngineConfig, num_tokens: int) -> StepInput:
    """A batch of `num_tokens` tokens in as few requests as may be; their blocks are all the null block."""
    longest = config.max_model_len - 1
    num_seqs = min(-(-num_tokens // longest), config.max_num_seqs)
    lens = [min(longest, num_tokens - i * longest) for i in range(num_seqs)]
    sampling = SlotSampling(
        seed=0,
        row=0,
        sample=0,
        prompt_len=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        num_logprobs=-1,
        stop_ids=[],
        bias_ids=[],
        bias_values=[],
    )
    slots = range(num_seqs)
    return StepInput(
        step_id=-1,
        mode=ForwardMode.EXTEND,
        new_slots=[NewSlot(slot=slot, num_cached_tokens=0, prefix_ids=b"", sampling=sampling) for slot in slots],
        extend_slots=pack(slots),
        extend_lens=pack(lens),
        extend_samples=pack([1] * num_seqs),
        token_ids=pack([0] * sum(lens)),
    )
