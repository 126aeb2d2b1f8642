"""The configuration of a run: YAML file + command line → one frozen `RunConfig`.

Keys are strict and spelled as the field spells them. Nothing writes to a config after it is made: what is derived
from it (`EngineConfig`) is returned as a new value. This module knows no torch, no model and no device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nvcli.sampling_params import SamplingParams

PositiveInt = Annotated[int, Meta(ge=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `job:` section: how the file is read and written."""

    order: Literal["completion", "input"] = "completion"
    on_too_long: Literal["error", "truncate", "skip"] = "error"
    """A prompt that leaves no room in `max_model_len`: an error row, cut from the left, or no row at all."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a user can set. Field comments state what `auto` and null mean."""

    model: str = ""
    """Folder or Hugging Face id of a checkpoint, or `demo`: the built-in model."""
    dtype: Dtype = "auto"
    """auto: the checkpoint's own on a GPU, float32 on a CPU."""
    device: Device = "auto"
    tensor_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and answer together; null: what the model was made for."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536)] = 256
    max_num_batched_tokens: PositiveInt = 8192
    """Most tokens computed in one step; longer prompts are cut into chunks."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    kv_cache_memory: str | PositiveInt | None = None
    """Bytes or a size such as `2GiB` for the KV cache of each rank; null: measured on a GPU, part of the RAM on a CPU."""
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 64
    kv_cache_dtype: Literal["auto"] = "auto"
    attention_backend: str = "auto"
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    seed: Annotated[int, Meta(ge=0, lt=1 << 63)] = 0
    step_timeout: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds a rank may take for one step before the run is ended."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling defaults of the checkpoint's generation_config.json lie under those of `sampling`."""
    sampling: dict[str, Any] = {}
    """Defaults of every row's `sampling` object."""
    job: JobConfig = JobConfig()


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine and its ranks need, with every `auto` resolved. Derived from a RunConfig; sent to each process."""

    model_path: Path
    """A local folder in Hugging Face layout."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    """Bytes for each rank; None: decided by the rank."""
    block_size: int
    attention_backend: str
    enable_prefix_caching: bool
    enforce_eager: bool
    step_timeout: float

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


__all__ = ["Device", "Dtype", "EngineConfig", "JobConfig", "RunConfig", "SamplingParams"]
