"""A rank's process: it makes the runner, reports that it is ready, and runs every step that arrives on the channel.

All ranks run this code. On one of them (`EngineConfig.output_rank`) a separate thread also posts the runner's outputs,
so that the next step is launched while the last one's tokens are still on their way from the device.

Running out of memory in a step does not end a rank: it reports the step and skips the later ones, which build on it. A
lone rank goes on with the next step that `restarts`. With several ranks the others wait in collectives that this one
never enters, so the executor ends them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import signal
import threading
import time
from multiprocessing.connection import Connection
from pkgutil import resolve_name

import msgspec

from nvcli.core.messages import StepInput
from nvcli.core.system.kernel_cache import kernel_cache_error
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.errors import CapacityError, ConfigError, LoadError
from nvcli.kernels.triton.launch.compile_processes import hash_triton
from nvcli.worker.distributed.rendezvous import store_path
from nvcli.worker.executor.channel import ChannelClosed, ChannelReader, ChannelWriter
from nvcli.worker.executor.child_process import end_children
from nvcli.worker.executor.rank_messages import RankClosed, RankFailed, StatusBoard, StepNotRun
from nvcli.worker.executor.ranks import MODEL_RUNNER, RankStart
from nvcli.worker.runner.compiled_programs import start_compilers
from nvcli.worker.runner.interface import PendingOutput, RankContext, Runner


def main(start: RankStart | None, control: Connection) -> None:
    """Run a rank until the engine closes the channel. The process ends here, without interpreter tear-down.

    `start` None: it will arrive over `control`; until then the rank imports what all models need.
    """
    gc.disable()  # off until all is imported: there is little to collect, and much to scan
    if start is None:
        threading.Thread(target=_import_ahead, name="import-ahead", daemon=True).start()
        start = control.recv()
    code = 0
    try:
        _run(start, control)
    except ChannelClosed:
        pass
    except BaseException as error:
        _report_failure(error, control)
        code = 1
    end_children(signal.SIGTERM)  # the mask workers, which end their own children
    os._exit(code)


def _run(start: RankStart, control: Connection) -> None:
    started_at = time.monotonic()
    rank = start.rank
    status = StatusBoard(start.wiring.status_fd, start.config.num_ranks)

    status.report(rank, "import")
    if start.config.device == "cuda":
        _open_gpu_context(start.config.gpu_index(rank))
        threading.Thread(target=hash_triton, name="hash-triton", daemon=True).start()
    context = RankContext(
        rank=rank,
        report_phase=lambda phase: status.report(rank, phase),
        store_path=store_path(start.wiring.store_fd),
        spawned_at=start.spawned_at,
        started_at=started_at,
        compilers=start_compilers(start.config),
    )
    make_runner = resolve_name(start.runner)
    gc.freeze()  # imports live forever: the collector need not scan them
    gc.enable()
    runner: Runner = make_runner(start.config, context)
    is_output_rank = rank == start.config.output_rank
    post = _start_poster(ChannelWriter(start.wiring.outputs), control) if is_output_rank else None
    gc.collect()
    gc.freeze()  # so do the objects made at the start
    control.send(runner.ready)
    try:
        _serve(start, runner, post, control, status)
    except ChannelClosed:
        if start.config.record_steps:
            with contextlib.suppress(OSError):  # the engine is gone: no one asks
                control.send(RankClosed(runner.peak_bytes()))


def _serve(
    start: RankStart,
    runner: Runner,
    post: queue.SimpleQueue[PendingOutput] | None,
    control: Connection,
    status: StatusBoard,
) -> None:
    """Run the steps that arrive, one after the other, and post their outputs. Raises ChannelClosed once the engine has
    no more."""
    rank, config = start.rank, start.config
    messages = ChannelReader(start.wiring.steps, rank)
    decoder: msgspec.msgpack.Decoder[StepInput | WeightsChange] = msgspec.msgpack.Decoder(StepInput | WeightsChange)
    not_run = ""  # why nothing runs until a step restarts
    while True:
        status.report(rank, "waiting for a step")
        step = decoder.decode(messages.receive())
        if not isinstance(step, StepInput):  # a change of the weights, which comes between steps
            status.report(rank, "changing the weights")
            control.send(change_weights(runner, step))
            continue
        status.report(rank, "step", step.step_id)
        pending: PendingOutput | None
        if not_run and not step.restarts:
            pending = StepNotRun(step.step_id, not_run)
        else:
            try:
                pending, not_run = runner.launch(step), ""
            except MemoryError as error:
                not_run = f"{config.rank_name(rank)}: {str(error) or 'out of memory'}"
                pending = StepNotRun(step.step_id, not_run)
                if config.num_ranks > 1:
                    control.send(pending)
        if post is not None:
            assert pending is not None
            post.put(pending)


def change_weights(runner: Runner, change: WeightsChange) -> WeightsChanged:
    """Let a runner change its weights; return the error for which nothing was changed, if there is one."""
    try:
        runner.change_weights(change)
    except (LoadError, ConfigError, CapacityError) as error:
        return WeightsChanged(type(error).__name__, str(error))
    return WeightsChanged()


def _import_ahead() -> None:
    with contextlib.suppress(Exception):  # the rank will fail the same way
        resolve_name(MODEL_RUNNER)


def _open_gpu_context(index: int) -> None:
    """Create the primary context of GPU `index`, which torch will use, on a thread, while torch is being imported.

    If the driver is missing or refuses, nothing happens here: torch runs into the same error and reports it.
    """

    def open_context() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    threading.Thread(target=open_context, name="open-gpu-context", daemon=True).start()


def _start_poster(outputs: ChannelWriter, control: Connection) -> queue.SimpleQueue[PendingOutput]:
    pending_outputs: queue.SimpleQueue[PendingOutput] = queue.SimpleQueue()

    def post() -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while True:
                outputs.send(encoder.encode(pending_outputs.get().result()))
        except ChannelClosed:
            os._exit(0)
        except BaseException as error:
            _report_failure(error, control)
            os._exit(1)

    threading.Thread(target=post, name="post-outputs", daemon=True).start()
    return pending_outputs


def _report_failure(error: BaseException, control: Connection) -> None:
    failure = RankFailed.of(kernel_cache_error(error) or error)
    with contextlib.suppress(OSError):  # the engine is gone: no one to tell
        control.send(failure)
