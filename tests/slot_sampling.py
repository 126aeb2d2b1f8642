"""Sampling parameters of a slot, as the engine sends them."""

from __future__ import annotations

from typing import Any

from nvcli.messages import SlotSampling


def slot_sampling(row: int, **overrides: Any) -> SlotSampling:
    values: dict[str, Any] = {
        "seed": 5,
        "row": row,
        "sample": 0,
        "prompt_len": 3,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "num_logprobs": -1,
        "stop_ids": [],
        "bias_ids": [],
        "bias_values": [],
    }
    return SlotSampling(**{**values, **overrides})
