"""A rank whose masks are late, each answer's by turns, for engines with processes of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from nvcli.config import EngineConfig
from nvcli.grammars import Vocabulary
from nvcli.runner import mask_maker
from nvcli.runner.followed_answer import FollowedAnswer
from nvcli.runner.interface import RankContext, Runner
from nvcli.runner.model_runner import ModelRunner

_SECONDS = 0.03


def create(config: EngineConfig, context: RankContext) -> Runner:
    """Make the real runner."""
    make = mask_maker._make

    def make_slowly(group: Sequence[FollowedAnswer], executor: Any, vocabulary: Vocabulary, masks: np.ndarray) -> None:
        if any((answer.mask_row + answer.num_tokens) % 3 == 0 for answer in group):
            time.sleep(_SECONDS)
        make(group, executor, vocabulary, masks)

    mask_maker._make = make_slowly
    mask_maker._MIN_THREADS, mask_maker._LEAST_GROUP = 8, 1
    return ModelRunner(config, context)
