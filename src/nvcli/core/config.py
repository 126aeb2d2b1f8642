"""The configuration of a run: YAML file + command line → one frozen `RunConfig`.

Keys are strict and use the field's usual names, and each declares the option by which commands set it
(`Flag`). Nothing writes to a config after it is made: what is derived from it (`EngineConfig`) is returned as a new
value. This module knows no torch, no model and no device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nvcli.core.byte_sizes import parse_size
from nvcli.core.chat_template import reserved_variable
from nvcli.core.config_types import (
    MAX_BLOCK_SIZE,
    MAX_INT32,
    MAX_INT64,
    MAX_NUM_SEQS,
    AttentionName,
    Device,
    Dtype,
    FP8Accumulation,
    KVCacheDtype,
    LoadFormat,
    NumProcesses,
    ParallelSize,
    PositiveInt,
    Quantization,
)
from nvcli.core.flags import MODEL, SAMPLING, Flag, FlaggedField, flagged_fields
from nvcli.core.job_config import MESSAGES_KEY, JobConfig, MessageTemplate
from nvcli.core.lora_config import LoraConfig
from nvcli.core.other_names import own_keys
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.core.task_config import EmbedConfig, ScoreConfig, Task
from nvcli.core.text_template import TextTemplate
from nvcli.core.validation import InvalidValue, convert, join_path, show
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from nvcli.core.config_source import ConfigSource

RESERVED_KEYS = ("id", "index", "choices", "usage", "error", "input", "custom_id", "response")
"""Keys with a meaning in output rows, so that none of them can be `job.text_field`."""


class AttentionBackends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`attention_backend` with different backends for prompts and for decode steps."""

    prefill: AttentionName = "auto"
    decode: AttentionName = "auto"


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a user can set. Field comments state what `auto` and null mean."""

    model: Annotated[
        str, Flag("--model -m", MODEL, "Folder, Hugging Face id, or `demo`.", "PATH|NAME", completes="models")
    ] = ""
    """`demo` is the built-in model."""
    revision: Annotated[
        str | None,
        Flag("--revision", MODEL, "Branch, tag or commit of a model on the Hugging Face hub [default: main]", "NAME"),
    ] = None
    lora: Annotated[
        str | list[str] | LoraConfig | None,
        Flag(
            "--lora",
            MODEL,
            "LoRA adapter of PEFT for all rows: folder or Hugging Face id, which may end in @REVISION. With a NAME: "
            "for rows that name it; may be repeated.",
            "[NAME=]PATH",
        ),
    ] = None
    """One without a name is merged into the weights as they are loaded; those with names (`NAME=PATH`) are for rows
    with `"lora": "NAME"`. null: the model as it is."""
    load_format: LoadFormat = "auto"
    """Weights. auto: those of the model's safetensors files; dummy: random ones, the same in every run, to measure a
    model of which only config.json and tokenizer are there."""
    hf_overrides: Annotated[
        dict[str, Any],
        Flag(
            "--hf-overrides",
            MODEL,
            "Keys that replace those in the model's config.json",
            example='{"max_position_embeddings": 131072}',
        ),
    ] = {}
    """Mappings go over those of config.json key by key."""
    dtype: Annotated[
        Dtype,
        Flag("--dtype", MODEL, "bfloat16, float16 or float32; auto: the checkpoint's own, float32 on a CPU.", "TYPE"),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Flag(
            "--quantization",
            MODEL,
            "Format of weights: none: --dtype; fp8: linear layers in 8 bits; w4a16, w4a8: a checkpoint's 4 bits; "
            "auto: what suits checkpoint and GPU.",
            "TYPE",
        ),
    ] = "auto"
    """Format of the weights of linear layers. none: `dtype`, whatever the checkpoint's format; fp8: 8 bits, with
    activations quantised on the fly; w4a16: the bits of a checkpoint in 4, or in GGUF, with activations in `dtype`;
    w4a8: those of experts in MXFP4, with activations quantised to FP8. auto: fp8 for a checkpoint in FP8 on GPUs with
    FP8 units, w4a16 (MXFP4: w4a8) for one in 4 bits or in GGUF where 16 (of FP4: 8) would take too much of a GPU's
    memory, else none."""
    fp8_accumulation: FP8Accumulation = "exact"
    """Accumulation of FP8 products. exact: in float32, at least every 256 terms of a sum; fast:
    in the FP8 units, which keep about 14 bits, for the whole sum if weights have a scale for each row or tensor."""
    device: Annotated[Device, Flag("--device", MODEL, "Device of the run; auto: a GPU where one is found.")] = "auto"
    """A GPU counts only if a torch that supports it is installed."""
    tensor_parallel_size: Annotated[
        ParallelSize, Flag("--tp", MODEL, "GPUs (processes) for each copy; auto: what is fastest here.")
    ] = "auto"
    """GPUs that share every layer. auto: see `job.planning.layout`; 1 on a CPU."""
    enable_expert_parallel: Annotated[
        bool, Flag("--ep", MODEL, "Whole experts on each of the --tp GPUs, not a part of every expert.")
    ] = False
    enable_attention_dp: Annotated[
        bool,
        Flag(
            "--attention-dp",
            MODEL,
            "All heads of some requests on each of the --tp GPUs, not some heads of all requests.",
        ),
    ] = False
    """Each request's keys are then on one of the GPUs; MLPs and experts are cut as without."""
    pipeline_parallel_size: Annotated[
        NumProcesses, Flag("--pp", MODEL, "Pipeline stages in each copy, each with its own --tp GPUs.")
    ] = 1
    data_parallel_size: Annotated[
        ParallelSize, Flag("--dp", MODEL, "Copies of the model; auto: what is fastest here.")
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Flag("--max-model-len", MODEL, "Maximum prompt + answer tokens [default: the model's limit]"),
    ] = None
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=MAX_NUM_SEQS), Flag("--max-num-seqs", MODEL, "Maximum concurrent requests in each copy.")
    ] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    """Maximum tokens computed in one step; longer prompts are split into chunks. null: see
    `sizing.graph_sizes.default_batched_tokens`; at least `max_num_seqs`."""
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        Flag("--gpu-memory-utilization", MODEL, "Share of each GPU's memory that the run may use.", "SHARE"),
    ] = 0.9
    kv_cache_memory: str | PositiveInt | None = None
    """KV cache of each rank, in bytes or as a size such as `2GiB`; null: what a GPU has left, or part of a CPU's
    RAM."""
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)] | None = None
    """Tokens in one block of the KV cache; null: see `sizing.kv_cache.default_block_size`."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Data type of the KV cache. auto: the model's; fp8: e4m3 with a scale for each token and head, in
    about half the memory of bf16."""
    attention_backend: AttentionName | AttentionBackends = "auto"
    """One backend, or `{prefill: …, decode: …}`. auto: the fastest that works here without a long compile."""
    enable_prefix_caching: bool = True
    """Prompts that begin alike share the KV cache of their common prefix."""
    enable_cascade_attention: bool = True
    """Decode steps read the KV cache that running requests share once for all of them, where that pays, instead of
    once for each; short prompts attend to their shared prefix together."""
    enforce_eager: bool = False
    """true: no CUDA graphs."""
    batch_invariant: bool = False
    """true: a row gets the same bits whatever its batch, chunks, prefix hits and preemptions, and however many
    copies there are, at some cost of speed."""
    seed: Annotated[
        int,
        Meta(ge=0, le=MAX_INT64),
        Flag("--seed", SAMPLING, "Seed of the run; every row has its own random numbers."),
    ] = 0
    """The seed and a row's index determine the row's random numbers."""
    speculation: SpeculationConfig = SpeculationConfig()
    images: Literal["auto", "always", "never"] = "auto"
    """auto: a model's vision tower is loaded where rows seem to have images, or cannot be seen in advance; always: it
    is loaded; never: the model's text part alone is."""
    step_timeout: Annotated[float, Meta(gt=0, le=1_000_000)] = 300.0
    """Seconds that a rank may take for one step before the run is stopped."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: the checkpoint's generation_config.json supplies sampling defaults, which `sampling` overrides."""
    sampling: dict[str, Any] = {}
    """Defaults for every row's `sampling` object; holds only the keys that were set."""
    job: JobConfig = JobConfig()
    task: Task = "generate"
    """Kind of result for each row; set by the command."""
    score: ScoreConfig = ScoreConfig()
    embed: EmbedConfig = EmbedConfig()

    @property
    def attends_by_rows(self) -> bool:
        """Whether attention is computed by rows: `enable_attention_dp`, which does nothing with one rank in a stage."""
        return self.enable_attention_dp and self.tensor_parallel_size != 1


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "job": JobConfig,
    "speculation": SpeculationConfig,
    "sampling": SamplingParams,
    "score": ScoreConfig,
    "embed": EmbedConfig,
}
"""Sections of the configuration: key → struct of its keys."""


def all_keys() -> list[str]:
    """Return all keys; those in a section have it as a prefix: `max_model_len`, `sampling.top_k`."""
    keys = [key for key in RunConfig.__struct_fields__ if key not in SECTIONS]
    return keys + [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__struct_fields__]


@functools.cache
def key_fields() -> dict[str, FlaggedField]:
    """Return the keys that have a flag, spelled as in `all_keys`."""
    fields = flagged_fields(RunConfig)
    for section, kind in SECTIONS.items():
        fields |= {f"{section}.{key}": field for key, field in flagged_fields(kind).items()}
    return fields


@functools.cache
def flag_keys() -> dict[str, str]:
    """Return a mapping of flags to the keys that they set."""
    keys = {field.flag.name: key for key, field in key_fields().items()}
    return keys | {"--no-chat": keys["--chat"]}


def load_run_config(
    path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None, **options: Any
) -> RunConfig:
    """Load the configuration as `load_sourced_config` does, and return it without its source."""
    return load_sourced_config(path, overrides, flags, **options)[0]


def load_sourced_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    needs_model: bool = True,
    other_overrides: Mapping[str, Sequence[str]] | None = None,
) -> tuple[RunConfig, ConfigSource]:
    """Load a configuration, and return it with its source, which knows the origin of each key.

    `--set key=value` overrides the file, and flags (of `flag_keys`) override both. `settings` are
    the values by key that a Python program gives instead of overrides and flags. `other_overrides` are those of
    options other than `--set`, by option; they take precedence over `--set`. Without `needs_model`, `model` may
    stay empty. Raises ConfigError that names where the value came from, the key, the value and what is allowed.
    """
    from nvcli.core.config_source import ConfigSource  # only the parent reads YAML; ranks import this module too

    source = ConfigSource()
    if path is not None:
        source.add_file(path)
    for option, texts in {"--set": overrides, **(other_overrides or {})}.items():
        for text in texts:
            source.add_override(text, option)
    for flag, value in (flags or {}).items():
        source.add_flag(flag, flag_keys()[flag], value)
    for key, value in (settings or {}).items():
        source.add_setting(key, value)
    try:
        run = convert(source.values, RunConfig)
        convert(run.sampling, SamplingParams, under=("sampling",))
    except InvalidValue as error:
        origin = source.origin(error.path)
        message = _in_its_section(error) or error.message
        raise ConfigError(f"{origin}: {message}" if origin else message) from None
    if needs_model:
        _check_model(run)
    _check_together(run, source)
    return run, source


def _in_its_section(error: InvalidValue) -> str | None:
    """Return a hint for a top-level key that belongs in a section; None for all other errors."""
    if not error.unknown_key or len(error.path) != 1:
        return None
    key = str(error.path[0])
    if key in all_keys():  # with a dot, as `--set` takes it
        outer, _, name = key.partition(".")
        return f"unknown key `{key}`; `{name}` is a key of the mapping `{outer}`: `{outer}: {{{name}: …}}`"
    own = next((path for path in own_keys().get(key, ()) if path.partition(".")[0] in SECTIONS), None)
    if own is None:
        section = next((name for name, kind in SECTIONS.items() if key in kind.__struct_fields__), None)
        own = section and f"{section}.{key}"
    return own and f"unknown key `{key}`; did you mean `{own}`?"


def _check_model(run: RunConfig) -> None:
    if not run.model.strip():
        raise ConfigError(
            "no model given: name a checkpoint's folder or Hugging Face id with `--model` or with `model:` in the "
            "configuration file\n`--model demo` is built in and needs nothing"
        )


def _check_together(run: RunConfig, source: ConfigSource) -> None:
    """Check keys against each other. Raises ConfigError."""

    def fail(path: tuple[str, ...], message: str) -> None:
        origin = source.origin(path)
        raise ConfigError(f"{origin}: {message}" if origin else message)

    if run.max_num_batched_tokens is not None and run.max_num_batched_tokens < run.max_num_seqs:
        fail(
            ("max_num_batched_tokens",),
            f"`max_num_batched_tokens` ({run.max_num_batched_tokens}) is smaller than `max_num_seqs` "
            f"({run.max_num_seqs}), so a step could not hold one token of each; raise it or lower `max_num_seqs`",
        )
    for path, size in (
        (("kv_cache_memory",), run.kv_cache_memory),
        (("job", "reorder_memory"), run.job.reorder_memory),
    ):
        try:
            parse_size(size)
        except ValueError as error:
            fail(path, f"`{join_path(path)}` is {show(size)}; {error}")
    job = run.job
    fields = {("job", name): getattr(job, name) for name in ("prompt_field", "messages_field", "id_field")}
    fields["job", "messages_field"] = job.messages_field or MESSAGES_KEY
    if job.messages_field == job.prompt_field and source.setter(("job", "prompt_field")) is None:
        del fields["job", "prompt_field"]  # prompts are conversations
    if job.image_field not in (None, job.id_field):  # the path of an image may be the id of its row
        fields["job", "image_field"] = job.image_field
    if run.task == "score":
        names = ("continuation_field", "choices_field", "answer_field")
        fields |= {("score", name): getattr(run.score, name) for name in names}
    keys = [*fields.values(), "prompt_token_ids", "sampling", "chat_template_kwargs"]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        setter = next(path for path, key in fields.items() if key == twice and source.setter(path))
        known = ", ".join(f"`{join_path(path)}`" for path in fields)
        fail(setter, f"the key `{twice}` of a row cannot be two things: see {known}")
    if job.text_field in RESERVED_KEYS:
        fail(
            ("job", "text_field"),
            f"`job.text_field` is {show(job.text_field)}, which is a key of output rows; choose a name that is none of "
            f"{', '.join(RESERVED_KEYS)}",
        )
    _check_prompts(job, fail)
    if not _is_json(run.hf_overrides):
        fail(("hf_overrides",), "`hf_overrides` holds a key or a value that JSON does not have; put quotes around it")


def _is_json(value: Any) -> bool:
    try:
        msgspec.json.encode(value, order="deterministic")
    except TypeError:  # YAML has keys of every type, and dates
        return False
    return True


def _check_prompts(job: JobConfig, fail: Callable[[tuple[str, ...], str], None]) -> None:
    """Check the job's keys for prompts. `fail` raises for the key at a path."""
    texts = [(("job", "prompt_template"), job.prompt_template)]
    texts += [(("job", "messages_template"), message.content) for message in job.messages_template]
    for path, text in texts:
        try:
            TextTemplate(text or "")
        except ValueError as error:
            fail(path, f"`{join_path(path)}` is {show(text)}; {error}")
    if job.prompt_template is not None:
        name = "`job.prompt_template`"
        if job.messages_template:
            fail(
                ("job", "messages_template"), f"{name} and `job.messages_template` exclude each other; give one of them"
            )
        if job.system is not None and job.chat == "never":
            fail(
                ("job", "system"),
                f"{name} makes prompts that are no conversations where `job.chat` is never, so `job.system` would have "
                "no effect; leave one of the two out",
            )
    problem = reserved_variable(job.chat_template_kwargs)
    if not _is_json(job.chat_template_kwargs):
        problem = "holds a key that is not text; put quotes around it"
    if problem is not None:
        fail(("job", "chat_template_kwargs"), f"`job.chat_template_kwargs`: {problem}")


__all__ = [
    "SECTIONS",
    "AttentionBackends",
    "JobConfig",
    "MessageTemplate",
    "RunConfig",
    "SamplingParams",
    "all_keys",
    "flag_keys",
    "key_fields",
    "load_run_config",
    "load_sourced_config",
]
