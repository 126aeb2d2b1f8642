"""What a result takes in memory is estimated from all that it holds, so that answers nobody has taken stay bounded."""

from __future__ import annotations

from msgspec.structs import replace

from nvcli.job.job import Choice, EmbedAnswer, JobResult, Logprobs, RowContext

TOP = [{"a": -1.0, "b": -2.0}] * 50


def test_everything_counts() -> None:
    plain = JobResult(context=RowContext(id=1, index=0, line="line 1"))
    choice = Choice(index=0, text="", finish_reason="stop")
    choices = [
        replace(choice, text="a" * 5000),
        replace(choice, reasoning_content="a" * 5000),
        replace(choice, token_ids=[5] * 500),
        replace(choice, logprobs=Logprobs(tokens=["a"] * 50, token_logprobs=[-1.0] * 50, top_logprobs=[*TOP])),
    ]
    results = [
        *(replace(plain, choices=[each]) for each in choices),
        replace(plain, prompt_logprobs=Logprobs(tokens=[], token_logprobs=[], top_logprobs=[None, *TOP])),
        replace(plain, answer=EmbedAnswer(embedding="a" * 5000)),
    ]
    assert all(result.num_bytes > plain.num_bytes + 4000 for result in results)
    assert replace(plain, choices=choices).num_bytes > 4 * 4000
