"""Checks that the GPU backends share: what they need of a run, and why it may be missing, in words for the user."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from nvcli.attention.spec import AttentionCase


def unmet_requirements(
    case: AttentionCase,
    *,
    capability: tuple[int, int],
    dtypes: Sequence[torch.dtype],
    head_dims: Sequence[int],
    takes_sinks: bool = False,
) -> list[str]:
    """Return the reasons why a backend that needs this compute capability, and serves these types and head sizes, and
    sinks if `takes_sinks`, cannot serve `case`."""
    if case.device.type != "cuda":
        return [f"needs an NVIDIA GPU, and the run is on the {case.device.type}"]
    reasons = []
    found = torch.cuda.get_device_capability(case.device)
    if found < capability:
        wanted = ".".join(map(str, capability))
        reasons.append(f"needs compute capability {wanted}, and this GPU has {'.'.join(map(str, found))}")
    if case.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        reasons.append(f"serves {names}, not {str(case.dtype).removeprefix('torch.')}")
    for spec in case.specs:
        if spec.head_dim not in head_dims:
            reasons.append(f"head size {spec.head_dim} is not one of {', '.join(map(str, head_dims))}")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} heads do not divide by {spec.num_kv_heads} KV heads")
        if spec.has_sinks and not takes_sinks:
            reasons.append("the model's heads have attention sinks, which it does not take")
    return list(dict.fromkeys(reasons))


def import_failure(module: str, package: str) -> str | None:
    """Say why `module` cannot be imported, and what to install; return None if it can be."""
    try:
        import_module(module)
    except Exception as error:  # a build for another torch fails with an OSError or a RuntimeError, not an ImportError
        lines = str(error).strip().splitlines()
        return f"{module} cannot be imported ({type(error).__name__}: {lines[0] if lines else ''}); install {package}"
    return None
