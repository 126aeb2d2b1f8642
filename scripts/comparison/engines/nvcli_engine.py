"""nvcli: processes, channel and scheduler as in `nvcli generate`, without files and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from comparison.job import Job, Rows
from nvcli.core.config import RunConfig
from nvcli.core.messages import pack, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.client import EngineClient
from nvcli.engine.request import Request
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines


@contextmanager
def opened(job: Job) -> Iterator[Callable[[Rows], None]]:
    options = {} if job.max_num_seqs is None else {"max_num_seqs": job.max_num_seqs}
    run = RunConfig(
        model=job.model,
        device=job.device,  # type: ignore[arg-type]
        dtype=job.dtype,  # type: ignore[arg-type]
        tensor_parallel_size=job.tensor_parallel_size,
        max_model_len=job.max_model_len,
        max_num_batched_tokens=max(8192, job.max_num_seqs or 0),
        **options,
    )
    path = Path(job.model)
    client = EngineClient.start(resolve_engines(run, path, load_checkpoint(run, path)).config)
    sampling = SamplingParams(temperature=job.temperature, ignore_eos=True)
    ids = count()

    def answer(rows: Rows) -> None:
        requests = [
            Request(
                request_id=next(ids),
                prompt_ids=pack(prompt),
                max_tokens=length,
                sampling=sampling,
                stop_ids=[],
                seed=0,
                row=row,
                sample=0,
            )
            for row, (prompt, length) in enumerate(rows)
        ]
        client.add(requests)
        left = {request.request_id: request.max_tokens for request in requests}
        while left:
            for output in client.poll(1.0):
                assert len(unpack(output.token_ids)) == left.pop(output.request_id), output.error

    try:
        client.wait_ready()
        yield answer
    finally:
        client.close()
