"""Single prompts of a person: a text becomes a conversation where the model has a chat template."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nvcli.config import RunConfig
from nvcli.llm.llm import LLM, AnswerStream


def config_for_prompts(run: RunConfig, *, raw: bool) -> RunConfig:
    """Return the configuration of a run without what it says about the columns of files.

    With `raw`, what it says to conversations is left out too.
    """
    job = msgspec.structs.replace(
        run.job,
        prompt_field="prompt",
        messages_field=None,
        id_field="id",
        prompt_template=None,
        messages_template=[],
    )
    if raw:
        job = msgspec.structs.replace(job, chat="never", system=None, chat_template=None, chat_template_kwargs={})
    return msgspec.structs.replace(run, job=job)


def num_requests(run: RunConfig, num_prompts: int) -> int:
    """Return how many answers so many prompts ask for."""
    n = run.sampling.get("n", 1)
    assert isinstance(n, int)
    return num_prompts * n


def ask(llm: LLM, prompts: Sequence[str], *, raw: bool) -> list[AnswerStream]:
    """Ask all prompts at the same time. Each is the message of a user, or a text to continue if `raw`."""
    if raw:
        return [llm.stream(prompt) for prompt in prompts]
    return [llm.stream([{"role": "user", "content": prompt}]) for prompt in prompts]
