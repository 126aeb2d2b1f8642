"""Executor: the ranks as the engine sees them. Steps go in, outputs come back, and a dead process ends the run.

In every phase it waits on all ranks at once: on their sockets, which close when a rank dies, and on the outputs that
one of them posts.
"""

from __future__ import annotations

import select
import time
from dataclasses import replace

import msgspec

from nvcli import errors
from nvcli.core.engine_config import EngineConfig
from nvcli.core.message_sizes import max_step_input_bytes, max_step_output_bytes
from nvcli.core.messages import MAX_KV_GROUPS, EngineReady, StepInput, StepOutput
from nvcli.core.weight_changes import LoadWeights, WeightsChange, WeightsChanged
from nvcli.worker.executor.channel import ChannelClosed, ChannelReader, ChannelWriter
from nvcli.worker.executor.rank_processes import RankProcesses
from nvcli.worker.executor.ranks import MODEL_RUNNER, RankAhead, Wiring

_SPARE_ENTRIES = 2
"""Messages that fit a channel besides the steps in flight: steps whose outputs are being taken in."""

_BEHIND_SECONDS = 0.0005
"""Seconds between checks whether a slow rank has caught up."""


class Executor:
    """Starts a replica's ranks, sends them steps, collects the outputs, and ends them. The ranks die with its
    process."""

    def __init__(self, config: EngineConfig, runner: str = MODEL_RUNNER, ahead: RankAhead | None = None) -> None:
        """`ahead` is a rank started in advance: it is used, or ended if there are several ranks."""
        self._config = config
        self._runner = runner
        self._loaded: LoadWeights | None = None
        """The weights that took the place of the configuration's."""
        self._spawn(ahead)

    def _spawn(self, ahead: RankAhead | None = None) -> None:
        config, size = self._config, self._config.num_ranks
        self._timeout = config.step_timeout
        if ahead is not None and size > 1:
            ahead.close()
            ahead = None
        wiring = (Wiring.create(size) if ahead is None else ahead.wiring).resized(
            steps=max_step_input_bytes(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.most_step_tokens,
                max_model_len=config.max_request_tokens,
                max_blocks_per_seq=config.max_blocks_per_seq * MAX_KV_GROUPS,  # the ranks will report their number
                max_draft_tokens=config.max_draft_tokens,
            )
            + config.image_message_bytes,
            outputs=max_step_output_bytes(
                max_num_seqs=config.max_num_seqs,
                max_step_logits=config.max_step_logits,
                max_num_batched_tokens=config.max_num_batched_tokens,
                hidden_size=config.embedding_size,
            ),
            num_entries=config.max_steps_in_flight + _SPARE_ENTRIES,
        )
        self._ranks = RankProcesses(config, self._runner, wiring, ahead)
        self._steps = ChannelWriter(wiring.steps)
        self._outputs = ChannelReader(wiring.outputs, 0)
        wiring.close_theirs()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepOutput)
        self._submitted: list[tuple[int, float]] = []
        """(id, time) of each submitted step whose output is still to come."""
        self._collected_at = 0.0
        """The time of the last output. A step's timeout starts no earlier, because the step waits for those before
        it."""
        self._poll = select.poll()
        self._poll.register(self._outputs.fileno(), select.POLLIN)
        self._ranks.register(self._poll)

    # ------------------------------------------------------------------ start

    def wait_ready(self) -> EngineReady:
        """Wait until all ranks are ready, and return their report (`RankProcesses.wait_ready`)."""
        ready = self._ranks.wait_ready()
        assert len(ready.kv_groups) <= MAX_KV_GROUPS, "steps may not fit the channel"
        self._num_blocks = ready.num_blocks
        return ready

    # ------------------------------------------------------------------ steps

    def submit(self, step: StepInput) -> None:
        """Send a step to all ranks. Returns at once unless a rank is several steps behind."""
        deadline = time.monotonic() + self._timeout
        while not self._steps.has_room and self._ranks.out_of_memory is None:
            self.check()
            if time.monotonic() > deadline:
                self._ranks.raise_stuck()
            time.sleep(_BEHIND_SECONDS)
        if self._ranks.out_of_memory is None:
            try:
                self._steps.send(self._encoder.encode(step))
            except ChannelClosed:
                self._ranks.raise_failure()
        self._submitted.append((step.step_id, time.monotonic()))

    def collect(self) -> StepOutput:
        """Wait for the output of the oldest submitted step, and return it."""
        step_id, submitted_at = self._submitted[0]
        deadline = max(submitted_at, self._collected_at) + self._timeout
        while True:
            if self._ranks.out_of_memory is not None and self._ranks.out_of_memory.step_id <= step_id:
                self._submitted.pop(0)
                return replace(self._ranks.out_of_memory, step_id=step_id).result()
            if self._outputs.poll(0):
                break
            events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                self._ranks.raise_stuck()
            if any(fd != self._outputs.fileno() for fd, _ in events):
                self._ranks.check()
        try:
            message = self._outputs.receive()
        except ChannelClosed:
            self._ranks.raise_failure()
        self._submitted.pop(0)
        self._collected_at = time.monotonic()
        return self._decoder.decode(message)

    def check(self) -> None:
        """Raise the error of a rank that failed or died. Call it while no step is in flight."""
        if any(fd != self._outputs.fileno() for fd, _ in self._poll.poll(0)):
            self._ranks.check()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        """Go on with these limits after a step that ran out of memory; no step may be in flight.

        A lone rank carries on, and the result is None. Several ranks are restarted, and the result is the number of
        their KV blocks, which are empty. That takes as long as the start and raises the errors of `wait_ready`; it may
        be called again after LimitsTooHigh. New ranks load the weights that the others had.
        """
        assert not self._submitted
        if len(self._ranks) == 1:
            return None
        self._end(deadline=0.0)
        self._config = msgspec.structs.replace(
            self._config,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_blocks_before=self._num_blocks,
        )
        self._spawn()
        num_blocks = self.wait_ready().num_blocks
        if self._loaded is not None:
            changed = self.change_weights(self._loaded)
            if changed.error_kind:
                raise errors.named(changed.error_kind, changed.message)
        return num_blocks

    def change_weights(self, change: WeightsChange) -> WeightsChanged:
        """Send a change of the weights to all ranks, and wait for it, which may take any time. No step may be in
        flight. Raises the error of a rank that failed or died."""
        assert not self._submitted
        try:
            self._steps.send(self._encoder.encode(change))
        except ChannelClosed:
            self._ranks.raise_failure()
        changed = self._ranks.wait_changed()
        if isinstance(change, LoadWeights) and not changed.error_kind:
            self._loaded = change
        return changed

    # ------------------------------------------------------------------ ends

    def close(self) -> list[int]:
        """End all ranks: they leave when their channel closes, or are killed. Idempotent.

        Returns the `Runner.peak_bytes` of each rank, or 0 for a rank that did not report it (`record_steps`).
        """
        self._steps.close()
        deadline = time.monotonic() + 1.0
        peak_bytes = self._ranks.peak_bytes(deadline)
        self._end(deadline)
        return peak_bytes

    def _end(self, deadline: float) -> None:
        """Close the channels, and end the ranks (`RankProcesses.end`)."""
        self._steps.close()
        self._ranks.end(deadline)
        self._outputs.close()
