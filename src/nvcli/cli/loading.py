"""Loads a model for a person who waits at a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from nvcli.cli.messages import say

if TYPE_CHECKING:
    from nvcli.config import RunConfig
    from nvcli.llm.llm import LLM


def load_for_person(run: RunConfig, *, num_requests: int, needs_chat_template: bool = False) -> LLM:
    """Load the model, and say so where it is a terminal that waits. Of the notes only warnings are shown.

    The keywords are those of `LLM.from_config`.
    """
    from nvcli.job_run.engine_ahead import EngineAhead

    if sys.stderr.isatty():
        say(f"loading {run.model} …")
    with contextlib.closing(EngineAhead()) as ahead:
        from nvcli.llm.llm import LLM

        return LLM.from_config(
            run,
            note=lambda line: say(line) if line.startswith("warning: ") else None,
            start=ahead.start_engine,
            num_requests=num_requests,
            needs_chat_template=needs_chat_template,
        )
