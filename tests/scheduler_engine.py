"""An engine without processes or a model, around the real scheduler and block manager: counts what it computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady, KVGroup, StepInput, StepOutput, unpack
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore, StepExecutor
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.engine.scheduler import Scheduler


class InstantExecutor:
    """Answers every step with token 5."""

    def __init__(self) -> None:
        self._outputs: deque[StepOutput] = deque()

    def submit(self, step: StepInput) -> None:
        num_logits = sum(unpack(step.num_logits))
        self._outputs.append(StepOutput(step_id=step.step_id, token_ids=b"\x05\0\0\0" * num_logits))

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        raise AssertionError("no step runs out of memory")


class SchedulerEngine:
    """Takes a step with each poll. `num_blocks`: size of the KV cache; `kv_groups`: those of the model."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        executor: StepExecutor | None = None,
        kv_groups: Sequence[KVGroup] = (KVGroup(),),
    ) -> None:
        self._ready = EngineReady(
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_cache_bytes=0,
            kv_cache_tokens=num_blocks * config.block_size,
            weight_bytes=0,
            attention_backend="none",
            seconds={},
            kv_groups=list(kv_groups),
        )
        blocks = BlockManager(num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(scheduler_limits(config, self._ready), blocks)
        steps: Any = executor or InstantExecutor()
        self._core = EngineCore(self.scheduler, steps, max_in_flight=config.max_steps_in_flight)
        self._outputs: list[RequestOutput] = []
        self._changed: WeightsChanged | None = None
        self._event, self._is_awake = os.eventfd(1), True

    def fileno(self) -> int:
        """Readable while there is something to do, as that of an engine in a process of its own: whoever waits for it
        beside other processes leaves these the core."""
        return self._event

    def _wake(self, is_awake: bool = True) -> None:
        if is_awake and not self._is_awake:
            os.eventfd_write(self._event, 1)
        elif self._is_awake and not is_awake:
            os.eventfd_read(self._event)
        self._is_awake = is_awake

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        return self._ready

    def add(self, requests: list[Request]) -> None:
        self._core.scheduler.add(requests)
        self._wake()

    def abort(self, request_ids: Sequence[int]) -> None:
        self._core.scheduler.abort(request_ids)
        self._wake()

    def poll(self, timeout: float) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        if self._core.has_work:
            outputs += self._core.step()
        self._wake(self._core.has_work)
        return outputs

    def change_weights(self, change: WeightsChange) -> None:
        self._outputs, self._changed = self._core.change_weights(change)
        self._wake()

    def take_changed(self) -> WeightsChanged | None:
        changed, self._changed = self._changed, None
        return changed

    def take_notes(self) -> list[str]:
        return self._core.take_notes()

    @property
    def stats(self) -> EngineStats:
        return self._core.scheduler.stats

    def close(self) -> None:
        os.close(self._event)
