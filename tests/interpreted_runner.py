"""A rank whose attention runs in Triton's interpreter, for engines with processes of their own."""

from __future__ import annotations

from nvcli.attention.triton_backend import TritonBackend
from nvcli.core.engine_config import EngineConfig
from nvcli.worker.runner.interface import RankContext, Runner
from nvcli.worker.runner.model_runner import ModelRunner


def create(config: EngineConfig, context: RankContext) -> Runner:
    """Make the real runner, with a `triton` backend that asks for no GPU."""
    TritonBackend.unsupported = lambda case: []  # type: ignore[method-assign]
    return ModelRunner(config, context)
