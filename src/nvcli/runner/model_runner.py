"""ModelRunner: the conductor of one rank. Made in the order below, then runs steps.

Every rank runs the same code and comes to know the same token ids, on the device. A step's ids feed the next step
through the slot table, never through the host. With pipeline stages only the ranks of the last one choose ids, and the
first one gets them with the next step's input.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.selection import select_backend
from nvcli.config import EngineConfig
from nvcli.distributed.peer_memory import share_memory
from nvcli.distributed.process_group import divide_ranks, join_process_group
from nvcli.distributed.stage import Stage
from nvcli.distributed.tensor_parallel import StageState
from nvcli.errors import LimitsTooHigh
from nvcli.messages import EngineReady, ForwardMode, MemoryUse, StepInput, StepOutput, TokenLogprobs
from nvcli.models.config import load_model_config
from nvcli.models.loader import init_random_weights, load_weights
from nvcli.models.registry import build_model
from nvcli.runner.batch_builder import build_batch
from nvcli.runner.cuda_graph import DecodeGraphs, GraphPool
from nvcli.runner.decode_step import DecodeOutput, DecodeStep
from nvcli.runner.device import open_device
from nvcli.runner.head_start import import_kernels
from nvcli.runner.interface import RankContext
from nvcli.runner.memory import (
    ITEMS,
    check_weights_fit,
    free_bytes,
    memory_for,
    most_allocated,
    other_bytes,
    out_of_memory_line,
    peak_bytes,
    plan_memory,
    total_ram,
)
from nvcli.runner.mixed_graph import MixedGraphs
from nvcli.runner.sampler import Sampler, SamplingPlan
from nvcli.runner.slot_table import SlotTable, unpack_ids
from nvcli.runner.stage_link import PassedOn, StageLink
from nvcli.runner.step_clock import StepClock, StepTime
from nvcli.runner.uploader import Uploader
from nvcli.runner.warm_up import warm_up_steps
from nvcli.sizing.memory import shared_sum_rows

_STEPS_POSTED = 2  # may be with the thread that posts them, beside those in flight
_CPU_WARM_UP_TOKENS = 16

Sampled = tuple[Tensor, list[TokenLogprobs | None]]
"""Ids [N] int32 on the device, and log-probabilities where a row asked."""


def create_runner(config: EngineConfig, context: RankContext) -> ModelRunner:
    """The runner that `Executor` starts by default."""
    return ModelRunner(config, context)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's ids on their way to the host."""

    step_id: int
    ids: Tensor
    """[N] int32, on the host once the step is over."""
    logprobs: list[TokenLogprobs | None]
    time: StepTime

    def result(self) -> StepOutput:
        self.time.wait()
        return StepOutput(
            step_id=self.step_id,
            token_ids=self.ids.numpy().tobytes(),
            logprobs=self.logprobs,
            seconds=self.time.seconds,
            idle_seconds=self.time.idle_seconds,
        )


class ModelRunner:
    """One rank of a replica."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        self.config = config
        self._context = context
        self._seconds = {
            "spawn": context.started_at - context.spawned_at,
            "import": time.time() - context.started_at,
        }
        with torch.inference_mode():
            self._open_device()
            self._join_process_group()
            self._build_model()
            self._link_stages()
            self._share_memory()
            self._load_weights()
            self._make_slots()
            self._select_attention()
            self._warm_up()
            self._measure_graphs()
            self._size_kv_cache()
            self._allocate_kv_cache()
            self._capture_graphs()
            self._measure_memory()
        self.ready = EngineReady(
            num_blocks=self.kv_cache.num_blocks - 1,  # the null block is not for use
            block_size=config.block_size,
            kv_cache_bytes=self.kv_cache.num_bytes,
            weight_bytes=self._weight_bytes,
            attention_backend=self.backend.name,
            seconds=self._seconds,
            notes=self._notes,
            memory=[self._memory_use],
        )

    # ------------------------------------------------------------------ start-up, in this order

    def _open_device(self) -> None:
        with self._phase("open device"):
            self.device = open_device(self.config, self._context.rank)
            if self.device.type == "cuda":
                import_kernels()
            self.dtype: torch.dtype = getattr(torch, self.config.dtype)
            self._clock = StepClock(self.device)

    def _join_process_group(self) -> None:
        config, rank = self.config, self._context.rank
        with self._phase("process group"):
            self._world = join_process_group(
                self._context, self.device, size=config.num_ranks, timeout_seconds=config.step_timeout
            )
            self._groups = divide_ranks(config, self._world.group, rank)
            self.group = self._groups.tensor
            self.stage = Stage(config.stage_of(rank), config.pipeline_parallel_size)

    def _build_model(self) -> None:
        with self._phase("build model"):
            self.model_config = load_model_config(self.config.model_path)
            self.model = build_model(
                self.model_config, self.group, self.dtype, max_positions=self.config.max_model_len, stage=self.stage
            )

    def _link_stages(self) -> None:
        rows = self.config.max_num_batched_tokens
        self.link = StageLink(self._groups, rows, self.model_config.hidden_size, self.dtype)

    def _share_memory(self) -> None:
        with self._phase("share memory"):
            hidden_size = self.model_config.hidden_size
            max_rows = shared_sum_rows(self.config.max_num_batched_tokens, hidden_size * self.dtype.itemsize)
            self._notes = share_memory(
                self.config, self._groups, max_rows=max_rows, hidden_size=hidden_size, dtype=self.dtype
            )
            memory = self.group.peer_memory
            self._shared_bytes = 0 if memory is None else memory.num_bytes

    def _load_weights(self) -> None:
        with self._phase("load weights"):
            check_weights_fit(sum(self.model.weight_bytes().values()), self.device)
            if self.config.load_format == "random":
                self._weight_bytes = init_random_weights(self.model, self.device)
            else:
                self._weight_bytes = load_weights(self.model, self.config.model_path, self.device)
        with self._phase("wait for all ranks"):  # their files may be elsewhere, and slow
            self._world.meet("weights are loaded")

    def _make_slots(self) -> None:
        config = self.config
        self.slots = SlotTable(config, self.device)
        self.sampler = Sampler(self.slots, self.group, self.model_config.vocab_size)
        self._pinned_ids = [
            torch.empty(config.max_num_seqs, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            for _ in range(config.max_steps_in_flight + _STEPS_POSTED)
        ]
        self.upload = Uploader(
            8 * (config.max_num_batched_tokens + config.max_model_len)
            + 3 * config.max_num_seqs * (config.max_blocks_per_seq + 64),
            self.device,
            steps_in_flight=config.max_steps_in_flight,
        )

    def _select_attention(self) -> None:
        spec = self.model.attention_layers[0]
        case = AttentionCase(
            device=self.device,
            dtype=self.dtype,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
        )
        self.backend, notes = select_backend(self.config.attention_backend, case)
        self._notes += notes
        self._kv_spec = KVCacheSpec(
            num_layers=len(self.model.attention_layers),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self.config.block_size,
            dtype=self.dtype,
        )

    def _warm_up(self) -> None:
        """Run the largest batches once, on the null block, and measure what they need over the weights."""
        with self._phase("warm up"):
            self._use_kv_cache(1)
            self.decode_graphs: DecodeGraphs | None = None
            self.mixed_graphs: MixedGraphs | None = None
            with most_allocated(self.device) as peak:
                self._run_largest_batches()
            self._activation_bytes = peak()
            self._make_slots()

    def _run_largest_batches(self) -> None:
        # A CPU's KV cache has a budget of its own: there a small batch is enough to load what loads lazily.
        on_gpu = self.device.type == "cuda"
        num_tokens = self.config.max_num_batched_tokens
        num_tokens = num_tokens if on_gpu else min(num_tokens, _CPU_WARM_UP_TOKENS)
        num_seqs = self.config.max_num_seqs if on_gpu else 1
        for step in warm_up_steps(self.config, num_tokens, num_seqs):
            try:
                self.launch(step)
            except MemoryError as error:
                raise LimitsTooHigh(
                    f"the largest batches ({num_tokens} tokens, {num_seqs} requests) do not fit beside the weights "
                    f"({error}): lower max_num_batched_tokens or max_num_seqs, or raise tensor_parallel_size (--tp)"
                ) from None

    def _measure_graphs(self) -> None:
        """Capture the largest graphs on the null block, to know what all will take: the others share their memory."""
        self._graph_bytes = 0
        if self._uses_graphs:
            with self._phase("measure graphs"):
                self._use_kv_cache(1)
                decode, mixed = self._make_graphs()
                before = free_bytes(self.device)
                mixed.capture(mixed.sizes[-1:])
                decode.capture(decode.sizes[-1:])
                largest = before - free_bytes(self.device)
                decode.capture(decode.sizes[:1])
                smallest = before - largest - free_bytes(self.device)
                self._graph_bytes = largest + smallest * (len(decode.sizes) + len(mixed.sizes))
                del decode, mixed
                torch.cuda.empty_cache()

    def _size_kv_cache(self) -> None:
        self.memory_plan = plan_memory(
            self.config,
            self._kv_spec,
            self.device,
            weights=self._weight_bytes,
            buffers=self._allocated_bytes() - self._weight_bytes - self.kv_cache.num_bytes,
            activations=self._activation_bytes,
            graphs=self._graph_bytes,
            shared=self._shared_bytes,
        )
        self._num_blocks = self._groups.world.min(self.memory_plan.num_blocks)

    def _allocate_kv_cache(self) -> None:
        with self._phase("kv cache"):
            self._use_kv_cache(self._num_blocks)

    def _use_kv_cache(self, num_blocks: int) -> None:
        self.kv_cache = KVCache(self._kv_spec, num_blocks, self.device)
        self.decode_step = DecodeStep(self.model, self.slots, self.kv_cache, self.backend, self.sampler, self.link)

    def _capture_graphs(self) -> None:
        if self._uses_graphs:
            with self._phase("capture graphs"):
                before = free_bytes(self.device)
                decode, mixed = self._make_graphs()
                mixed.capture()  # first: the larger ones
                decode.capture()
                self.decode_graphs, self.mixed_graphs = decode, mixed
                self._graph_bytes = before - free_bytes(self.device)

    def _measure_memory(self) -> None:
        """What was planned, and where that is asked for what it came to: with the largest batches run once more."""
        on_gpu = self.device.type == "cuda"
        measured: dict[str, int] = {}
        if self.config.measure_memory:
            with self._phase("measure memory"):
                buffers = self._allocated_bytes() - self._weight_bytes - self.kv_cache.num_bytes
                with most_allocated(self.device) as peak:
                    self._run_largest_batches()
                self._make_slots()
                sizes = (
                    self._weight_bytes,
                    buffers,
                    peak(),
                    self._graph_bytes,
                    other_bytes(self.device, self._weight_bytes) - self._shared_bytes,
                    self.kv_cache.num_bytes,
                )
                measured = dict(zip(ITEMS, sizes, strict=True))
        self._memory_use: MemoryUse = MemoryUse(
            device=torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            total=torch.cuda.mem_get_info(self.device)[1] if on_gpu else total_ram(),
            budget=self.memory_plan.budget,
            weights=self.model.weight_bytes(),
            planned=self.memory_plan.items(),
            measured=measured,
        )

    @property
    def _uses_graphs(self) -> bool:
        return self.device.type == "cuda" and not self.config.enforce_eager and self.backend.captures_decode

    def _make_graphs(self) -> tuple[DecodeGraphs, MixedGraphs]:
        """Not captured yet."""

        def decode(slots: Tensor) -> DecodeOutput | PassedOn:
            batch = self.decode_step.batch(np.ones(len(slots), dtype=np.int64))
            self.backend.prepare_capture(batch)
            self.decode_step.advance(slots)
            return self.decode_step.compute(slots, batch, sample=True)

        config, pool = self.config, GraphPool()
        mixed = MixedGraphs(
            pool,
            self.model,
            self.slots,
            self.kv_cache,
            self.backend,
            self.sampler,
            self.upload,
            self.link,
            max_num_decodes=config.max_num_decodes,
            max_num_batched_tokens=config.max_num_batched_tokens if self.backend.captures_extend else 0,
        )
        return DecodeGraphs(pool, decode, config.max_num_decodes, self.slots.padding_slot, self.device), mixed

    def _allocated_bytes(self) -> int:
        """Of tensors on this rank's device, those that other ranks reach included; on a CPU of the two large ones."""
        if self.device.type == "cpu":
            return self._weight_bytes + self.kv_cache.num_bytes
        return torch.cuda.memory_allocated(self.device) + self._shared_bytes

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Names what the rank is doing, and keeps the time it took. Too little memory for it is a LimitsTooHigh."""
        self._context.report_phase(name)
        start = time.perf_counter()
        with memory_for(name):
            yield
        self._seconds[name] = time.perf_counter() - start

    # ------------------------------------------------------------------ steps

    def launch(self, step: StepInput) -> SampledTokens | None:
        """Run one step. On a GPU it is queued; nothing here waits for the device but a row that wants logprobs.

        Raises MemoryError where there is too little (see `Runner.launch`).
        """
        try:
            return self._launch(step)
        except RuntimeError as error:
            reason = out_of_memory_line(error)
            if reason is None:
                raise
        self._let_go()
        raise MemoryError(reason)

    def _let_go(self) -> None:
        """After a step that ran out of memory: wait for what it launched, and give back what it had taken."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what it uploaded is still being read
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _launch(self, step: StepInput) -> SampledTokens | None:
        if not self.stage.is_first:
            self.link.receive(self._num_rows(step))
        step_time = self._clock.start()
        self.slots.apply(step, self.upload)
        run = self._run_decode if step.mode == ForwardMode.DECODE else self._run_extend
        outcome = run(step)
        if isinstance(outcome, PassedOn):
            self._clock.stop(step_time)
            self.link.send(outcome.state)
            return None
        ids, logprobs = outcome
        host_ids = self._to_host(ids)
        self._clock.stop(step_time)
        is_output_rank = self._context.rank == self.config.output_rank
        return SampledTokens(step.step_id, host_ids, logprobs, step_time) if is_output_rank else None

    def peak_bytes(self) -> int:
        """The most memory that was in use."""
        return peak_bytes(self.device)

    def _num_rows(self, step: StepInput) -> int:
        """Of the step's forward pass, padding included: as many in every stage."""
        num_tokens = (len(step.decode_slots) + len(step.token_ids)) // 4
        if step.mode == ForwardMode.DECODE:
            return num_tokens if self.decode_graphs is None else self.decode_graphs.padded_size(num_tokens)
        graphs = self.mixed_graphs
        return graphs.num_rows(step) if graphs is not None and graphs.fits(step) else num_tokens

    def _run_decode(self, step: StepInput) -> Sampled | PassedOn:
        """One token for each request."""
        host_slots = unpack_ids(step.decode_slots)
        self.slots.num_computed_host[host_slots] += 1
        (slots32,) = self.upload(host_slots)
        slots = slots32.long()
        seq_lens = self.slots.num_computed_host[host_slots]
        plan = self.sampler.plan(tuple(host_slots.tolist()))
        if self.decode_graphs is not None:
            padding = self.decode_graphs.padded_size(len(seq_lens)) - len(seq_lens)
            self.backend.plan(self.decode_step.batch(np.pad(seq_lens, (0, padding), constant_values=1)))
            output = self.decode_graphs.replay(slots)
            if isinstance(output, DecodeOutput) and plan.is_simple:
                assert output.ids is not None
                return output.ids, []
        else:
            batch = self.decode_step.batch(seq_lens)
            self.decode_step.advance(slots)
            self.backend.plan(batch)
            output = self.decode_step.compute(slots, batch, sample=False)
        if isinstance(output, PassedOn):
            return output
        return self._sample(output.logits, slots, output.positions, plan)

    def _run_extend(self, step: StepInput) -> Sampled | PassedOn:
        """Prompt slices, beside decode rows or alone."""
        if self.mixed_graphs is not None and self.mixed_graphs.fits(step):
            return self._run_mixed_graph(self.mixed_graphs, step)
        batch = build_batch(step, self.slots, self.kv_cache, self.backend, self.upload)
        self.backend.plan(batch.forward)
        self.backend.plan_on_device(batch.forward)
        hidden = self.model.forward(batch.forward, self.link.received(batch.forward.num_tokens))
        if isinstance(hidden, StageState):
            return PassedOn(hidden)
        if not batch.sampling_slots_host:
            return torch.empty(0, dtype=torch.int32, device=self.device), []
        logits = self.model.compute_logits(hidden[batch.forward.logits_rows])
        plan = self.sampler.plan(batch.sampling_slots_host)
        return self._sample(logits, batch.sampling_slots, batch.positions, plan)

    def _run_mixed_graph(self, graphs: MixedGraphs, step: StepInput) -> Sampled | PassedOn:
        output, rows, host_slots = graphs.replay(step)
        if isinstance(output, PassedOn):
            return output
        plan = self.sampler.plan(host_slots)
        if plan.is_simple:
            return output.ids[rows], []
        chosen = output.rows(rows)
        return self._sample(chosen.logits, chosen.slots, chosen.positions, plan)

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor, plan: SamplingPlan) -> Sampled:
        """Choose ids, and put them where the next step looks for its input."""
        ids, logprobs = self.sampler.sample(logits, slots, positions, plan)
        self.slots.keep(slots, positions, ids)
        return ids, logprobs

    def _to_host(self, ids: Tensor) -> Tensor:
        """A copy that is complete when the step is."""
        if self.device.type == "cpu":
            return ids
        self._pinned_ids = self._pinned_ids[1:] + self._pinned_ids[:1]
        return self._pinned_ids[0][: len(ids)].copy_(ids, non_blocking=True)
