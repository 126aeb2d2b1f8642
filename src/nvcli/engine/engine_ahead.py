"""Entry point of an engine's process. It starts a lone rank before anything else, because a rank takes seconds to
start."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Connection

from nvcli.engine.protocol import EngineStart
from nvcli.errors import NvcliError
from nvcli.worker.executor.child_process import end_at_sigterm, end_children
from nvcli.worker.executor.ranks import MODEL_RUNNER, RankAhead


def main(start: EngineStart | None, control: Connection) -> None:
    """Run an engine. `start` None: it will arrive over `control`, and a lone rank is likely."""
    end_at_sigterm()
    rank = None
    if start is None or (start.config.num_ranks == 1 and start.runner == MODEL_RUNNER):
        with contextlib.suppress(NvcliError, OSError):  # it will fail again once more is known
            rank = RankAhead()
    from nvcli.engine import engine_process

    try:
        start = start or control.recv()
    except (EOFError, OSError):  # the parent is gone
        end_children()
        os._exit(1)
    engine_process.main(start, control, rank)
