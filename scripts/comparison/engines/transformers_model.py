"""The model as transformers loads it, for its two ways to generate."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from comparison.job import Job, LeftOut


def load(job: Job) -> Any:
    """Load the model on the job's device. Raises LeftOut for several GPUs."""
    if job.tensor_parallel_size > 1:
        raise LeftOut("transformers is compared on one device; leave --tp out")
    dtype = getattr(torch, job.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, attn_implementation="sdpa")
    return model.to(job.device).eval()


def sampling_options(job: Job) -> dict[str, Any]:
    """Of a GenerationConfig: nothing but the temperature."""
    if job.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
