"""Session: a model that is started once and answers the rows of many calls.

Two threads work for it: one tokenizes, the other runs `job.run.loop.JobLoop` over the rows of all calls. These threads
start all processes, because the kernel ends a child with the thread that started it. The session handles no signals,
writes nothing to standard output, and knows nothing of files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nvcli.core.config import RunConfig
from nvcli.core.config_types import Order
from nvcli.core.system.process_limits import check_process
from nvcli.core.weight_changes import Sleep, WeightsChange, WeightsChanged
from nvcli.errors import ClosedError, ConfigError, NvcliError, WorkerError, first_line, named, reworded
from nvcli.job.job import Job, JobResult
from nvcli.job.rows.output_row import OutputForm
from nvcli.job.rows.row_warnings import RowWarnings
from nvcli.job.rows.task_rows import TaskRows
from nvcli.job.run.counts import Counts
from nvcli.job.run.engines import EngineEvents, EngineSet, StartEngine, start_engine
from nvcli.job.run.loop import JobLoop
from nvcli.job.run.plan import plan_replicas, window_rows
from nvcli.job.run.resolve import resolve_settings
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.llm.call import Call
from nvcli.llm.call_defaults import CallDefaults, Lora
from nvcli.llm.rows import ReadRow, Row, RowQueue, as_row, parse_row


class _Closing(Exception):
    """Tells the session to end."""


class _Change:
    """A change of the weights on its way to the engines."""

    def __init__(self, message: WeightsChange) -> None:
        self.message = message
        self.is_sent = False
        self.result: WeightsChanged | None = None
        """The engines' answer; None: they have not answered yet."""


class Session:
    """The engines, the threads that serve them, and the open calls."""

    def __init__(
        self,
        run: RunConfig,
        *,
        note: Callable[[str], None],
        start: StartEngine = start_engine,
        num_requests: int | None = None,
        needs_chat_template: bool = False,
    ) -> None:
        """Start the engines; `wait_ready` waits for them. Raises ConfigError, LoadError and CapacityError.

        `note` receives lines for the user, from any thread. `num_requests` is the number of requests at a time; None:
        many. A session that `needs_chat_template` ends with a ConfigError if the model has none.
        """
        check_process()
        self.resolved = resolve_settings(run)
        """The model and its settings."""
        self._plan = plan_replicas(self.resolved, num_requests=num_requests)
        for line in filter(None, (self._plan.why, *self.resolved.warnings, *self._plan.warnings)):
            note(line)
        self._engines = EngineSet(start)
        self._events = EngineEvents(self._engines, run.model, output=None, note=note, detail=note, warn=note)
        self._note = note
        self._needs_chat_template = needs_chat_template
        self._max_rows = window_rows(run, len(self._plan.engine_configs))
        self.form = OutputForm(created=int(time.time()), model=run.model, text_field=run.job.text_field)
        self._queue = RowQueue()
        self._feeder = self.resolved.make_feeder(self._queue, self._load_tokenizer)
        self._counts = Counts()
        self._changed = threading.Condition()
        self._was_ready = False
        self._tokenizer: Tokenizer | None = None
        self._failure: NvcliError | None = None
        self._is_closing = False
        self._calls: set[Call] = set()
        self._was_left = False
        """Whether a call was abandoned since the loop last looked for rows that nobody waits for."""
        self._change: _Change | None = None
        """The change of the weights that is being made; calls wait until it is done."""
        self._is_asleep = False
        self._loop: JobLoop | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="nvcli-loop", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until rows can be answered. Raises the error of the engines or the tokenizer."""
        with self._changed:
            while len(self._events.ready) < len(self._plan.engine_configs) or self._tokenizer is None:
                self._check_usable()
                self._changed.wait()
            self._was_ready = True

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be answered. Known once the session is ready."""
        assert self._tokenizer is not None, "the session is not ready"
        return bool(self._tokenizer.chat_template)

    def open_call(
        self,
        rows: Iterable[Row],
        *,
        order: Order,
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] = {},
        lora: Lora = None,
        seed: int | None = None,
        streams: bool = False,
        task: TaskRows | None = None,
        read: ReadRow = as_row,
    ) -> Call:
        """Start reading rows on their own thread, and return the call that collects their results.

        `sampling` overrides the session's defaults, and `lora` names the adapter: one for all rows, or one per row.
        `task` is what to compute instead of answers, and `read` converts a row to a dict. Raises ConfigError for
        sampling and adapters, and the error of a session that failed or is closed.
        """
        resolved = self.resolved
        defaults = CallDefaults(resolved.sampling_defaults, sampling, lora, adapters=resolved.adapter_names)
        defaults.check_rows(rows)
        call = Call(order=order, max_rows=self._max_rows, seed=seed, streams=streams)
        iterator = iter(rows)
        with self._changed:
            self._wait_for_change()
            if self._is_asleep:
                raise ClosedError("this LLM is asleep; call llm.wake() before it is used")
            self._calls.add(call)
        chat = resolved.choose_chat(task)
        parser = resolved.make_parser(chat, keep=lambda value: value, caller=call, task=task)
        assert self._tokenizer is not None, "the session is ready"
        resolved.tell_tokenizer(self._tokenizer, parser.warnings)
        parser.warnings.take_new()  # of the job's own variables the first load has told

        def read_rows() -> None:
            error: BaseException | None = None
            index = 0
            try:
                while call.wait_for_room():
                    try:
                        row = next(iterator)
                    except StopIteration:
                        defaults.check_length(index)
                        break
                    own = defaults.of_row(index)
                    parsed = parse_row(row, parser, index=index, read=read, defaults=own)
                    for warning in parser.warnings.take_new():
                        self._note(warning)
                    own_prompt = parsed.prompt if isinstance(parsed, Job) else None
                    call.add_row(index, row if isinstance(row, str) else own_prompt)
                    index += 1
                    if not self._queue.put(parsed):
                        break
            except BaseException as raised:  # handed over: it is the program's own
                error = raised
            call.end_input(error)

        threading.Thread(target=read_rows, name="nvcli-rows", daemon=True).start()
        return call

    def change_weights(self, message: WeightsChange) -> None:
        """Change the weights of all engines, or their memory, and return when that is done. Calls that are opened
        meanwhile wait for it.

        Raises ConfigError if answers are still to come, the LoadError, ConfigError or CapacityError for which nothing
        was changed, and the error of a session that failed or is closed.
        """
        with self._changed:
            self._wait_for_change()
            if num_waiting := sum(call.is_waiting for call in self._calls.copy()):
                calls = "1 call is" if num_waiting == 1 else f"{num_waiting} calls are"
                raise ConfigError(
                    f"{calls} still being answered; read all answers first, or close them: answers.close()"
                )
            change = self._change = _Change(message)
            while change.result is None:
                self._changed.wait()
                self._check_usable()
        if change.result.error_kind:
            raise named(change.result.error_kind, change.result.message)

    def _wait_for_change(self) -> None:
        """Wait until no change of the weights is being made. Raises as `_check_usable` does. The lock is held."""
        self._check_usable()
        while self._change is not None:
            self._changed.wait()
            self._check_usable()

    def leave(self, call: Call) -> None:
        """End a call. Its requests are aborted soon. Idempotent."""
        if os.getpid() == self._pid and call.leave():  # in a forked child, locks may be held forever
            self._was_left = True
        self._calls.discard(call)

    def begin_close(self) -> None:
        """Make the session end soon, without waiting. Takes no lock, because the garbage collector may call it."""
        self._is_closing = True

    def close(self) -> None:
        """End the engines and wait until they are gone. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self.begin_close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # What follows runs in the loop's thread.

    def _run(self) -> None:
        failure: NvcliError = ClosedError("this LLM was closed")
        try:
            try:
                engines = self._engines.take(self._plan.engine_configs)
                self._feeder.start()
                self._loop = JobLoop(
                    self.resolved.run, self._plan, engines, self._feeder, self, self._counts, self._events
                )
                self._loop.run(self._each_round)
            except _Closing:
                pass
            except NvcliError as error:
                failure = error
            finally:
                self._queue.close()
                self._feeder.stop()
                self._engines.close()
        except Exception as error:
            failure = WorkerError(f"nvcli failed: {first_line(error)}; this is a bug, please report it")
            failure.__cause__ = error
        if isinstance(failure, WorkerError) and failure.traceback:
            failure.add_note(failure.traceback)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
            calls = self._calls.copy()  # in one go: a call may be left, as garbage, at any time
        for call in calls:
            call.fail(failure)

    def _each_round(self) -> None:
        if self._is_closing:
            raise _Closing
        if not self._was_ready:
            with self._changed:
                self._changed.notify_all()  # engines may have become ready
        if self._was_left:
            self._was_left = False
            assert self._loop is not None
            self._loop.abort_unwanted()
        if self._change is not None:
            self._go_on_changing(self._change)

    def _go_on_changing(self, change: _Change) -> None:
        """Send a change of the weights to the engines, or take their answer."""
        assert self._loop is not None
        if not change.is_sent:
            self._loop.change_weights(change.message)
            change.is_sent = True
        elif (result := self._loop.changed) is not None:
            with self._changed:
                if not result.error_kind:
                    self._is_asleep = isinstance(change.message, Sleep)
                change.result, self._change = result, None
                self._changed.notify_all()

    def write(self, results: Sequence[JobResult]) -> Sequence[JobResult]:
        """Hand results to the waiting calls."""
        for result in results:
            caller = result.context.caller
            assert caller is not None
            caller.take(result)
        return results

    def tick(self) -> None:
        """Do nothing: results are handed over at once."""

    # What follows runs in the feeder's thread.

    def _load_tokenizer(self) -> Tokenizer:
        warnings = RowWarnings()
        tokenizer = self.resolved.load_tokenizer(warnings)
        if self._needs_chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"{self.resolved.run.model} has no chat template, so it cannot chat; name one as "
                "`job.chat_template` (--chat-template), or let the model continue a text: nvcli generate --raw -p TEXT"
            )
        for warning in warnings.take_new():
            self._note(warning)
        with self._changed:
            self._tokenizer = tokenizer
            self._changed.notify_all()
        return tokenizer

    def check_process(self) -> None:
        """Raise ClosedError in a forked child, where no thread brings results and locks may be held forever."""
        if os.getpid() != self._pid:
            raise ClosedError(f"this LLM belongs to process {self._pid}, and this is a fork of it; make a new LLM here")

    def _check_usable(self) -> None:
        """Raise the error of a session that failed or was closed. The lock is held."""
        self.check_process()
        if self._failure is not None:
            way_out = "\nthis LLM has ended; make a new one" if self._was_ready else ""
            raise reworded(self._failure, f"{self._failure}{way_out}")
        if self._is_closing:
            raise ClosedError("this LLM was closed; make a new one")
