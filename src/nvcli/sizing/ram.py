"""Checks that the RAM holds a model that runs on a CPU, before a process is started for it."""

from __future__ import annotations

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.engine_config import EngineConfig
from nvcli.errors import CapacityError
from nvcli.models.config import ModelConfig
from nvcli.sizing.adapters import adapter_memory
from nvcli.sizing.weights import weight_bytes

_COPY_BYTES = 128 << 20
"""The least that a copy's processes take beside the weights, once torch is imported."""


def ram_of_weights(config: EngineConfig, model: ModelConfig, *, num_replicas: int) -> int:
    """Return the bytes of all replicas' weights and of the LoRA adapters beside them, on a CPU."""
    adapters = adapter_memory(config, model, None)
    weights = sum(weight_bytes(model, config.dtype).values())
    return (weights + adapters.device_bytes + adapters.host_bytes) * num_replicas


def ways_to_less_ram(config: EngineConfig, *, num_replicas: int) -> str:
    """Suggest ways to fit a model, or more of it, into RAM, in a user's words."""
    ways = ["use a smaller model"]
    if config.dtype == "float32":
        ways.append("--dtype bfloat16, which halves it")
    if num_replicas > 1:
        ways.append(f"fewer copies than --dp {num_replicas}")
    return f"{', '.join(ways)}, more RAM, or a GPU"


def check_ram(config: EngineConfig, model: ModelConfig, *, num_replicas: int, available: int) -> None:
    """Raise CapacityError if the weights of a run on a CPU, or this many copies, do not fit the `available` bytes of
    RAM.

    They must leave something for activations and the KV cache, so even an exact fit is too much.
    """
    needed = ram_of_weights(config, model, num_replicas=num_replicas) + (num_replicas - 1) * _COPY_BYTES
    if config.device == "cpu" and needed >= available:
        copies = f" and processes of {num_replicas} copies" if num_replicas > 1 else ""
        raise CapacityError(
            f"the weights{copies} take {format_bytes(needed)} in {config.weights_type}, but {format_bytes(available)} "
            f"of RAM are free. To make it fit: {ways_to_less_ram(config, num_replicas=num_replicas)}"
        )
