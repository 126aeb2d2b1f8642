"""A rank whose masks are late, for engines with processes of their own."""

from __future__ import annotations

import os

from late_worker import LateMasks, make_late
from nvcli.core.engine_config import EngineConfig
from nvcli.worker.runner.interface import RankContext, Runner
from nvcli.worker.runner.model_runner import ModelRunner


def create(config: EngineConfig, context: RankContext) -> Runner:
    """Make the real runner."""
    os.environ.update(make_late(LateMasks(share=0.4, seconds=0.3)))
    return ModelRunner(config, context)
