"""RunConfig + checkpoint + machine → what an engine and a row are told. Imports no torch: see `detect_device`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from nvcli.config import AttentionBackends, EngineConfig, JobConfig, RunConfig, parse_size
from nvcli.errors import ConfigError
from nvcli.job_run.planning.layout import Layout, choose_layout
from nvcli.jobs.rows.native_row import RowKeys
from nvcli.models.config import ModelConfig
from nvcli.nvidia_smi import SmiReport, ask_for_gpus, visible_gpus
from nvcli.sampling_params import SamplingParams
from nvcli.validation import InvalidValue, convert
from nvcli.versions import torch_build


class ModelFacts(Protocol):
    """What is needed of `models.config.ModelConfig`."""

    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]: ...
    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...
    def check_tensor_parallel(self, size: int) -> None: ...
    def check_pipeline_parallel(self, size: int) -> None: ...


def resolve_engine_config(
    run: RunConfig, model_path: Path, model: ModelFacts, *, found_device: Literal["cpu", "cuda"] | None = None
) -> EngineConfig:
    """Replace every `auto` and null that can be decided here. Raises ConfigError.

    An automatic `tensor_parallel_size` is 1 until `resolve_layout` chooses. `found_device`: what `device: auto` stands
    for; None: look.
    """
    tensor_parallel_size = layout_as_given(run).tensor_parallel_size
    model.check_tensor_parallel(tensor_parallel_size)
    model.check_pipeline_parallel(run.pipeline_parallel_size)
    max_model_len = run.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"`max_model_len` is {max_model_len}, and {run.model} was made for at most "
            f"{model.max_position_embeddings} tokens (max_position_embeddings); lower it or leave it out"
        )
    device = (found_device or detect_device()) if run.device == "auto" else run.device
    dtype = run.dtype
    if dtype == "auto":
        dtype = model.dtype if device == "cuda" else "float32"
    return EngineConfig(
        model_path=model_path,
        device=device,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=run.pipeline_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_num_batched_tokens,
        gpu_memory_utilization=run.gpu_memory_utilization,
        kv_cache_memory=parse_size(run.kv_cache_memory),
        block_size=run.block_size,
        attention_backend=attention_choice(run.attention_backend),
        enable_prefix_caching=run.enable_prefix_caching,
        enforce_eager=run.enforce_eager,
        step_timeout=run.step_timeout,
    )


def chooses_layout(run: RunConfig, config: EngineConfig) -> bool:
    """Whether `resolve_layout` has something to choose, and so asks for the GPUs."""
    return config.device == "cuda" and "auto" in (run.tensor_parallel_size, run.data_parallel_size)


def resolve_layout(
    run: RunConfig,
    config: EngineConfig,
    model: ModelConfig,
    *,
    num_requests: int | None = None,
    report: SmiReport | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Layout:
    """Numbers for `tensor_parallel_size` and `data_parallel_size`; `auto` is 1 where nothing can be chosen.
    `pipeline_parallel_size` is what was given.

    `config`: what `run` comes to otherwise. `num_requests`: of the job; None: many. `report`: what nvidia-smi says;
    None: ask it. Raises ConfigError and CapacityError.
    """
    given = layout_as_given(run)
    if not chooses_layout(run, config):
        return given
    gpus = visible_gpus(ask_for_gpus() if report is None else report, environ)
    if isinstance(gpus, str):
        return replace(given, why=f"{given.flags}: not chosen, as {gpus}")
    return choose_layout(
        gpus,
        model,
        config,
        num_requests=num_requests,
        tensor_parallel_size=run.tensor_parallel_size,
        data_parallel_size=run.data_parallel_size,
    )


def layout_as_given(run: RunConfig) -> Layout:
    """Nothing chosen: `auto` is 1."""
    tp, dp = run.tensor_parallel_size, run.data_parallel_size
    return Layout(
        tensor_parallel_size=1 if tp == "auto" else tp,
        pipeline_parallel_size=run.pipeline_parallel_size,
        data_parallel_size=1 if dp == "auto" else dp,
    )


def attention_choice(choice: str | AttentionBackends) -> str:
    """`EngineConfig.attention_backend`."""
    if isinstance(choice, str):
        return choice
    return choice.prefill if choice.prefill == choice.decode else f"{choice.prefill}:{choice.decode}"


def sampling_defaults(run: RunConfig, model: ModelFacts) -> dict[str, Any]:
    """What a row's `sampling` lies over: the config's `sampling`, over the checkpoint's generation_config.

    Only keys that somebody set. Raises ConfigError.
    """
    own = dict(model.generation_defaults) if run.generation_config == "auto" else {}
    defaults = {**own, **run.sampling}
    try:
        convert(defaults, SamplingParams, under=("sampling",))
    except InvalidValue as error:
        raise ConfigError(
            f"{run.model}: generation_config.json and `sampling` together: {error.message}; "
            "`generation_config: none` leaves the checkpoint's defaults out"
        ) from None
    return defaults


def row_keys(job: JobConfig) -> RowKeys:
    """Under which keys a row has what is nvcli's."""
    return RowKeys(prompt=job.prompt_field, messages=job.messages_field, id=job.id_field)


def detect_device(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> Literal["cpu", "cuda"]:
    """cuda where the NVIDIA driver shows a GPU, none are hidden, and the installed torch was built for CUDA."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and visible.strip() in ("", "-1")
    has_gpu = any(re.fullmatch(r"nvidia\d+", entry.name) for entry in dev.glob("nvidia*")) or (dev / "dxg").exists()
    return "cuda" if has_gpu and not is_hidden and _torch_has_cuda() else "cpu"


def _torch_has_cuda() -> bool:
    build = torch_build()
    if build is None:  # an unusual build: let the ranks find out
        return find_spec("torch") is not None
    return build.cuda is not None
