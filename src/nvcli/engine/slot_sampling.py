"""A request's sampling parameters, as ranks keep them in its slot."""

from __future__ import annotations

from nvcli.core.messages import FORBIDDEN, SlotSampling
from nvcli.engine.request import Request


def slot_sampling(request: Request, *, num_prompt: int) -> SlotSampling:
    """Return a request's sampling parameters as its slot keeps them. `num_prompt`: the tokens of its prompt."""
    params = request.sampling
    return SlotSampling(
        seed=request.seed,
        row=request.row,
        sample=request.sample,
        prompt_len=num_prompt,
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        stop_ids=request.stop_ids if params.min_tokens else [],
        bias_ids=[*map(int, params.logit_bias), *request.forbidden_ids],
        bias_values=[*params.logit_bias.values(), *[FORBIDDEN] * len(request.forbidden_ids)],
        allowed_ids=params.allowed_token_ids or [],
        bad_words=[list(word) for word in request.bad_words],
    )
