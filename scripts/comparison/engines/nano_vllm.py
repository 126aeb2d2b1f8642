"""nano-vllm: token ids in, token ids (and their text) out; GPUs only, and it always samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nanovllm import LLM, SamplingParams

from comparison.job import Job, LeftOut, Rows


@contextmanager
def opened(job: Job) -> Iterator[Callable[[Rows], None]]:
    if job.device != "cuda":
        raise LeftOut("nano-vllm needs a GPU")
    if job.temperature == 0:
        raise LeftOut("nano-vllm has no greedy sampling; give --temperature above 0")
    options = {} if job.max_num_seqs is None else {"max_num_seqs": job.max_num_seqs}
    llm = LLM(
        job.model,
        tensor_parallel_size=job.tensor_parallel_size,
        max_model_len=job.max_model_len,
        max_num_batched_tokens=max(16384, job.max_model_len),
        **options,
    )

    def answer(rows: Rows) -> None:
        outputs = llm.generate(
            [prompt for prompt, _ in rows],
            [SamplingParams(temperature=job.temperature, ignore_eos=True, max_tokens=length) for _, length in rows],
            use_tqdm=False,
        )
        assert [len(output["token_ids"]) for output in outputs] == [length for _, length in rows]

    yield answer
