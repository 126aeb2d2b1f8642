"""Resolves the configuration of the engines: the checkpoint's own, the format that weights are kept in, and every
`auto`.

Starts no process and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from nvcli.attention.spec import attention_kinds
from nvcli.core.byte_sizes import parse_size
from nvcli.core.config import AttentionBackends, RunConfig
from nvcli.core.config_types import ModelDtype
from nvcli.core.engine_config import EngineConfig, kv_dtype
from nvcli.core.lora_config import adapter_choice
from nvcli.core.system.nvidia_smi import SmiGpu, smallest_memory
from nvcli.errors import ConfigError, LoadError
from nvcli.job.planning.layout import layout_as_given
from nvcli.job.run.adapter_modes import find_modes
from nvcli.job.run.device import device_of
from nvcli.job.run.embedding_settings import EmbeddingSettings, embedding_settings
from nvcli.job.run.image_settings import check_of_text, image_limits, reads_whole_prompts, whole_tokens, with_tower
from nvcli.job.run.kept_weights import check_fast_accumulation, keep_weights
from nvcli.job.run.settings import SetterOf, unknown_setter
from nvcli.models.adapters.adapter import Adapter, read_adapter
from nvcli.models.adapters.find import find_adapter
from nvcli.models.adapters.row_adapters import sizes_of
from nvcli.models.checkpoint_check import check_tensors, read_model_tensors
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.config_overrides import UnreadOverride
from nvcli.models.draft_heads.own_files import MTP, find_head, with_draft_head
from nvcli.models.same_tokens import check_same_tokens
from nvcli.models.stored_tensors import with_stored_tensors
from nvcli.sizing.graph_sizes import default_batched_tokens
from nvcli.sizing.kv_cache import default_block_size

_FEW_SEQS = 16
"""Most requests at a time of a run that uses the checkpoint's head by itself."""


class ResolvedEngines(NamedTuple):
    """The engines of a run: their configuration, and what they load."""

    model: ModelConfig
    """The model with weights in the format that ranks keep."""
    config: EngineConfig
    adapter: Adapter | None
    """The LoRA adapter for all rows; None: the run has none."""
    row_adapters: Mapping[str, Adapter]
    """The LoRA adapters that rows choose, by name."""


def load_checkpoint(run: RunConfig, model_path: Path, setter_of: SetterOf = unknown_setter) -> ModelConfig:
    """Load a checkpoint's configuration, as runs of this length compute it. Raises LoadError and ConfigError."""
    try:
        model = load_model_config(
            model_path,
            expert_parallel=run.enable_expert_parallel,
            attention_dp=run.attends_by_rows,
            overrides=run.hf_overrides,
        )
    except UnreadOverride as error:
        setter = setter_of(("hf_overrides", *error.key))
        raise ConfigError(f"{setter}: {error}" if setter else str(error)) from None
    model = model.for_length(run.max_model_len or model.max_position_embeddings)
    return with_stored_tensors(model, model_path)


def resolve_engines(
    run: RunConfig,
    model_path: Path,
    model: ModelConfig,
    *,
    gpus: Sequence[SmiGpu] | None = None,
    reads_images: bool = True,
) -> ResolvedEngines:
    """Resolve the engines of a run with the model of a checkpoint (`load_checkpoint`).

    `gpus` are the run's GPUs (None: those of this machine). `reads_images` false: with `images: auto` the vision tower
    is left out. Raises LoadError and ConfigError, also if an adapter does not fit the model.
    """
    if run.images == "always" or (run.images == "auto" and reads_images):
        model = with_tower(run, model_path, model)
    adapter, choice = None, adapter_choice(run.lora)
    base = model.headless() if run.task == "embed" else model
    named = {name: read_adapter(find_adapter(path), base) for name, path in choice.named.items()}
    for name, each in named.items():
        check_of_text(name, each)
    adapters = list(named.values())
    for number in find_modes(choice, adapters, base).merged:
        model = adapters[number - 1].adapt(model)
    if choice.merged is not None:
        adapter = read_adapter(find_adapter(choice.merged), base)
        model = adapter.adapt(model)
    return engines_of_adapters(run, model_path, model, adapter, named, gpus=gpus)


def engines_of_adapters(
    run: RunConfig,
    model_path: Path,
    model: ModelConfig,
    adapter: Adapter | None,
    row_adapters: Mapping[str, Adapter],
    *,
    gpus: Sequence[SmiGpu] | None,
) -> ResolvedEngines:
    """Resolve the engines of a run whose adapters are read, with a model that is adapted to them. The rest is as in
    `resolve_engines`."""
    device = device_of(run)
    model = _with_run_head(run, model_path, model, device)
    model = keep_weights(run, model, device, gpus=gpus, adapter=adapter)
    config = resolve_engine_config(run, model_path, model, gpus=gpus, row_adapters=row_adapters)
    return ResolvedEngines(model, config, adapter, row_adapters)


def _with_run_head(run: RunConfig, model_path: Path, model: ModelConfig, device: Literal["cpu", "cuda"]) -> ModelConfig:
    """Return the model with the head or the model that drafts its tokens, if the run uses one. Raises ConfigError and
    LoadError."""
    name = run.speculation.draft_head
    if run.task != "generate" or model.draft_head is not None:
        return model
    if name is None:
        takes_own = device == "cuda" and _takes_own_head(run, model)
        return model.with_mtp() if takes_own and _has_mtp(run, model_path, model) else model
    if run.pipeline_parallel_size > 1:
        raise ConfigError(
            f"`speculation.method` (--speculate) is {name}, and `pipeline_parallel_size` (--pp) is "
            f"{run.pipeline_parallel_size}: a head drafts from all layers of a model that are in one stage; use --tp, "
            "or --speculate lookup"
        )
    head = find_head(name)
    if head != MTP:
        check_same_tokens(model_path, Path(head))
    return with_draft_head(model, head, is_random=run.load_format == "dummy")


def _takes_own_head(run: RunConfig, model: ModelConfig) -> bool:
    """Whether a run that leaves the method open drafts by the checkpoint's head: with few requests at a time, where it
    was measured to pay, and nothing that it was not measured with."""
    is_open = run.speculation.method == "auto" and attention_choice(run.attention_backend) in ("auto", "triton")
    is_plain = not run.batch_invariant and not run.lora and run.pipeline_parallel_size == 1 and not model.has_tower
    is_plain &= not run.attends_by_rows and not model.most_chosen
    return is_open and is_plain and run.max_num_seqs <= _FEW_SEQS and model.decoder.mtp is not None


def _has_mtp(run: RunConfig, model_path: Path, model: ModelConfig) -> bool:
    """Whether the files have the head that config.json describes; some conversions leave it out."""
    if run.load_format == "dummy":
        return True
    with_head = model.with_mtp()
    try:
        check_tensors(with_head, read_model_tensors(with_head, model_path).tensors, model_path)
    except LoadError:
        return False
    return True


def resolve_engine_config(
    run: RunConfig,
    model_path: Path,
    model: ModelConfig,
    *,
    gpus: Sequence[SmiGpu] | None = None,
    row_adapters: Mapping[str, Adapter] = MappingProxyType({}),
) -> EngineConfig:
    """Resolve every `auto` and null that can be decided here. Raises ConfigError.

    `model` is as `ResolvedEngines` has it: with the head that drafts, and with `quantization: auto` with the format in
    which weights are kept. An automatic `tensor_parallel_size` is 1 until `resolve_layout` chooses. `gpus` are the
    run's GPUs, as far as known; None: those that nvidia-smi shows. `row_adapters` are the run's adapters with names.
    """
    device = device_of(run)
    tensor_parallel_size = layout_as_given(run).tensor_parallel_size
    if run.quantization != "auto":
        model = model.with_quantization(run.quantization)
    model.check_tensor_parallel(tensor_parallel_size)
    model.check_pipeline_parallel(run.pipeline_parallel_size)
    max_model_len = _max_model_len(run, model)
    dtype = run.dtype
    if dtype == "auto":
        dtype = model.dtype if device == "cuda" else "float32"
    embedding = embedding_settings(run, model_path, model) if run.task == "embed" else None
    keeps_prompts_whole = _keeps_prompts_whole(model, embedding)
    least_tokens = max_model_len if keeps_prompts_whole or reads_whole_prompts(model) else 0
    max_num_batched_tokens = _max_num_batched_tokens(run, model, device, max_model_len, gpus, least=least_tokens)
    max_image_tokens, max_prompt_images = image_limits(run, model_path, model, max_model_len)
    attention_backend = attention_choice(run.attention_backend)
    _check_fits(run, model, device, dtype, attention_backend)
    adapters = adapter_choice(run.lora)
    modes = find_modes(adapters, list(row_adapters.values()), model)
    return EngineConfig(
        model_path=model_path,
        load_format=run.load_format,
        hf_overrides=run.hf_overrides,
        lora_path=None if adapters.merged is None else find_adapter(adapters.merged),
        lora_paths=tuple(map(find_adapter, adapters.named.values())),
        merged_adapters=modes.merged,
        merged_only_adapters=modes.merged_only,
        lora_sizes=sizes_of(list(row_adapters.values()), merged_only=modes.merged_only),
        max_loaded_adapters=adapters.max_loaded,
        device=device,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=run.enable_expert_parallel,
        enable_attention_dp=run.attends_by_rows,
        pipeline_parallel_size=run.pipeline_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=run.gpu_memory_utilization,
        kv_cache_memory=parse_size(run.kv_cache_memory),
        block_size=run.block_size
        or default_block_size(model, dtype, kv_dtype(run.kv_cache_dtype, dtype), attention_backend),
        kv_cache_dtype=run.kv_cache_dtype,
        attention_backend=attention_backend,
        enable_prefix_caching=run.enable_prefix_caching and not model.both_ways,  # keys depend on what follows
        enable_cascade_attention=run.enable_cascade_attention,
        plan_admission=run.job.plan,
        enforce_eager=run.enforce_eager or run.task != "generate",  # prompts are computed without graphs
        step_timeout=run.step_timeout,
        quantization=model.quantization,
        fp8_accumulation=run.fp8_accumulation,
        embedding_size=_embedding_size(model, embedding),
        dense=() if embedding is None else embedding.dense,
        batch_invariant=run.batch_invariant,
        max_draft_tokens=_max_draft_tokens(run, tensor_parallel_size),
        takes_forced_tokens=run.speculation.method == "lookup",
        draft_head=None if model.draft_head is None else find_head(run.speculation.draft_head or MTP),
        draft_policy=run.speculation.policy,
        max_image_tokens=max_image_tokens,
        max_prompt_images=max_prompt_images,
        keeps_prompts_whole=keeps_prompts_whole,
        whole_tokens=whole_tokens(model, max_image_tokens, least_tokens, max_num_batched_tokens),
        prepare_grammars=run.task == "generate" and run.sampling.get("structured") is not None,
    )


def _keeps_prompts_whole(model: ModelConfig, embedding: EmbeddingSettings | None) -> bool:
    """Whether each prompt is computed in one step: its tokens attend to each other, or something reads their mean."""
    reads_mean = embedding is not None and embedding.needs_whole_prompts
    return model.both_ways or reads_mean or (model.classifier is not None and model.classifier.position == "all")


def _embedding_size(model: ModelConfig, embedding: EmbeddingSettings | None) -> int:
    """Return the number of values that a request gets in place of tokens; 0: it gets tokens."""
    if model.classifier is not None:
        return len(model.classifier.labels)
    return 0 if embedding is None else embedding.size


def _max_num_batched_tokens(
    run: RunConfig,
    model: ModelConfig,
    device: Literal["cpu", "cuda"],
    max_model_len: int,
    gpus: Sequence[SmiGpu] | None,
    *,
    least: int,
) -> int:
    """Return the maximum of tokens per step, no more than all requests can have: buffers have room for them. `least`:
    what it is at least in runs that leave it open."""
    given, of_all = run.max_num_batched_tokens, run.max_num_seqs * max_model_len
    if given is not None and given <= of_all:
        return given
    default = max(default_batched_tokens(model, device, partial(smallest_memory, gpus)), run.max_num_seqs, least)
    return default if given is None else min(given, max(default, of_all))


def _max_model_len(run: RunConfig, model: ModelConfig) -> int:
    """Return the longest request's tokens. Raises ConfigError if the model was made for fewer."""
    max_model_len = run.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings == model.decoder.max_positions:
        raise ConfigError(
            f"`max_model_len` is {max_model_len}, and nvcli computes {run.model} for at most "
            f"{model.max_position_embeddings} tokens, a chunk of its attention; lower it or leave it out"
        )
    if max_model_len > model.max_position_embeddings:
        way_out = "lower it or leave it out"
        if model.decoder.learned_positions is None:
            way_out += ", or stretch the model with `hf_overrides`"
        else:
            way_out += "; it learned an embedding for each position, and has none for later ones"
        raise ConfigError(
            f"`max_model_len` is {max_model_len}, and {run.model} was made for at most "
            f"{model.max_position_embeddings} tokens (max_position_embeddings); {way_out}"
        )
    return max_model_len


def _check_fits(
    run: RunConfig, model: ModelConfig, device: Literal["cpu", "cuda"], dtype: ModelDtype, attention_backend: str
) -> None:
    """Raise ConfigError if the run asks for what this model is not computed with."""
    _check_attention_dp(run, model)
    _check_chosen_keys(run, model, dtype)
    if run.batch_invariant:
        _check_batch_invariant(run, model, dtype, attention_backend)
    if run.fp8_accumulation == "fast":
        check_fast_accumulation(run, model, device)


def _check_chosen_keys(run: RunConfig, model: ModelConfig, dtype: ModelDtype) -> None:
    """Raise ConfigError if the KV cache cannot hold what keys are chosen by, or made of."""
    kinds = attention_kinds(mixer.kv_spec() for of_layer in model.mixers for mixer in of_layer)
    compressed = [spec.attended for spec in kinds if spec.compressed is not None]
    if compressed and kv_dtype(run.kv_cache_dtype, dtype) == "fp8":
        raise ConfigError(
            f"`kv_cache_dtype` is fp8, and this model ({model.architecture}) makes keys of what it keeps of tokens in "
            "its own type: leave it out"
        )
    exact = any(mixer.needs_exact_keys for of_layer in model.mixers for mixer in of_layer)
    if exact and kv_dtype(run.kv_cache_dtype, dtype) == "fp8":
        raise ConfigError(
            f"`kv_cache_dtype` is fp8, which would round the positions that keys of this model ({model.architecture}) "
            "hold: leave it out"
        )
    unit = max((spec.rate // spec.span for spec in compressed), default=1)
    if run.block_size is not None and run.block_size % unit:
        raise ConfigError(
            f"`block_size` is {run.block_size}, and this model ({model.architecture}) has keys for several tokens: a "
            f"multiple of {unit} is needed"
        )
    if model.most_chosen and kv_dtype(run.kv_cache_dtype, dtype) == "fp8":
        raise ConfigError(
            f"`kv_cache_dtype` is fp8, and this model ({model.architecture}) chooses keys by numbers that stand beside "
            f"them in the model's type: leave it out, or set `max_model_len` to at most {model.most_chosen:,}, where "
            "all keys are attended"
        )


def _check_batch_invariant(run: RunConfig, model: ModelConfig, dtype: ModelDtype, attention_backend: str) -> None:
    """Raise ConfigError if the model or another key makes `batch_invariant` impossible."""
    model.check_batch_invariant()
    for name in attention_backend.split(":"):
        if name not in ("auto", "torch", "triton"):
            raise ConfigError(
                f"`attention_backend` {name} gives rows different bits in different batches, and `batch_invariant` is "
                "true; use auto, triton or torch, or set `batch_invariant` to false"
            )
    if kv_dtype(run.kv_cache_dtype, dtype) != dtype:
        raise ConfigError(
            f"`kv_cache_dtype` is {run.kv_cache_dtype}, and `batch_invariant` keeps keys and values in the model's "
            f"type ({dtype}); leave one of the two out"
        )


def _max_draft_tokens(run: RunConfig, tensor_parallel_size: int) -> int:
    """Return the maximum tokens drafted for a row; 0: none are."""
    is_by_rows = run.attends_by_rows and tensor_parallel_size > 1
    return run.speculation.num_draft_tokens if run.task == "generate" and not is_by_rows else 0


def _check_attention_dp(run: RunConfig, model: ModelConfig) -> None:
    """Raise ConfigError if another key asks for what attention by rows does not serve."""
    others = {
        f"pipeline_parallel_size (--pp) is {run.pipeline_parallel_size}": run.pipeline_parallel_size > 1,
        f"speculation.method (--speculate) is {run.speculation.method}": run.speculation.method not in ("auto", "none"),
        "lora.adapters has adapters that rows choose": bool(adapter_choice(run.lora).named),
        "batch_invariant is true": run.batch_invariant,
        "all tokens of a prompt attend to each other": model.both_ways,
    }
    problems = [problem for problem, is_there in others.items() if is_there]
    if run.attends_by_rows and problems:
        raise ConfigError(
            f"`enable_attention_dp` (--attention-dp) is true, which does not work together with this: "
            f"{', '.join(problems)}; leave one of the two out"
        )


def attention_choice(choice: str | AttentionBackends) -> str:
    """Return `EngineConfig.attention_backend` for the choice in a RunConfig."""
    if isinstance(choice, str):
        return choice
    return choice.prefill if choice.prefill == choice.decode else f"{choice.prefill}:{choice.decode}"
