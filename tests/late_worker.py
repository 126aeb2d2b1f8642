"""The processes that make masks, some of which they make late on purpose. What they do is in `LATE_MASKS`."""

from __future__ import annotations

import ctypes
import os
import random
import time
from pathlib import Path

import msgspec

from nvcli.worker.masks import mask_processes, mask_worker
from nvcli.worker.masks.mask_messages import WantMask
from nvcli.worker.masks.mask_worker import GrammarAnswer

VARIABLE = "LATE_MASKS"


class LateMasks(msgspec.Struct, frozen=True):
    """Which masks are late."""

    share: float = 0.0
    """This share of all, by up to `seconds`."""
    seconds: float = 0.01
    gated: str = ""
    """Those of grammars that hold this text, until `gate` exists."""
    gate: str = ""
    fails: bool = False
    deadly: str = ""
    """Making a mask of grammars that hold this text behind `deadly_tokens` tokens ends the process."""
    deadly_raises: bool = False
    """By an exception, and not by a signal."""
    deadly_tokens: int = 0
    deadly_once: str = ""
    """A file that is made then, and there is no second time; empty: it kills every time."""


def make_late(late: LateMasks, *, num_workers: int = 3) -> dict[str, str]:
    """Let ranks that this process makes have such processes. Returns the environment that these need."""
    # These import torch, which the processes that make masks do without.
    from nvcli.worker.masks import mask_workers
    from nvcli.worker.runner import constraints

    mask_workers._MODULE = "late_worker"
    constraints._MIN_WORKERS = num_workers
    return {VARIABLE: msgspec.json.encode(late).decode()}


def main() -> None:
    late = msgspec.json.decode(os.environ[VARIABLE], type=LateMasks)
    make = mask_worker.MaskWorker._make

    def make_late(worker: mask_worker.MaskWorker, want: WantMask, answer: GrammarAnswer) -> None:
        if late.fails:
            raise RuntimeError("no mask")
        num_tokens = len(answer._tokens) + len(want.tokens)
        is_deadly = late.deadly and late.deadly in answer._grammar and num_tokens >= late.deadly_tokens
        if is_deadly and not (late.deadly_once and Path(late.deadly_once).exists()):
            if late.deadly_once:
                Path(late.deadly_once).touch()
            if late.deadly_raises:
                raise MemoryError("no room")
            ctypes.string_at(0)  # a signal of its own would reach the process a little later
        if random.random() < late.share:
            time.sleep(random.random() * late.seconds)
        while late.gated and late.gated in answer._grammar and not Path(late.gate).exists():
            time.sleep(0.001)
        make(worker, want, answer)

    mask_worker.MaskWorker._make = make_late  # type: ignore[method-assign]
    mask_processes.main()


if __name__ == "__main__":
    main()
