"""One step in flight: the next step is scheduled and submitted while the one before it still runs."""

from __future__ import annotations

import threading

from fake_runners import BLOCK_SIZE
from nvcli.core.messages import StepInput, StepOutput, pack, unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from requests_factory import make_request


class SlowExecutor:
    """Runs steps one after the other on a thread; a step ends only when the test lets it."""

    def __init__(self) -> None:
        self.may_finish = threading.Semaphore(0)
        self.submitted: list[int] = []
        self.finished: list[int] = []
        self.submitted_when_finished: list[int] = []
        self._outputs: list[StepOutput] = []

    def submit(self, step: StepInput) -> None:
        self.submitted.append(step.step_id)
        tokens = [7] * sum(unpack(step.num_logits))
        self._outputs.append(StepOutput(step_id=step.step_id, token_ids=pack(tokens)))

    def collect(self) -> StepOutput:
        assert self.may_finish.acquire(timeout=10)
        output = self._outputs.pop(0)
        self.finished.append(output.step_id)
        self.submitted_when_finished.append(len(self.submitted))
        return output


def test_without_overlap_a_step_is_scheduled_when_the_one_before_is_done() -> None:
    executor = SlowExecutor()
    executor.may_finish.release(100)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, block_size=BLOCK_SIZE)
    core = EngineCore(Scheduler(limits, BlockManager(200)), executor, max_in_flight=1)
    core.scheduler.add(make_request(i, [1, 2, 3], 20) for i in range(4))
    while core.has_work:
        core.step()
    assert executor.finished == list(range(20))
    assert executor.submitted_when_finished == [n + 1 for n in range(20)]


def test_scheduling_overlaps_execution() -> None:
    executor = SlowExecutor()
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, block_size=BLOCK_SIZE)
    core = EngineCore(Scheduler(limits, BlockManager(200)), executor, max_in_flight=2)
    core.scheduler.add(make_request(i, [1, 2, 3], 20) for i in range(4))

    core.step()
    assert executor.submitted == [0]
    # The second call schedules and submits step 1 before it waits for step 0, which is not allowed to finish yet.
    second = threading.Thread(target=core.step)
    second.start()
    deadline = threading.Event()
    for _ in range(1000):
        if executor.submitted == [0, 1]:
            break
        deadline.wait(0.005)
    assert executor.submitted == [0, 1]
    assert executor.finished == []
    executor.may_finish.release()
    second.join(timeout=10)
    assert executor.finished == [0]

    executor.may_finish.release(100)
    while core.has_work:
        core.step()
    assert executor.finished == list(range(20))
    # When step n ended, step n + 1 lay ready, all the way to the last.
    assert executor.submitted_when_finished == [min(n + 2, 20) for n in range(20)]
