"""The facts that a job's answers depend on besides its inputs, recorded so that no other job continues its output.

They are the model's files, and the part of the configuration that says which tokens are chosen. How fast the answers
are computed (batch sizes, processes, memory) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.job_config import MESSAGES_KEY
from nvcli.core.lora_config import adapter_choice
from nvcli.errors import LoadError
from nvcli.job.input.known_input import digest_file
from nvcli.job.output.manifest import CHAT_FACT, MERGED_FACT, Fact, as_fact, merged_fact
from nvcli.job.rows.task_rows import TaskRows
from nvcli.job.shard import SHARD_FACT, Shard
from nvcli.models.checkpoint import weight_files
from nvcli.models.other_checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "vocab.txt", "spiece.model", "*.tiktoken", "merges.txt")
"""Files of configuration, tokenizer and chat template, which are compared by all of their bytes."""
_WEIGHT_SAMPLES = 512
"""Weights are identified by name, size and this many samples over all files of a checkpoint, which takes milliseconds.

Training changes nearly all weights, or at least those of whole layers, and the samples of a model of 16 GB are 32 MB
apart."""
_MIN_FILE_SAMPLES = 8
_WEIGHT_SAMPLE_BYTES = 4096
_LATER = {
    "embed.gets_mean": False,
    "embed.prefix": "",
    "classify.position": "last",
    "classify.has_bias": False,
    "classify.temperature": 1.0,
}
"""Settings of tasks that are no facts with these values, as outputs begun before there were any lack them."""
_NOT_READ = {"model.safetensors.index.json", "trainer_state.json"}


def job_facts(
    run: RunConfig,
    config: EngineConfig,
    sampling_defaults: Mapping[str, Any],
    *,
    chat_template: str | None = None,
    weights: bool = True,
    shard: Shard | None = None,
    task: TaskRows | None = None,
    chat: str | None = None,
) -> dict[str, Fact]:
    """Return the facts of a job, under names that a user knows.

    `config` and `sampling_defaults` follow from `run` and the checkpoint, `chat_template` is the text of the
    template that the job brings, `chat` says which texts become messages (`chat_choice`), `shard` is the part of the
    rows that the output has, None: all, and `task` what is made of the rows in place of answers. `weights` false: facts
    of the weights are left out. Raises LoadError for a file of the checkpoint that cannot be read.
    """
    facts = _checkpoint_facts(config.model_path, weights=weights and config.load_format == "auto")
    adapters = {"lora": config.lora_path} if config.lora_path is not None else {}
    names = adapter_choice(run.lora).named
    adapters |= {f"lora {name}": path for name, path in zip(names, config.lora_paths, strict=True)}
    for name, path in adapters.items():
        facts[f"{name} {ADAPTER_CONFIG}"] = f"sha256 {_digest(path / ADAPTER_CONFIG)}"
        facts[f"{name} {ADAPTER_WEIGHTS}"] = _describe_weights(path / ADAPTER_WEIGHTS, _WEIGHT_SAMPLES)
    facts |= {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "seed": run.seed,
        "job.order": run.job.order,
        "job.on_too_long": run.job.on_too_long,
        "job.special_tokens": run.job.special_tokens,
        "job.prompt_field": run.job.prompt_field,
        "job.messages_field": run.job.messages_field or MESSAGES_KEY,
        "job.id_field": run.job.id_field,
    }
    merged = merged_fact([*names][number - 1] for number in config.merged_adapters)
    job, is_kv_other = run.job, config.kv_dtype != config.dtype
    digest = None if chat_template is None else f"sha256 {sha256(chat_template.encode()).hexdigest()[:16]}"
    optional: dict[str, tuple[Any, Any]] = {
        MERGED_FACT: (merged, ""),
        "load_format": (config.load_format, "auto"),
        "hf_overrides": (config.hf_overrides or None, None),
        "kv_cache_dtype": (config.kv_cache_dtype if is_kv_other else None, None),
        "quantization": (config.quantization, "none"),
        "fp8_accumulation": (config.fp8_accumulation, "exact"),
        "batch_invariant": (config.batch_invariant, False),
        "images": ("auto" if run.images == "always" else run.images, "auto"),
        "job.image_field": (job.image_field, None),
        "job.min_pixels": (job.min_pixels, None),
        "job.max_pixels": (job.max_pixels, None),
        "job.prompt_template": (job.prompt_template, None),
        "job.messages_template": (job.messages_template or None, None),
        "job.system": (job.system, None),
        "job.chat_template": (digest, None),
        "job.chat_template_kwargs": (job.chat_template_kwargs or None, None),
        CHAT_FACT: (chat, None),
        "job.reasoning_parser": (job.reasoning_parser, "auto"),
        "job.tool_parser": (job.tool_parser, "auto"),
        "job.keep_input": (job.keep_input, False),
        "job.text_field": (job.text_field, None),
    }
    facts |= {name: as_fact(value) for name, (value, without) in optional.items() if value != without}
    for name, value in sorted(sampling_defaults.items()):
        facts[f"sampling.{name}"] = as_fact(value)
    if task is not None:
        facts["task"] = run.task
        (settings,) = msgspec.to_builtins(task).values()
        named = {f"{run.task}.{name}": value for name, value in settings.items()}
        facts |= {name: as_fact(value) for name, value in named.items() if (name, value) not in _LATER.items()}
    if shard is not None:
        facts[SHARD_FACT] = str(shard)
    return facts


def _checkpoint_facts(model_path: Path, *, weights: bool) -> dict[str, Fact]:
    """Return the facts of a checkpoint's small files and, with `weights`, of these. Raises LoadError."""
    small = sorted({file for pattern in _SMALL_FILES for file in model_path.glob(pattern) if not file.is_dir()})
    facts: dict[str, Fact] = {}
    for file in small:
        if file.name not in _NOT_READ:
            facts[f"model {file.name}"] = f"sha256 {_digest(file)}"
    try:
        large = weight_files(model_path) if weights else []
    except LoadError:
        large = []  # loading them will report what is wrong
    num_samples = max(_MIN_FILE_SAMPLES, _WEIGHT_SAMPLES // max(1, len(large)))
    for file in large:
        facts[f"model {file.name}"] = _describe_weights(file, num_samples)
    return facts


def _describe_weights(file: Path, num_samples: int) -> str:
    sampled = _digest(file, num_samples=num_samples, sample_bytes=_WEIGHT_SAMPLE_BYTES)
    return f"{file.stat().st_size:,} bytes, sha256 {sampled}"


def _digest(file: Path, **sampling: int) -> str:
    try:
        if file.exists() and not file.is_file():
            raise LoadError(f"{file}: not a regular file, which files of a checkpoint must be")
        return digest_file(file, **sampling)
    except OSError as error:
        raise LoadError(f"{file}: cannot be read: {error.strerror}") from None
