"""vLLM, offline: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm import LLM, SamplingParams

from comparison.job import Job, Rows


@contextmanager
def opened(job: Job) -> Iterator[Callable[[Rows], None]]:
    options = {} if job.max_num_seqs is None else {"max_num_seqs": job.max_num_seqs}
    llm = LLM(
        model=job.model,
        dtype=job.dtype,
        tensor_parallel_size=job.tensor_parallel_size,
        max_model_len=job.max_model_len,
        gpu_memory_utilization=0.9,
        skip_tokenizer_init=True,
        seed=0,
        **options,
    )

    def answer(rows: Rows) -> None:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in rows],
            [
                SamplingParams(temperature=job.temperature, ignore_eos=True, max_tokens=length, detokenize=False)
                for _, length in rows
            ],
            use_tqdm=False,
        )
        assert [len(output.outputs[0].token_ids) for output in outputs] == [length for _, length in rows]

    yield answer
