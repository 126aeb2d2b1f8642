"""The replicas of a benchmark. Requests are divided among them, and each pass over the workload is recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady, unpack
from nvcli.engine.request import Request, SpeculationFigures, StepRecord
from nvcli.errors import CapacityError
from nvcli.job.run.engines import EngineSet

_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """The totals of one pass over a workload."""

    seconds: float
    """Seconds from sending the first request to receiving the last answer."""
    num_requests: int
    """Answers; every sample of a prompt counts."""
    prompt_tokens: int
    """Prompt tokens; a prompt counts once, however many samples it has."""
    cached_tokens: int
    """Prompt tokens taken from the prefix cache instead of being computed, summed over the samples."""
    computed_prompt_tokens: int
    """Prompt tokens computed, each token of a sample counted once."""
    output_tokens: int

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(PassTotals):
    """The record of one pass over a workload."""

    num_preemptions: int
    speculation: SpeculationFigures | None
    """Drafted tokens and those that were taken; None: nothing was drafted."""
    num_blocks: int
    """KV blocks of one replica."""
    records: list[list[StepRecord]]
    """Steps of each replica, in order."""


class Engines:
    """Starts all replicas at once; `close` ends them."""

    def __init__(self, config: EngineConfig, num_replicas: int) -> None:
        """Start the replicas and return at once. `config` has `record_steps` set."""
        self._started_at = time.perf_counter()
        self._engines = EngineSet()
        self._ready: list[EngineReady] = []
        self._next_id = 0
        self.ready_seconds = 0.0
        """Seconds from the start until the last replica is ready."""
        try:
            self._clients = self._engines.take(
                [msgspec.structs.replace(config, replica=replica) for replica in range(num_replicas)]
            )
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> EngineReady:
        """Wait for all replicas, and return the first one's report. Raises the error of an engine that failed."""
        for client in self._clients:
            ready = client.wait_ready()
            assert ready is not None
            self._ready.append(ready)
        self.ready_seconds = time.perf_counter() - self._started_at
        return self._ready[0]

    def run(self, requests: Sequence[Request]) -> Pass:
        """Answer all requests, with all their samples, from an empty prefix cache. Assigns the ids of the requests.

        Raises WorkerError, or CapacityError for a request that the engine cannot answer or for which it had to lower
        its limits.
        """
        numbered = []
        for request in requests:
            numbered.append(msgspec.structs.replace(request, request_id=self._next_id))
            self._next_id += request.n
        dealt = deal_out(numbered, len(self._clients))
        before = [client.stats for client in self._clients]
        for client in self._clients:
            client.forget_prefixes()
            client.take_steps()
        start = time.perf_counter()
        for client, share in zip(self._clients, dealt, strict=True):
            client.add(share)
        cached_tokens = self._wait_for_answers(numbered)
        seconds = time.perf_counter() - start
        if notes := [note for client in self._clients for note in client.take_notes()]:
            raise CapacityError(f"the pass did not run as requested: {notes[0]}")
        records = [client.take_steps() for client in self._clients]
        since = [client.stats.since(stats) for client, stats in zip(self._clients, before, strict=True)]
        for steps in records:
            if steps:
                steps[0].idle_seconds = 0.0  # the device was idle until the pass began
        sampled_tokens = sum(request.n * len(unpack(request.prompt_ids)) for request in requests)
        return Pass(
            seconds=seconds,
            num_requests=sum(request.n for request in requests),
            prompt_tokens=sum(len(unpack(request.prompt_ids)) for request in requests),
            cached_tokens=cached_tokens,
            computed_prompt_tokens=sampled_tokens - cached_tokens,
            output_tokens=sum(request.n * request.max_tokens for request in requests),
            num_preemptions=sum(stats.num_preemptions for stats in since),
            speculation=SpeculationFigures.of(since),
            num_blocks=self._ready[0].num_blocks,
            records=records,
        )

    def _wait_for_answers(self, requests: Sequence[Request]) -> int:
        """Wait until every request is answered at its requested length. Return the number of cached tokens."""
        expected = {
            request.request_id + sample: request.max_tokens for request in requests for sample in range(request.n)
        }
        cached_tokens = 0
        while expected:
            connection.wait([client.fileno() for client in self._clients], _WAIT_SECONDS)
            for client in self._clients:
                for output in client.poll(0):
                    if output.finish_reason == "error":
                        raise CapacityError(f"a request of the workload cannot be answered: {output.error}")
                    num_tokens, wanted = len(unpack(output.token_ids)), expected.pop(output.request_id)
                    assert num_tokens == wanted, f"{num_tokens} tokens where {wanted} were requested"
                    cached_tokens += output.num_cached_tokens
        return cached_tokens

    def finish(self) -> list[list[int]]:
        """End the replicas, and return the peak memory of each rank in bytes: [replica][rank]."""
        return [client.finish() for client in self._clients]

    def close(self) -> None:
        """End whatever is still running. Idempotent."""
        self._engines.close()


def deal_out(requests: Sequence[Request], num_shares: int) -> list[list[Request]]:
    """Deal requests out in order, each to the share with the fewest tokens to generate so far."""
    shares: list[list[Request]] = [[] for _ in range(num_shares)]
    num_tokens = [0] * num_shares
    for request in requests:
        least = num_tokens.index(min(num_tokens))
        shares[least].append(request)
        num_tokens[least] += request.n * request.max_tokens
    return shares
