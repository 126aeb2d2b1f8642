"""One engine in a process of its own: loads, answers the warm-up, then times the job.

    python -m comparison.child JOB.json OUTCOME.json

Standard output is left to what the engine prints.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from pathlib import Path

from comparison.engines import ENGINES
from comparison.job import Job, LeftOut, Outcome


def run(job: Job) -> Outcome:
    """Raises what the engine raises; what can be known without running it is `left_out`."""
    engine = ENGINES[job.engine]
    try:
        importlib.import_module(engine.package)
    except ImportError as error:
        return Outcome(left_out=f"{engine.package} cannot be imported here ({error})")
    opened = importlib.import_module(engine.module).opened
    try:
        with opened(job) as answer:
            answer(job.warm_up)
            start = time.perf_counter()
            answer(job.rows)
            seconds = time.perf_counter() - start
    except LeftOut as reason:
        return Outcome(left_out=str(reason))
    return Outcome(seconds=seconds, version=_version(engine.distribution))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return ""


if __name__ == "__main__":
    run(Job.read(Path(sys.argv[1]))).write(Path(sys.argv[2]))
