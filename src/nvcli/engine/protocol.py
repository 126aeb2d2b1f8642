"""Messages on the socket between the parent and an engine's process, as tagged msgpack."""

from __future__ import annotations

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.engine.request import EngineStats, Request, RequestOutput, StepRecord


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of an engine's process."""

    config: EngineConfig
    runner: str
    """The ranks' runner as `module:function` (`RankStart.runner`)."""


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Queue these requests after the waiting ones."""

    requests: list[Request]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End these requests early, if they have not ended yet."""

    request_ids: list[int]


class ForgetPrefixes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Empty the prefix cache, so that equal prompts are recomputed."""


class CloseEngine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the engine and its ranks."""


ToEngine = AddRequests | AbortRequests | ForgetPrefixes | WeightsChange | CloseEngine


class OutputBatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Everything that happened since the last batch, and the current statistics."""

    outputs: list[RequestOutput]
    stats: EngineStats
    steps: list[StepRecord] = []
    notes: list[str] = []
    """Messages for the log."""


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message of an engine that failed: the error's class name in `nvcli.errors` and its message, with the
    traceback of a WorkerError."""

    kind: str
    message: str
    traceback: str = ""


class EngineClosed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An engine's last message after CloseEngine, if `record_steps` is on."""

    peak_bytes: list[int]
    """Each rank's peak memory (`Runner.peak_bytes`)."""


FromEngine = EngineReady | OutputBatch | WeightsChanged | EngineClosed | EngineFailed
