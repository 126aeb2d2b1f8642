"""An engine without processes: answers a prompt with its own tokens in reverse, then an end-of-sequence token."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady, TokenLogprobs, pack, unpack
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.errors import NvcliError, WorkerError


class FakeEngine:
    """Answers all running requests with each poll, in random order; streamed ones by `tokens_per_poll` tokens.

    Polls count (`dies_after_polls`, `on_poll`) while there is something to run.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokens_per_poll: int = 3,
        polls_until_ready: int = 2,
        dies_after_polls: int | None = None,
        on_poll: Callable[[], None] = lambda: None,
        load_error: NvcliError | None = None,
        fails: Callable[[Request], bool] = lambda request: False,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.received: list[Request] = []
        """Requests as they came, each for all samples of a row."""
        self.requests: list[Request] = []
        """A request for each sample."""
        self.aborted: list[int] = []
        self.closed = False
        self.changes: list[WeightsChange] = []
        self.answer_to_changes = WeightsChanged()
        self._changed: WeightsChanged | None = None
        self.max_held = 0
        self.stats = EngineStats(num_blocks=10, num_used_blocks=5)
        self._random = random.Random(seed)
        self._tokens_per_poll = tokens_per_poll
        self._polls_until_ready = polls_until_ready
        self._polls_left = dies_after_polls
        self._on_poll = on_poll
        self._load_error = load_error
        self._fails = fails
        self._running: dict[int, tuple[Request, list[int]]] = {}
        self._outputs: list[RequestOutput] = []
        self.notes = ["a warning of the engine"]
        self._readable, self._write_end = os.pipe()
        os.write(self._write_end, b"x")  # always something to hear

    def fileno(self) -> int:
        return self._readable

    def wait_ready(self, timeout: float | None = None) -> EngineReady | None:
        if self._load_error is not None:
            raise self._load_error
        self._polls_until_ready -= 1
        if self._polls_until_ready > 0:
            time.sleep(0.001)  # the thread that loads the tokenizer wants its turn
            return None
        return EngineReady(
            num_blocks=10,
            block_size=4,
            kv_cache_bytes=1 << 20,
            kv_cache_tokens=40,
            weight_bytes=1 << 20,
            attention_backend="fake",
            seconds={"load weights": 1.0},
            notes=["a note of the engine"],
        )

    def add(self, requests: list[Request]) -> None:
        assert not self.closed
        self.received += requests
        requests = [sample for request in requests for sample in request.samples()]
        for request in requests:
            assert request.request_id not in self._running
            prompt = list(unpack(request.prompt_ids))
            assert 0 < len(prompt) + request.max_tokens <= self.config.max_request_tokens
            self._running[request.request_id] = request, prompt[::-1]
        self.requests += requests
        self.max_held = max(self.max_held, len(self._running))

    def abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            if self._running.pop(request_id, None) is not None:
                self._outputs.append(RequestOutput(request_id=request_id, token_ids=b"", finish_reason="abort"))

    def poll(self, timeout: float) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        if not self._running:
            time.sleep(0.001)
            return outputs
        self._on_poll()
        if self._polls_left is not None:
            self._polls_left -= 1
            if self._polls_left < 0:
                raise WorkerError("rank 0 (pid 1) was killed by signal 9")
        ids = list(self._running)
        self._random.shuffle(ids)
        for request_id in ids:
            outputs += self._advance(*self._running[request_id])
        return outputs

    def change_weights(self, change: WeightsChange) -> None:
        assert not self._running
        self.changes.append(change)
        self._changed = self.answer_to_changes

    def take_changed(self) -> WeightsChanged | None:
        changed, self._changed = self._changed, None
        return changed

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._readable)
            os.close(self._write_end)

    def _advance(self, request: Request, left: list[int]) -> list[RequestOutput]:
        request_id = request.request_id
        if self._fails(request):
            del self._running[request_id]
            return [
                RequestOutput(
                    request_id=request_id,
                    token_ids=b"",
                    finish_reason="error",
                    error_type="kv_cache_too_small",
                    error="this request can never fit",
                )
            ]
        if request.stream:
            taken, self._running[request_id] = left[: self._tokens_per_poll], (request, left[self._tokens_per_poll :])
            if len(left) > self._tokens_per_poll:
                return [RequestOutput(request_id=request_id, token_ids=pack(taken), logprobs=_logprobs(request, taken))]
        else:
            taken = left
        del self._running[request_id]
        done = len(unpack(request.prompt_ids)) - len(left)
        taken = taken[: request.max_tokens - done]
        stopped = bool(request.stop_ids) and done + len(taken) < request.max_tokens
        if stopped:
            taken = [*taken, request.stop_ids[0]]
        return [
            RequestOutput(
                request_id=request_id,
                token_ids=pack(taken),
                finish_reason="stop" if stopped else "length",
                stopped_by_id=stopped,
                num_cached_tokens=4,
                logprobs=_logprobs(request, taken),
            )
        ]


def _logprobs(request: Request, ids: Sequence[int]) -> list[TokenLogprobs]:
    if request.sampling.logprobs is None:
        return []
    return [TokenLogprobs(logprob=-0.5, top_ids=[token, 7], top_logprobs=[-0.5, -1.5]) for token in ids]
