"""The whole examination, section by section: cheap checks first, while slow probes run in the background."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec

from nvcli.attention.kv_layout import KVDtype
from nvcli.attention.spec import AttentionSpec, attention_kinds
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import LoraConfig, adapter_choice
from nvcli.core.system.host_memory import available_ram
from nvcli.core.system.nvidia_smi import SmiReport, ask_nvidia_smi, visible_gpus
from nvcli.errors import CapacityError, ConfigError
from nvcli.job.planning.layout import Layout, layout_as_given, resolve_layout
from nvcli.job.run.device import device_of
from nvcli.job.run.engine_settings import attention_choice, engines_of_adapters
from nvcli.job.run.row_settings import sampling_defaults
from nvcli.sizing.kv_cache import DEFAULT_BLOCK_SIZE
from nvcli.tools.doctor.all_reduce import check_all_reduce
from nvcli.tools.doctor.attention_probe import AttentionTask
from nvcli.tools.doctor.device_probe import DeviceReport, GpuReport
from nvcli.tools.doctor.findings import Finding, Section, note, ok, problem
from nvcli.tools.doctor.gpus import check_fp8, check_gpus, free_bytes
from nvcli.tools.doctor.machine import check_fit, check_folders, check_machine
from nvcli.tools.doctor.model_files import ModelFiles, check_model_files
from nvcli.tools.doctor.model_probe import ModelTask
from nvcli.tools.doctor.probe import Probe, ProbeFailed
from nvcli.tools.doctor.software import check_software

_EXAMPLE = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
"""The attention heads to check backends with when no model is given: those of Qwen3-8B."""


def examine(run: RunConfig, *, output: Path, timeout: float) -> Iterator[Section]:
    """Yield the findings, section by section.

    `run.model` may be empty. `output` is the folder for answers, and `timeout` is how long a probe may
    take, in seconds. Never raises for faults of the machine or the model. No process outlives it.
    """
    device = device_of(run)
    with ExitStack() as stack:

        def start(target: str, task: msgspec.Struct | None, name: str) -> Probe:
            return stack.enter_context(Probe(f"nvcli.tools.doctor.{target}:main", task, name=name, timeout=timeout))

        smi = ask_nvidia_smi()  # before our own probes take GPU memory
        files = check_model_files(run) if run.model.strip() else None
        config, layout, config_findings = _layout(run, files, device, smi)
        num_ranks = layout.num_ranks
        device_probe = start("device_probe", None, "device probe")
        yield Section(title="Software", findings=check_software(device))
        yield Section(title="Machine", findings=check_machine(device, num_ranks=num_ranks))
        yield Section(title="Folders", findings=check_folders(device, output))

        attention_probe = start("attention_probe", _attention_task(run, files, config, device), "attention probe")
        model_probe = None
        if files is not None and files.path is not None:
            model_probe = start("model_probe", _model_task(files.path, files, run), "model probe")

        report = _result(device_probe)
        is_explicit = run.device != "auto"
        findings = check_gpus(
            report, smi, device=device, num_gpus=num_ranks, is_explicit=is_explicit, chosen=layout.gpus
        )
        if config is not None and config.quantization == "fp8" and device == "cuda" and not isinstance(report, str):
            findings.append(check_fp8(report, chosen=layout.gpus))
        yield Section(title="GPUs", findings=findings)
        has_gpus = isinstance(report, DeviceReport) and len(report.gpus) >= num_ranks
        can_run = device == "cpu" or has_gpus
        findings = _findings(attention_probe, "attention") if can_run else [_not_checked("attention")]
        yield Section(title="Attention backends", findings=findings)
        findings = [_not_checked("all-reduce")]
        if can_run:  # each replica has a process group
            size, copies = layout.pipeline_parallel_size * layout.tensor_parallel_size, layout.data_parallel_size
            findings = check_all_reduce(device, size=size, num_replicas=copies, timeout=timeout, gpus=layout.gpus)
        yield Section(title="Collectives", findings=findings)
        if files is not None:
            findings = [*files.findings, *config_findings]
            if model_probe is not None:
                findings += _findings(model_probe, "tokenizer")
            if config is not None and files.config is not None and files.tensors is not None:
                gpus = [] if isinstance(report, str) else _free_gpus(report, smi, layout)
                model = files.config.with_quantization(config.quantization)
                copies, ram = layout.data_parallel_size, available_ram()
                findings.append(check_fit(config, model, num_replicas=copies, gpus=gpus, ram=ram))
            yield Section(title=f"Model {run.model}", findings=findings)


def _not_checked(name: str) -> Finding:
    return note(name, "not checked: the GPUs that the run needs are missing")


def _free_gpus(report: DeviceReport, smi: SmiReport, layout: Layout) -> list[GpuReport]:
    """Return the GPUs that the run would use, with their free memory before our own probes took some."""
    return [
        msgspec.structs.replace(gpu, free_bytes=free_bytes(gpu, smi))
        for gpu in report.gpus
        if not layout.gpus or gpu.index in layout.gpus
    ]


def _layout(
    run: RunConfig, files: ModelFiles | None, device: Literal["cpu", "cuda"], smi: SmiReport
) -> tuple[EngineConfig | None, Layout, list[Finding]]:
    """Return the layout and configuration that the run and the model lead to; no EngineConfig if these cannot be
    told."""
    given = layout_as_given(run)
    if files is None or files.path is None or files.config is None:
        return None, given, []
    run = msgspec.structs.replace(run, device=device, lora=_usable_lora(run, files))
    try:
        found = visible_gpus(smi)
        gpus = () if isinstance(found, str) else found
        engines = engines_of_adapters(run, files.path, files.config, files.adapter, files.row_adapters, gpus=gpus)
        config = engines.config
        layout = resolve_layout(run, config, engines.model, report=smi)
        sampling_defaults(run, files.config)
    except ConfigError as error:
        return None, given, [problem("configuration", str(error), "change that key, in the file or with --set")]
    except CapacityError as error:
        return None, given, [problem("memory", str(error), "see `nvcli profile-memory`")]
    config = layout.apply(config)
    chosen = [note("layout", layout.why)] if layout.why else []
    parts = [config.device, config.weights_type, f"--tp {layout.tensor_parallel_size}"]
    parts += ["--ep"] if config.enable_expert_parallel else []
    parts += ["--attention-dp"] if config.enable_attention_dp else []
    parts += [f"--pp {layout.pipeline_parallel_size}"] if layout.pipeline_parallel_size > 1 else []
    parts += [f"--dp {layout.data_parallel_size}", f"max_model_len {config.max_model_len:,}"]
    return config, layout, [*chosen, ok("configuration", ", ".join(parts))]


def _usable_lora(run: RunConfig, files: ModelFiles) -> str | LoraConfig | None:
    """Return the key `lora` with the adapters that fit; whatever is wrong with others is a finding already."""
    choice = adapter_choice(run.lora)
    if files.adapter is not None:
        return choice.merged
    found = {name: choice.named[name] for name in files.row_adapters}
    return LoraConfig(adapters=found, max_loaded=choice.max_loaded, mode=choice.mode) if found else None


def _attention_task(
    run: RunConfig, files: ModelFiles | None, config: EngineConfig | None, device: Literal["cpu", "cuda"]
) -> AttentionTask:
    """Describe the attention that a rank of the run would need."""
    model = files.config if files is not None else None
    specs: tuple[AttentionSpec, ...] = (_EXAMPLE,)
    kv_dtype: KVDtype | None = None
    dtype = run.dtype if run.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    block_size = run.block_size or DEFAULT_BLOCK_SIZE
    if model is not None and config is not None:
        size = model.attention_ranks(config.tensor_parallel_size)
        specs = attention_kinds(mixer.kv_spec(size) for layer in model.decoder.layer_kinds for mixer in layer.mixers)
        dtype, kv_dtype, block_size = config.dtype, config.kv_dtype, config.block_size
    return AttentionTask(
        device=device,
        dtype=dtype,
        block_size=block_size,
        kv_dtype=kv_dtype,
        max_num_seqs=run.max_num_seqs,
        choice=attention_choice(run.attention_backend),
        specs=specs,
    )


def _model_task(path: Path, files: ModelFiles, run: RunConfig) -> ModelTask:
    return ModelTask(
        path=str(path),
        hf_overrides=run.hf_overrides,
        vocab_size=files.config.vocab_size if files.config else None,
        has_weights=files.config is not None and files.tensors is not None,
    )


def _result(probe: Probe) -> DeviceReport | str:
    """Return the probe's report, or the reason why there is none."""
    try:
        report: DeviceReport = probe.result()
    except ProbeFailed as failed:
        return str(failed)
    return report


def _findings(probe: Probe, name: str) -> list[Finding]:
    """Return a probe's findings; a failure of the probe is one of them."""
    try:
        findings: list[Finding] = probe.result()
    except ProbeFailed as failed:
        return [problem(name, str(failed), "find the cause: a run would do next what this check did")]
    return findings
