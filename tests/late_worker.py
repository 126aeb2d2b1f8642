"""The processes that make masks, some of which they make late on purpose. What they do is in `LATE_MASKS`."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import msgspec

from nvcli.runner import constraints, mask_worker, mask_workers
from nvcli.runner.compiled_grammars import GrammarAnswer
from nvcli.runner.mask_messages import WantMask

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


def make_late(late: LateMasks, *, num_workers: int = 8) -> dict[str, str]:
    """Let ranks that this process makes have such processes. Returns the environment that these need."""
    mask_workers._MODULE = "late_worker"
    constraints._MIN_WORKERS = num_workers
    return {VARIABLE: msgspec.json.encode(late).decode()}


def main() -> None:
    late = msgspec.json.decode(os.environ[VARIABLE], type=LateMasks)
    make = mask_worker.MaskWorker._make

    def make_late(worker: mask_worker.MaskWorker, want: WantMask, answer: GrammarAnswer) -> None:
        if late.fails:
            raise RuntimeError("no mask")
        if random.random() < late.share:
            time.sleep(random.random() * late.seconds)
        while late.gated and late.gated in answer._grammar and not Path(late.gate).exists():
            time.sleep(0.001)
        make(worker, want, answer)

    mask_worker.MaskWorker._make = make_late  # type: ignore[method-assign]
    mask_worker.main()


if __name__ == "__main__":
    main()
