"""Requests for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvcli.core.messages import pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import Request


def make_request(request_id: int, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Request:
    sampling = fields.pop("sampling", SamplingParams(temperature=0))
    defaults: dict[str, Any] = {"stop_ids": [], "seed": 0, "row": request_id, "sample": 0}
    return Request(
        request_id=request_id,
        prompt_ids=pack(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        **{**defaults, **fields},
    )
