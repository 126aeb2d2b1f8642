"""Requests for tests of the engine, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvcli.core.messages import pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.client import EngineClient
from nvcli.engine.request import Request, RequestOutput


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


def answers_of(client: EngineClient, requests: list[Request]) -> dict[int, RequestOutput]:
    """Answer requests: the last output of each, by request id."""
    client.add(requests)
    done: dict[int, RequestOutput] = {}
    while len(done) < len(requests):
        done.update({output.request_id: output for output in client.poll(1.0)})
    while client.stats.num_running:
        client.poll(0.3)
    return done
