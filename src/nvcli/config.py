"""The configuration of a run: YAML file + command line → one frozen `RunConfig`.

Keys are strict and spelled as the field spells them. Nothing writes to a config after it is made: what is derived
from it (`EngineConfig`) is returned as a new value. This module knows no torch, no model and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nvcli.byte_sizes import parse_size
from nvcli.chat_template import reserved_variable
from nvcli.config_types import (
    MAX_BLOCK_SIZE,
    MAX_NUM_SEQS,
    AttentionName,
    Device,
    Dtype,
    FP8Accumulation,
    KeptWeights,
    KVCacheDtype,
    KVDtype,
    ModelDtype,
    NumProcesses,
    ParallelSize,
    PositiveInt,
    Quantization,
)
from nvcli.errors import ConfigError
from nvcli.job_config import MESSAGES_KEY, JobConfig, MessageTemplate
from nvcli.other_names import OWN_KEYS
from nvcli.sampling_params import MAX_INT, SamplingParams
from nvcli.task_config import EmbedConfig, ScoreConfig, Task
from nvcli.text_template import TextTemplate
from nvcli.validation import InvalidValue, convert, join_path, show

if TYPE_CHECKING:
    from nvcli.config_source import ConfigSource

RESERVED_KEYS = ("id", "index", "choices", "usage", "error", "input", "custom_id", "response")
"""Keys that mean something in output rows, so that none of them can hold a text."""

"""The file that is read from the current folder when no configuration file is named."""

FLAG_KEYS = {
    "--model": "model",
    "--revision": "revision",
    "--hf-overrides": "hf_overrides",
    "--tp": "tensor_parallel_size",
    "--ep": "enable_expert_parallel",
    "--pp": "pipeline_parallel_size",
    "--dp": "data_parallel_size",
    "--device": "device",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--seed": "seed",
    "--max-tokens": "sampling.max_tokens",
    "--temperature": "sampling.temperature",
    "--top-p": "sampling.top_p",
    "--top-k": "sampling.top_k",
    "--min-p": "sampling.min_p",
    "--repetition-penalty": "sampling.repetition_penalty",
    "--presence-penalty": "sampling.presence_penalty",
    "--frequency-penalty": "sampling.frequency_penalty",
    "-n": "sampling.n",
    "--stop": "sampling.stop",
    "--ignore-eos": "sampling.ignore_eos",
    "--logprobs": "sampling.logprobs",
    "--order": "job.order",
    "--max-errors": "job.max_errors",
    "--keep-going": "job.keep_going",
    "--chat": "job.chat",
    "--no-chat": "job.chat",
    "--system": "job.system",
    "--prompt-template": "job.prompt_template",
    "--chat-template": "job.chat_template",
    "--chat-template-kwargs": "job.chat_template_kwargs",
    "--prompt-field": "job.prompt_field",
    "--messages-field": "job.messages_field",
    "--id-field": "job.id_field",
    "--keep-input": "job.keep_input",
    "--text-field": "job.text_field",
    "--normalize": "score.normalize",
    "--token-logprobs": "score.token_logprobs",
    "--continuation-field": "score.continuation_field",
    "--choices-field": "score.choices_field",
    "--answer-field": "score.answer_field",
    "--pooling": "embed.pooling",
    "--dimensions": "embed.dimensions",
    "--encoding": "embed.encoding",
}
"""Flags that are short for a key."""


class AttentionBackends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`attention_backend` where prompts and decode steps are to be attended by different ones."""

    prefill: AttentionName = "auto"
    decode: AttentionName = "auto"


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a user can set. Field comments state what `auto` and null mean."""

    model: str = ""
    """Folder or Hugging Face id of a checkpoint, or `demo`: the built-in model."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face hub; null: its main branch."""
    hf_overrides: dict[str, Any] = {}
    """Keys and values that go over those of the checkpoint's config.json, mappings key by key."""
    dtype: Dtype = "auto"
    """auto: the checkpoint's own on a GPU, float32 on a CPU."""
    quantization: Quantization = "auto"
    """How weights of linear layers are kept. none: in `dtype`, whatever the checkpoint's format; fp8: in 8 bits, with
    activations quantised as they come; w4a16: in the 4 bits of the checkpoint, with activations in `dtype`. auto: fp8
    for a checkpoint in FP8 on GPUs with FP8 units, w4a16 for one in 4 bits where 16 would take too much of a GPU's
    memory, else none."""
    fp8_accumulation: FP8Accumulation = "exact"
    """How products with FP8 weights are added up. exact: in float32, at the latest every 256 numbers of a sum; fast:
    the FP8 units, which keep about 14 bits, add up the whole sum where weights have a scale for each row or tensor."""
    device: Device = "auto"
    """auto: cuda where an NVIDIA GPU and a torch built for it are found, else cpu."""
    tensor_parallel_size: ParallelSize = "auto"
    """GPUs (on a CPU: processes) that share every layer of a copy. auto: see `job_run.planning.layout`; 1 on a CPU."""
    enable_expert_parallel: bool = False
    """These GPUs hold whole experts of a mixture of experts each; false: a part of every expert."""
    pipeline_parallel_size: NumProcesses = 1
    """Stages that the layers of a copy are dealt out to, each on its own `tensor_parallel_size` GPUs."""
    data_parallel_size: ParallelSize = "auto"
    """Copies of the model, each on GPUs of its own: `tensor_parallel_size` for each stage. auto: likewise."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    """Most tokens of prompt and answer together; null: what the model was made for."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)] = 256
    """Most requests that run at the same time in each copy."""
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    """Most tokens computed in one step; longer prompts are cut into chunks. null: see
    `sizing.graph_sizes.default_batched_tokens`; at least `max_num_seqs`."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of each GPU's memory that the run may use."""
    kv_cache_memory: str | PositiveInt | None = None
    """KV cache of each rank, in bytes or as a size such as `2GiB`; null: what a GPU has left, part of a CPU's RAM."""
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)] | None = None
    """Tokens in one block of the KV cache; null: see `sizing.kv_cache.default_block_size`."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """The type in which keys and values are kept. auto: the model's; fp8: e4m3 with a scale for each token and head, in
    about half the memory of bf16."""
    attention_backend: AttentionName | AttentionBackends = "auto"
    """One for all work, or `{prefill: …, decode: …}`. auto: the fastest that works here without a long compile."""
    enable_prefix_caching: bool = True
    """Prompts that begin alike share the KV cache of what they have in common."""
    enable_cascade_attention: bool = True
    """Each decode step reads the KV cache that running requests share once for all of them, where that pays, instead
    of once for each; short prompts are attended together to what they share."""
    enforce_eager: bool = False
    """true: no CUDA graphs."""
    batch_invariant: bool = False
    """true: a row gets the same bits whatever batch, chunks, prefix hits and preemptions it meets, and however many
    copies there are, at some cost of speed."""
    seed: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """The seed of all random choices; a row's choices follow from it and the row's index."""
    step_timeout: Annotated[float, Meta(gt=0, le=1_000_000)] = 300.0
    """Seconds a rank may take for one step before the run is ended."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling defaults of the checkpoint's generation_config.json lie under those of `sampling`."""
    sampling: dict[str, Any] = {}
    """Defaults of every row's `sampling` object; holds the keys that were set and no others."""
    job: JobConfig = JobConfig()
    task: Task = "generate"
    """What is made of the rows; a command sets its own."""
    score: ScoreConfig = ScoreConfig()
    embed: EmbedConfig = EmbedConfig()


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one replica's engine and ranks, derived from a RunConfig with every `auto` resolved."""

    model_path: Path
    """A local folder in Hugging Face layout."""
    hf_overrides: dict[str, Any] = {}
    """As in RunConfig."""
    device: Literal["cpu", "cuda"]
    dtype: ModelDtype
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    """Bytes for each rank; None: decided by the rank."""
    block_size: int
    attention_backend: str
    """A name or `auto`; `prefill:decode`, each side one of those, where they differ."""
    enable_prefix_caching: bool
    enforce_eager: bool
    step_timeout: float
    enable_expert_parallel: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"
    """As in RunConfig; `kv_dtype` is what it comes to."""
    pipeline_parallel_size: int = 1
    """Stages; rank = stage × `tensor_parallel_size` + the rank within the stage."""
    replica: int = 0
    """The number of this replica."""
    gpus: tuple[int, ...] = ()
    """The GPUs of all replicas, replica after replica, by the numbers that a process sees; empty: the first ones."""
    load_format: Literal["checkpoint", "random"] = "checkpoint"
    """random: `model_path` holds a config.json alone, and the weights are made up; for benchmarks."""
    record_steps: bool = False
    """Report the times of every step to the parent, and at the end the memory that each rank held at most."""
    measure_memory: bool = False
    """Once all is allocated, run the largest batches again and report what each item then took."""
    quantization: KeptWeights = "none"
    """How ranks keep the weights of linear layers."""
    fp8_accumulation: FP8Accumulation = "exact"
    """As in RunConfig."""
    batch_invariant: bool = False
    """As in RunConfig."""
    kv_blocks_before: int | None = None
    """Where ranks follow others that ran out of memory: how many KV blocks those had. They take no more, and no more
    than what is free now leaves them."""
    prepare_grammars: bool = False
    """Load beside the weights what constrained answers need, because rows at the beginning of the job want some."""
    enable_cascade_attention: bool = True
    """As in RunConfig."""
    plan_admission: bool = True
    """Admit as many requests as will fit into the KV cache until they end, by what the answers so far tell; false: as
    many as fit now, and take some back when there is too little room."""
    overlap_steps: bool = True
    """Schedule a step while the one before it runs; false: to measure what that is worth."""
    embedding_size: int = 0
    """The size of the model's hidden states, where requests ask for these instead of tokens: the model then needs no LM
    head. 0: requests ask for tokens and their probabilities."""

    @property
    def kv_dtype(self) -> KVDtype:
        """The type in which keys and values are kept."""
        return kv_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def weights_type(self) -> str:
        """The type of the weights, for people."""
        return (
            self.dtype
            + {"none": "", "fp8": ", linear layers in FP8", "w4a16": ", linear layers in 4 bits"}[self.quantization]
        )

    @property
    def num_ranks(self) -> int:
        """Processes of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank that posts what was sampled: the first one of the last stage."""
        return self.num_ranks - self.tensor_parallel_size

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank, from 0."""
        return rank // self.tensor_parallel_size

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for messages: `rank 2`, or with several stages `rank 2 of stage 1`."""
        return f"rank {rank}" if self.pipeline_parallel_size == 1 else f"rank {rank} of stage {self.stage_of(rank)}"

    def gpu_index(self, rank: int) -> int:
        """Return the number of the GPU that a rank has, among those that the process sees."""
        number = self.replica * self.num_ranks + rank
        return self.gpus[number] if self.gpus else number

    @property
    def max_num_decodes(self) -> int:
        """Most requests that get one more token in one step: with stages, a share of those that run."""
        return -(-self.max_num_seqs // self.pipeline_parallel_size)

    @property
    def max_padded_rows(self) -> int:
        """Most rows of a step that is padded to the shape of a CUDA graph."""
        return self.max_num_seqs + self.max_num_decodes

    @property
    def max_padded_tokens(self) -> int:
        """Most tokens of a step that is padded to the shape of a CUDA graph."""
        return self.max_num_batched_tokens + self.max_num_decodes

    @property
    def max_steps_in_flight(self) -> int:
        """One that runs and one that waits behind it, so that the device goes from step to step without waiting for us;
        with stages, one for each."""
        return max(2, self.pipeline_parallel_size) if self.overlap_steps else 1

    @property
    def max_shared_rows(self) -> int:
        """Most rows of a step that reads what requests share once for all of them; 0: no step does, as what is shared
        depends on the batch where `batch_invariant` is on."""
        shares = self.enable_cascade_attention and self.enable_prefix_caching and not self.batch_invariant
        shares = shares and self.max_num_decodes > 1
        return self.max_num_decodes if shares else 0

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


def kv_dtype(kv_cache_dtype: KVCacheDtype, dtype: ModelDtype) -> KVDtype:
    """Return the type in which a model whose weights are of `dtype` keeps keys and values."""
    if kv_cache_dtype == "auto":
        return dtype
    return "bfloat16" if kv_cache_dtype == "bf16" else "fp8"


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "job": JobConfig,
    "sampling": SamplingParams,
    "score": ScoreConfig,
    "embed": EmbedConfig,
}
"""The keys that hold keys, and which ones."""


def all_keys() -> list[str]:
    """Return all keys, those in sections with the section in front: `max_model_len`, `sampling.top_k`."""
    keys = [key for key in RunConfig.__struct_fields__ if key not in SECTIONS]
    return keys + [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__struct_fields__]


def default_of(key: str) -> Any:
    """Return the default of a key, as `all_keys` spells it."""
    section, _, name = key.rpartition(".")
    return getattr((SECTIONS[section] if section else RunConfig)(), name)


def load_run_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    needs_model: bool = True,
    other_overrides: Mapping[str, Sequence[str]] | None = None,
) -> RunConfig:
    """Lay `--set key=value` overrides over the file, and flags (of `FLAG_KEYS`; None: not given) over both.

    `settings` are values by key that a Python program gives, in place of overrides and flags. `other_overrides` are
    overrides of options beside `--set`, by the name of the option; they go over those of `--set`. Without
    `needs_model`, `model` may stay empty. Raises ConfigError that names where the value came from, the key, the value
    and what is allowed.
    """
    return load_sourced_config(
        path, overrides, flags, settings=settings, needs_model=needs_model, other_overrides=other_overrides
    )[0]


def load_sourced_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    needs_model: bool = True,
    other_overrides: Mapping[str, Sequence[str]] | None = None,
) -> tuple[RunConfig, ConfigSource]:
    """Do what `load_run_config` does, and return the source too, which knows the origin of each key."""
    from nvcli.config_source import ConfigSource  # YAML is for the parent only; ranks import this module too

    source = ConfigSource()
    if path is not None:
        source.add_file(path)
    for option, texts in {"--set": overrides, **(other_overrides or {})}.items():
        for text in texts:
            source.add_override(text, option)
    for flag, value in (flags or {}).items():
        if value is not None:
            source.add_flag(flag, FLAG_KEYS[flag], value)
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
    """Return the message for a key that stands at the top and belongs into a section; None for all other errors."""
    if not error.unknown_key or len(error.path) != 1:
        return None
    key = str(error.path[0])
    own = next((path for path in OWN_KEYS.get(key, ()) if path.partition(".")[0] in SECTIONS), None)
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
    """Check what no key can break by itself. Raises ConfigError."""

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
    keys = [job.prompt_field, job.messages_field or MESSAGES_KEY, job.id_field, "prompt_token_ids"]
    keys += ["sampling", "chat_template_kwargs"]
    fields = "`prompt_field`, `messages_field`, `id_field`"
    if run.task == "score":
        keys += [run.score.continuation_field, run.score.choices_field, run.score.answer_field]
        fields += ", `score.continuation_field`, `score.choices_field`, `score.answer_field`"
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        fail(("job",), f"the key `{twice}` of a row cannot be two things: see {fields}")
    if job.text_field in RESERVED_KEYS:
        fail(
            ("job", "text_field"),
            f"`job.text_field` is {show(job.text_field)}, which is a key of output rows; choose a name that is none of "
            f"{', '.join(RESERVED_KEYS)}",
        )
    _check_prompts(job, fail)
    if not _is_json(run.hf_overrides):
        fail(("hf_overrides",), "`hf_overrides` holds a key or a value that JSON has not; put quotes around it")


def _is_json(value: Any) -> bool:
    try:
        msgspec.json.encode(value, order="deterministic")
    except TypeError:  # YAML has keys of every type, and dates
        return False
    return True


def _check_prompts(job: JobConfig, fail: Callable[[tuple[str, ...], str], None]) -> None:
    """Check what the job says about prompts. `fail` raises for the key at a path."""
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
            fail(("job", "messages_template"), f"{name} and `job.messages_template` are given; give one of them")
        if job.system is not None and job.chat == "never":
            fail(
                ("job", "system"),
                f"{name} makes prompts that are no conversations where `job.chat` is never, so `job.system` would have "
                "no effect; leave one of the two out",
            )
    problem = reserved_variable(job.chat_template_kwargs)
    if not _is_json(job.chat_template_kwargs):
        problem = "holds a key that is no text; put quotes around it"
    if problem is not None:
        fail(("job", "chat_template_kwargs"), f"`job.chat_template_kwargs`: {problem}")


__all__ = [
    "FLAG_KEYS",
    "SECTIONS",
    "AttentionBackends",
    "EngineConfig",
    "JobConfig",
    "MessageTemplate",
    "RunConfig",
    "SamplingParams",
    "all_keys",
    "default_of",
    "load_run_config",
    "load_sourced_config",
]
