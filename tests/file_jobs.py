"""Jobs from files to files, resolved and run in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nvcli.core.config import RunConfig
from nvcli.job.progress.summary import Summary
from nvcli.job.run import generate as job_run
from nvcli.job.run.resolve import resolve_job
from nvcli.job.shard import Shard


def generate(
    run: RunConfig,
    *,
    inputs: Sequence[str],
    output: str | None,
    limit: int | None = None,
    shard: Shard | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Summary:
    """Answer the rows of `inputs`. `options` are those of `nvcli.job.run.generate`."""
    started_at = time.monotonic()
    job = resolve_job(run, inputs=inputs, output=output, limit=limit, shard=shard, overwrite=overwrite)
    return job_run.generate(job, started_at=started_at, **options)
