"""ModelRunner: one rank of a replica. It is built in the order below, then runs steps (`step_runner.py`).

Every rank runs the same code and has the same token ids on its device. A step's ids feed the next step through the slot
table, never through the host. With pipeline stages only the ranks of the last stage choose ids, and the first stage
gets them with the next step's input.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import torch

from nvcli.attention.kept_states import KeptStates
from nvcli.attention.kv_cache import KVCache
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady, MemoryUse, StepInput
from nvcli.core.structured import MAX_END_IDS
from nvcli.core.weight_changes import WeightsChange
from nvcli.kernels.triton.launch.compile_processes import CompileProcesses
from nvcli.models.registry import build_model
from nvcli.sizing.kv_cache import max_blocks, tokens_in_blocks
from nvcli.sizing.memory import shared_sum_rows
from nvcli.sizing.memory_plan import NeededMemory
from nvcli.worker.distributed.peer_memory import share_memory
from nvcli.worker.distributed.process_group import divide_ranks, join_process_group
from nvcli.worker.distributed.stage import Stage
from nvcli.worker.distributed.stage_link import StageLink
from nvcli.worker.masks.mask_workers import MaskWorkers
from nvcli.worker.runner.constraints import Constraints, start_workers
from nvcli.worker.runner.device import has_fp8_units, import_on_thread, kept_weights_note, open_device
from nvcli.worker.runner.first_start import compile_kernels, due_program, note_compiled
from nvcli.worker.runner.graph_shapes import GraphShapes
from nvcli.worker.runner.home_buffers import HomeBuffers
from nvcli.worker.runner.input_buffers import InputBuffers
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.memory import (
    affordable_draft_tokens,
    check_positions_fit,
    check_weights_fit,
    free_bytes,
    oom_as_limits_error,
    other_bytes,
    out_of_memory_line,
    peak_allocated,
    peak_bytes,
    plan_memory,
    report_memory,
    reserve_contiguous,
)
from nvcli.worker.runner.memory_regions import MemoryRegion, make_region
from nvcli.worker.runner.model_drafter import ModelDrafter
from nvcli.worker.runner.rank_adapters import RankAdapters
from nvcli.worker.runner.rank_attention import RankAttention
from nvcli.worker.runner.rank_weights import RankWeights, read_files
from nvcli.worker.runner.sampler import Sampler
from nvcli.worker.runner.slot_table import SlotTable
from nvcli.worker.runner.step_clock import StepClock
from nvcli.worker.runner.step_images import StepImages
from nvcli.worker.runner.step_results import PendingStep
from nvcli.worker.runner.step_runner import StepRunner
from nvcli.worker.runner.warm_up import run_largest_batches
from nvcli.worker.runner.weight_changes import WeightChanges


class ModelRunner:
    """One rank of a replica: its model, tables and KV cache, and the steps that run over them. `Executor` makes it by
    default."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        self.config = config
        self._context = context
        self._seconds = {
            "spawn": context.started_at - context.spawned_at,
            "import": time.monotonic() - context.started_at,
        }
        self._kv_region: MemoryRegion | None = None
        with torch.inference_mode():
            self._open_device()
            self._join_process_group()
            self._build_model()
            self._share_memory()
            self._prepare_grammars()
            self._begin_weights()
            self._limit_drafts()
            self._select_attention()
            self._choose_graphs()
            self._make_slots()
            self._make_adapters()
            self._make_steps()
            self._compile_kernels()
            self._finish_weights()
            self._keep_base_weights()
            self._warm_up()
            self._measure_graphs()
            self._size_kv_cache()
            self._allocate_kv_cache()
            self._capture_graphs()
            reserve_contiguous(self._activation_bytes, self.device)
            self._measure_memory()
        self._weight_changes = WeightChanges(
            self.weights, self._kv_region, self.world, self.device, activation_bytes=self._activation_bytes
        )
        self.ready = self._report()

    # ------------------------------------------------------------------ start-up, in this order

    def _open_device(self) -> None:
        with self._phase("open device"):
            self.device = open_device(self.config, self._context.rank)
            self._kernel_imports = import_on_thread() if self.device.type == "cuda" else None
            self.dtype: torch.dtype = getattr(torch, self.config.dtype)
            self._clock = StepClock(self.device, looks_into_steps=self.config.record_steps)

    def _join_process_group(self) -> None:
        config, rank = self.config, self._context.rank
        with self._phase("process group"):
            self.world = self._context.world or join_process_group(
                rank,
                self._context.store_path,
                self.device,
                size=config.num_ranks,
                timeout_seconds=config.step_timeout,
            )
            self._groups = divide_ranks(config, self.world.group, rank)
            self.group = self._groups.tensor
            self.group.sums_in_order = config.batch_invariant
            self.stage = Stage(config.stage_of(rank), config.pipeline_parallel_size)

    def _build_model(self) -> None:
        with self._phase("build model"):
            files = read_files(self.config, self.config.model_path)
            self.model_config, self._row_adapters = files.config, files.row_adapters
            self.model = build_model(
                self.model_config,
                self.group,
                self.dtype,
                max_positions=self.config.max_model_len,
                stage=self.stage,
                has_fp8_units=has_fp8_units(self.device, self.config.fp8_accumulation),
                fp8_accumulation=self.config.fp8_accumulation,
                batch_invariant=self.config.batch_invariant,
                has_adapters=bool(self.config.placed_adapters),
            )
            self.weights = RankWeights(self.model, self.config, self.device, files)

    def _share_memory(self) -> None:
        with self._phase("share memory"):
            hidden_size = self.model_config.hidden_size
            max_rows = shared_sum_rows(self.config.max_num_batched_tokens, hidden_size * self.dtype.itemsize)
            self._notes = share_memory(
                self.config, self._groups, max_rows=max_rows, hidden_size=hidden_size, dtype=self.dtype
            )
            memory = self.group.peer_memory
            self._shared_bytes = 0 if memory is None else memory.num_bytes

    def _prepare_grammars(self) -> None:
        """Start mask workers in the background, if the first rows want constrained answers and this rank samples."""
        config, model = self.config, self.model_config
        self._mask_workers: MaskWorkers | None = None
        end_ids = [token for token in model.eos_token_ids if token < model.vocab_size][:MAX_END_IDS]
        if config.prepare_grammars and end_ids and self._context.rank == config.output_rank:
            self._mask_workers = start_workers(config, model.vocab_size, end_ids, self.device)

    def _begin_weights(self) -> None:
        """Start loading the weights on threads, while kernels are imported and compiled."""
        with self._phase("begin weights"):
            check_weights_fit(sum(self.model.weight_bytes().values()), self.device)
            check_positions_fit(self.config, self.model_config.decoder.angles_per_position, self.device)
            has_units = has_fp8_units(self.device)
            if note := kept_weights_note(self.model_config, self.config.dtype, has_units=has_units):
                self._notes.append(note)
            self.weights.begin(self._notes.append)

    def _limit_drafts(self) -> None:
        """Limit the tokens of steps with drafts to what fits beside the weights, with one limit for all ranks."""
        if self.config.max_draft_tokens and self.device.type == "cuda":
            weight_bytes = sum(self.model.weight_bytes().values())
            tokens = affordable_draft_tokens(self.config, self.model_config, weight_bytes, self.device)
            self.config = msgspec.structs.replace(self.config, draft_step_tokens=self._groups.world.min(tokens))

    def _select_attention(self) -> None:
        self._attention = RankAttention.of(self.config.of_home, self.model, self.device, self.dtype, self._groups.world)
        self.backend = self._attention.backend
        self._notes += self._attention.notes

    def _choose_graphs(self) -> None:
        if self.config.max_draft_tokens and (reason := self._attention.why_no_drafts):
            self._notes.append(f"note: no tokens are drafted (`speculation`): {reason}")
        self._graph_shapes = GraphShapes.choose(self.config.of_home, self.model_config, self._attention, self.device)

    def _make_slots(self) -> None:
        """Make the empty tables and buffers of the steps, large enough for padded steps."""
        config = self.config
        num_streams = self.model_config.decoder.num_streams
        sizes = config.max_padded_tokens, self.model_config.hidden_size, self.dtype
        self.link = StageLink(self._groups, *sizes, num_streams)
        self.slots = SlotTable(config, self._attention.kv_spec.num_groups, self.device)
        vocab_size = self.model_config.vocab_size
        self.sampler = Sampler(self.slots, self.group, vocab_size, batch_invariant=config.batch_invariant)
        has_images = self.model_config.has_tower
        self._images = StepImages(config, self.model, self.slots, self.group, self.device) if has_images else None
        self._image_encoder = None if self._images is None else self._images.encoder
        self.kept_states: KeptStates | None = None
        self._model_drafter: ModelDrafter | None = None
        if self._attention.may_draft:
            kv_spec = self._attention.kv_spec
            if kv_spec.state_groups:
                most_tokens, most_rows = config.max_draft_step_tokens, config.max_padded_rows
                self.kept_states = KeptStates(kv_spec, most_tokens, most_rows, self.device)
            if self.model.draft_head is not None:
                self._model_drafter = ModelDrafter(config, self.model, self.slots, self.sampler, self._images)
        self.constraints = Constraints(
            *(config, vocab_size, self.device),
            follows=self._context.rank == config.output_rank,
            may_hold=self._may_hold_rows(),
            token_ids=self.slots.state.token_ids,
            workers=self._mask_workers,
        )
        state = self.slots.state
        has_homes = config.num_homes > 1
        self.buffers = HomeBuffers(state, config, self.group.rank) if has_homes else InputBuffers(state, config)

    def _may_hold_rows(self) -> bool:
        """Whether a step may give fewer tokens for a row than it computed, so that the next one computes them again."""
        if self.config.pipeline_parallel_size > 1 or self.backend.needs_exact_lens:
            return False
        return not self._attention.has_states  # without drafts, they take in a token at once

    def _make_adapters(self) -> None:
        with self._phase("make adapters"):
            self._adapters = RankAdapters(
                self.config, self.model, self._row_adapters, self.slots, self.device, self._groups.world, self.dtype
            )

    def _make_steps(self) -> None:
        adapters = self._adapters if self._row_adapters else None
        self.steps = StepRunner(
            *(self.config, self.model, self.slots, self.buffers, self.backend),
            sampler=self.sampler,
            constraints=self.constraints,
            extras=[each for each in (adapters, self._images) if each is not None],
            link=self.link,
            clock=self._clock,
            model_drafter=self._model_drafter,
            kept_states=self.kept_states,
            may_draft=self._attention.may_draft,
        )

    def _compile_kernels(self) -> None:
        """Compile the kernels of the model's first start side by side; later starts load them in the warm-up."""
        if self._kernel_imports is not None:
            with self._phase("import kernels"):
                self._kernel_imports.join()
        program = due_program(self.config, self.device, self._groups.world)
        if program is None:
            return
        with self._phase("compile kernels"), closing(self._context.compilers or CompileProcesses()) as processes:
            self._use_kv_cache(1)
            note = compile_kernels(processes, self.device, self._run_steps_to_compile)
            note_compiled(program, self.device)  # after a failure too, which would recur at the next start
            torch.cuda.empty_cache()
            self._notes += [note] if note else []

    def _run_steps_to_compile(self) -> None:
        """Launch everything that is launched until the rank is ready: the warm-up, and the steps of all graphs."""
        self._run_largest_batches()
        self.steps.make_graphs(self._graph_shapes.at_start).run()

    def _finish_weights(self) -> None:
        with self._phase("load weights"):
            self.weights.finish(self._notes.append)
            self._weight_bytes = sum(self.model.weight_bytes().values())
        with self._phase("wait for all ranks"):  # their files may be elsewhere, and slow
            self.world.meet("weights are loaded")

    def _keep_base_weights(self) -> None:
        if self.config.merged_adapters:
            with self._phase("keep base weights"):
                self._notes.append(self._adapters.keep_base_weights())

    def _warm_up(self) -> None:
        """Run the largest batches once, on the null block, and measure the memory that they need beside the
        weights."""
        with self._phase("warm up"):
            self._use_kv_cache(1)
            with peak_allocated(self.device) as peak:
                self._run_largest_batches()
            self._activation_bytes = peak()

    def _run_largest_batches(self) -> None:
        run_largest_batches(
            self.launch, self.config, self.device, self._attention, num_places=self._adapters.num_places
        )
        if self._image_encoder is not None:
            self._image_encoder.run_largest()

    def _measure_graphs(self) -> None:
        """Estimate the memory of all graphs from a few, which are captured on the null block."""
        self._graph_bytes = 0
        if self._graph_shapes.at_start:
            with self._phase("measure graphs"):
                self._use_kv_cache(1)
                graphs = self.steps.make_graphs(self._graph_shapes.at_start)
                self._graph_bytes = self._graph_shapes.estimate_bytes(graphs, self.device)
                del graphs
                torch.cuda.empty_cache()

    def _size_kv_cache(self) -> None:
        self.memory_plan = plan_memory(
            self.config,
            self._attention.kv_spec,
            self.device,
            NeededMemory(
                weights=self._weight_bytes,
                adapters=self._adapters.num_bytes,
                buffers=self._buffer_bytes() + (0 if self._images is None else self._images.num_bytes),
                activations=self._activation_bytes,
                graphs=self._graph_bytes,
            ),
            max_blocks=max_blocks(self.config, self.model_config),
            outside=self._bytes_outside(),
        )
        self._num_blocks = self._groups.world.min(self.memory_plan.num_blocks)

    def _allocate_kv_cache(self) -> None:
        with self._phase("kv cache"):
            self._kv_region = make_region(self._num_blocks * self._attention.kv_spec.block_bytes, self.device)
            self._use_kv_cache(self._num_blocks, None if self._kv_region is None else self._kv_region.memory)

    def _use_kv_cache(self, num_blocks: int, memory: torch.Tensor | None = None) -> None:
        self.kv_cache = KVCache(self._attention.kv_spec, num_blocks, self.device, memory)
        self.steps.use_kv_cache(self.kv_cache)

    def _capture_graphs(self) -> None:
        shapes = self._graph_shapes
        if shapes.at_start:
            with self._phase("capture graphs"):
                before = free_bytes(self.device)
                graphs = self.steps.make_graphs(shapes.at_start + shapes.late)
                graphs.capture(shapes.at_start)
                self.steps.graphs = graphs
                self._graph_bytes = before - free_bytes(self.device)

    def _measure_memory(self) -> None:
        """Record the planned memory; if asked to, run the largest batches once more and record the memory in use."""
        measured: dict[str, int] = {}
        if self.config.measure_memory:
            with self._phase("measure memory"):
                buffers = self._buffer_bytes()
                graphs, self.steps.graphs = self.steps.graphs, None  # they would use their own memory
                with peak_allocated(self.device) as peak:
                    self._run_largest_batches()
                self.steps.graphs = graphs
                other = other_bytes(self.device, self._weight_bytes + self._adapters.num_bytes) - self._bytes_outside()
                needed = NeededMemory(
                    weights=self._weight_bytes,
                    adapters=self._adapters.num_bytes,
                    buffers=buffers,
                    activations=peak(),
                    graphs=self._graph_bytes,
                    other=other,
                )
                measured = needed.items(self.kv_cache.num_bytes)
        self._memory_use: MemoryUse = report_memory(self.device, self.model.weight_bytes(), self.memory_plan, measured)

    def _report(self) -> EngineReady:
        """Return what the engine needs to know about a ready rank."""
        return EngineReady(
            num_blocks=self.kv_cache.num_blocks - 1,  # the null block is not usable
            block_size=self.config.block_size,
            kv_cache_bytes=self.kv_cache.num_bytes,
            kv_cache_tokens=tokens_in_blocks(self.kv_cache.num_blocks - 1, self.config, self.model_config),
            weight_bytes=self._weight_bytes,
            attention_backend=self.backend.name,
            kv_groups=[
                msgspec.structs.replace(group, token_bytes=self._attention.kv_spec.token_bytes(number))
                for number, group in enumerate(self._attention.kv_groups)
            ],
            reads_segments=self._attention.max_shared_rows > 0,
            max_draft_step_tokens=self.config.max_draft_step_tokens if self._attention.may_draft else 0,
            prefix_tile_tokens=self._attention.prefix_tile_tokens,
            max_loaded_adapters=self._adapters.num_places,
            seconds=self._seconds,
            notes=self._notes,
            memory=[self._memory_use],
        )

    def _buffer_bytes(self) -> int:
        """Count the bytes of tensors on a GPU that are not weights, adapters or KV cache, including memory that is
        shared with other ranks."""
        if self.device.type == "cpu":
            return 0
        allocated = torch.cuda.memory_allocated(self.device) + self._bytes_outside()
        return allocated - self._weight_bytes - self._adapters.num_bytes - self.kv_cache.num_bytes

    def _bytes_outside(self) -> int:
        """Count the bytes of the rank's tensors on a GPU that torch's allocator does not know: regions, and memory that
        is shared with other ranks."""
        if self.device.type == "cpu":
            return 0
        regions = (self.weights.region, self._kv_region)
        return self._shared_bytes + sum(region.num_bytes for region in regions if region is not None)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Note what the rank is doing and how many seconds it takes. Raises LimitsTooHigh if memory runs out
        meanwhile."""
        self._context.report_phase(name)
        start = time.perf_counter()
        with oom_as_limits_error(name):
            yield
        self._seconds[name] = time.perf_counter() - start

    # ------------------------------------------------------------------ steps

    @torch.inference_mode()
    def launch(self, step: StepInput) -> PendingStep | None:
        """Run one step; on a GPU it is queued. Returns None on ranks whose output is not used.

        Raises MemoryError if memory runs out (see `Runner.launch`).
        """
        try:
            pending = self.steps.run(step)
            return pending if self._context.rank == self.config.output_rank else None
        except RuntimeError as error:
            reason = out_of_memory_line(error)
            if reason is None:
                raise
        self._free_after_oom()
        raise MemoryError(reason)

    @torch.inference_mode()
    def change_weights(self, change: WeightsChange) -> None:
        """Replace the weights, or give up and take back their memory and the KV cache's (see
        `Runner.change_weights`)."""
        self._weight_changes.apply(change)
        if self._image_encoder is not None:
            self._image_encoder.forget()

    def _free_after_oom(self) -> None:
        """Wait for the work that a step launched before it ran out of memory, and free its memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # its uploads are still being read
            torch.cuda.empty_cache()

    def peak_bytes(self) -> int:
        """Return the peak memory use, in bytes."""
        return peak_bytes(self.device)
