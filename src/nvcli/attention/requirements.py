"""Checks that the GPU backends share: their requirements of a run, and user-readable reasons why one is not met."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from nvcli.attention.backend import AttentionCase
from nvcli.kernels.fp8_types import FP8

_MOST_LATENT_HEADS = 64
"""All heads of latent attention share one key, and stand in one tile of a kernel."""
_FP8_CAPABILITY = (8, 9)
"""GPUs from Ada on convert e4m3 numbers in hardware, which Triton requires."""


def unmet_requirements(
    case: AttentionCase,
    *,
    capability: tuple[int, int],
    dtypes: Sequence[torch.dtype],
    head_dims: Sequence[int],
    takes_sinks: bool = False,
    takes_bias: bool = False,
    takes_both_ways: bool = False,
    takes_tails: bool = False,
    takes_scaled_cache: bool = False,
    is_batch_invariant: bool = False,
) -> list[str]:
    """Return the reasons why a backend with these capabilities cannot serve `case`: its minimum compute capability,
    its types and head sizes, whether it takes sinks (`takes_sinks`), numbers that tokens add to scores (`takes_bias`),
    attention to later tokens (`takes_both_ways`), keys with more numbers than values, which may be a part of them
    (`takes_tails`), and keys with scales beside them (`takes_scaled_cache`), and whether it is batch-invariant
    (`is_batch_invariant`)."""
    if case.device.type != "cuda":
        return [f"needs an NVIDIA GPU, and the run is on the {case.device.type}"]
    reasons = []
    found = torch.cuda.get_device_capability(case.device)
    if found < capability:
        reasons.append(f"needs compute capability {_dotted(capability)}, and this GPU has {_dotted(found)}")
    if case.dtype not in dtypes:
        names = ", ".join(_name(dtype) for dtype in dtypes)
        reasons.append(f"serves {names}, not {_name(case.dtype)}")
    if case.cache_dtype == FP8 and not takes_scaled_cache:
        reasons.append("kv_cache_dtype fp8 keeps a scale for each token and head, which it does not read")
    elif case.cache_dtype == FP8 and found < _FP8_CAPABILITY:
        reasons.append(
            f"kv_cache_dtype fp8 needs compute capability {_dotted(_FP8_CAPABILITY)}, and this GPU has {_dotted(found)}"
        )
    elif case.cache_dtype != case.dtype and not takes_scaled_cache:
        reasons.append(
            f"the KV cache is kept in {_name(case.cache_dtype)}, and it reads the model's {_name(case.dtype)}"
        )
    if case.batch_invariant and not is_batch_invariant:
        reasons.append("batch_invariant is true, and its results depend on the batch")
    for spec in case.specs:
        size, rest = spec.result_dim, spec.head_dim - spec.result_dim
        if not spec.has_values:
            if not takes_tails:
                reasons.append("the model has latent attention, whose values are a part of its keys")
            elif not {size, rest} <= {0, *head_dims}:
                sizes = f"{size} numbers and {rest} rotated ones"
                reasons.append(f"keys of {sizes} are not each one of {', '.join(map(str, head_dims))}")
            elif spec.num_heads > _MOST_LATENT_HEADS:
                heads = f"{spec.num_heads} heads of latent attention on a rank"
                reasons.append(f"{heads} are more than {_MOST_LATENT_HEADS}, which fit into a tile (see --tp)")
        elif spec.value_dim is not None:
            if not takes_tails:
                reasons.append(f"values have {size} numbers, and their keys {spec.head_dim}")
            elif not {size, rest} <= {*head_dims}:
                known = ", ".join(map(str, head_dims))
                reasons.append(f"keys of {size} numbers, as values have, and {rest} more are not each one of {known}")
        elif spec.head_dim not in head_dims:
            reasons.append(f"head size {spec.head_dim} is not one of {', '.join(map(str, head_dims))}")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} heads do not divide by {spec.num_kv_heads} KV heads")
        if spec.has_sinks and not takes_sinks:
            reasons.append("the model's heads have attention sinks, which it does not take")
        if spec.bias_extent is not None and not takes_bias:
            reasons.append("the model's tokens add numbers to the scores of near keys, which it does not take")
        if spec.both_ways and not takes_both_ways:
            reasons.append("the model's tokens attend to those after them, which it does not compute")
    return list(dict.fromkeys(reasons))


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def import_failure(module: str, package: str) -> str | None:
    """Say why `module` cannot be imported, and what to install; return None if it can be."""
    try:
        import_module(module)
    except Exception as error:  # a build for another torch fails with an OSError or a RuntimeError, not an ImportError
        lines = str(error).strip().splitlines()
        return f"{module} cannot be imported ({type(error).__name__}: {lines[0] if lines else ''}); install {package}"
    return None
