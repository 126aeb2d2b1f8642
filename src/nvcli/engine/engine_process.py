"""An engine's process: the ranks, the scheduler and the loop of one replica, driven by the parent's messages."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from nvcli.core.engine_config import UNEVEN_ROWS, EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.core.weight_changes import WeightsChange
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.chunk_groups import PrefixCosts
from nvcli.engine.core import EngineCore
from nvcli.engine.draft_policy import NO_DRAFTS, Drafting
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.protocol import (
    AbortRequests,
    AddRequests,
    CloseEngine,
    EngineClosed,
    EngineFailed,
    EngineStart,
    ForgetPrefixes,
    FromEngine,
    OutputBatch,
    ToEngine,
)
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.errors import NvcliError, WorkerError, first_line
from nvcli.worker.executor.child_process import end_at_sigterm, end_children
from nvcli.worker.executor.executor import Executor
from nvcli.worker.executor.ranks import RankAhead

if TYPE_CHECKING:
    from nvcli.engine.step_recorder import StepRecorder

_STATS_SECONDS = 0.2
_IDLE_CHECK_SECONDS = 0.5
_MOST_ADDED = 256
"""Samples after which the next step waits for no more."""


def main(start: EngineStart, control: Connection, ahead: RankAhead | None = None) -> None:
    """Run an engine and its ranks until the parent ends it or is gone. Failures are reported.

    `ahead` is a rank that was started in advance.
    """
    end_at_sigterm()
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromEngine) -> None:
        control.send_bytes(encoder.encode(message))

    executor: Executor | None = None
    try:
        executor = Executor(start.config, start.runner, ahead)
        _serve(start.config, executor, _start_receiver(control), send)
    except NvcliError as error:
        details = error.traceback if isinstance(error, WorkerError) else ""
        with contextlib.suppress(OSError):
            send(EngineFailed(type(error).__name__, str(error), details))
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent may be gone, and that may be the error
            send(EngineFailed("WorkerError", f"the engine failed: {first_line(error)}", traceback.format_exc()))
    if executor is not None:
        executor.close()
    end_children()  # ranks of an executor that could not start all of them
    os._exit(0)


def scheduler_limits(config: EngineConfig, ready: EngineReady) -> SchedulerLimits:
    """Return the limits set by the configuration and by the ranks' report: their KV groups, and what they read once for
    several requests."""
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_request_tokens,
        block_size=config.block_size,
        whole_tokens=config.whole_tokens,
        keeps_prompts_whole=config.keeps_prompts_whole,
        num_micro_batches=config.pipeline_parallel_size,
        kv_groups=tuple(
            msgspec.structs.replace(group, token_bytes=group.token_bytes * config.num_ranks)
            for group in ready.kv_groups
        ),
        segment_costs=SegmentCosts() if ready.reads_segments else None,
        num_homes=config.num_homes,
        prefix_costs=PrefixCosts(tile_tokens=ready.prefix_tile_tokens) if ready.prefix_tile_tokens else None,
        max_loaded_adapters=ready.max_loaded_adapters,
        merged_adapters=config.merged_adapters,
        merged_only_adapters=config.merged_only_adapters,
        plans_admission=config.plan_admission,
        drafting=drafting_of(config, ready),
    )


def drafting_of(config: EngineConfig, ready: EngineReady) -> Drafting:
    """Return the limits of drafts; there are none where nobody wants any or the ranks cannot check them."""
    if not ready.max_draft_step_tokens:
        return NO_DRAFTS
    return Drafting(
        widths=config.draft_widths,
        uneven_widths=config.uneven_draft_widths,
        most_of_uneven=config.most_of_uneven,
        uneven_from=UNEVEN_ROWS,
        policy=config.draft_policy,
        max_step_tokens=ready.max_draft_step_tokens,
        accept_rate=config.draft_accept_rate,
        has_head=config.draft_head is not None,
    )


def _serve(
    config: EngineConfig,
    executor: Executor,
    inbox: queue.SimpleQueue[ToEngine | None],
    send: Callable[[FromEngine], None],
) -> None:
    """Make the scheduler once the ranks are ready, and run the engine's loop until the parent ends it."""
    ready = executor.wait_ready()
    send(ready)
    limits = scheduler_limits(config, ready)
    blocks = BlockManager(ready.num_blocks, enable_prefix_caching=config.enable_prefix_caching)
    recorder = _make_recorder(limits) if config.record_steps else None
    core = EngineCore(Scheduler(limits, blocks), executor, max_in_flight=config.max_steps_in_flight, recorder=recorder)
    gc.collect()
    gc.freeze()
    last_stats = 0.0
    last_lengths = 0.0
    running_lengths = b""
    late: deque[AddRequests] = deque()
    while _take_messages(inbox, late, core, executor, send):
        outputs = core.step()
        now = time.monotonic()
        if outputs or core.notes or now - last_stats > _STATS_SECONDS:
            if now - last_lengths > _STATS_SECONDS:
                running_lengths = core.scheduler.running_lengths()
                last_lengths = now
            stats = msgspec.structs.replace(core.scheduler.stats, running_lengths=running_lengths)
            send(OutputBatch(outputs, stats, core.take_records(), core.take_notes()))
            last_stats = now
    peak_bytes = executor.close()
    if config.record_steps:
        send(EngineClosed(peak_bytes))


def _make_recorder(limits: SchedulerLimits) -> StepRecorder:
    from nvcli.engine.step_recorder import StepRecorder  # numpy: ordinary runs start without it

    return StepRecorder(limits)


def _start_receiver(control: Connection) -> queue.SimpleQueue[ToEngine | None]:
    """Read the socket on its own thread, so that neither side ever waits for the other to read.

    None in the queue means that the parent is gone.
    """
    inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                inbox.put(decoder.decode(control.recv_bytes()))
        inbox.put(None)

    threading.Thread(target=receive, name="receive-requests", daemon=True).start()
    return inbox


def _take_messages(
    inbox: queue.SimpleQueue[ToEngine | None],
    late: deque[AddRequests],
    core: EngineCore,
    executor: Executor,
    send: Callable[[FromEngine], None],
) -> bool:
    """Hand waiting messages to the core, or wait for one if there is nothing to do. Returns False to end the engine.

    Large numbers of requests are handed over in portions, the rest while the ranks run steps; their messages wait in
    `late`. Other messages are handled at once.
    """
    while True:
        try:
            message = inbox.get(block=not (core.has_work or late), timeout=_IDLE_CHECK_SECONDS)
        except queue.Empty:
            if core.has_work or late:
                _add_requests(late, core, most=_MOST_ADDED)
                return True
            executor.check()
            continue
        if isinstance(message, AddRequests):
            late.append(message)
        elif isinstance(message, AbortRequests):
            _add_requests(late, core)
            core.scheduler.abort(message.request_ids)
        elif isinstance(message, ForgetPrefixes):
            _add_requests(late, core)
            core.scheduler.forget_prefixes()
        elif isinstance(message, WeightsChange):
            _add_requests(late, core)
            outputs, changed = core.change_weights(message)
            send(OutputBatch(outputs, core.scheduler.stats))
            send(changed)
        else:
            assert message is None or isinstance(message, CloseEngine)
            return False


def _add_requests(late: deque[AddRequests], core: EngineCore, *, most: float = math.inf) -> None:
    """Hand over messages, oldest first, until all are handed over or `most` samples have been."""
    num_added = 0
    while late and num_added < most:
        requests = late.popleft().requests
        core.scheduler.add(requests)
        num_added += sum(request.n for request in requests)
