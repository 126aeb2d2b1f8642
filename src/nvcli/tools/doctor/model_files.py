"""Checks a model's folder: config, weights and tokenizer files. Reports every fault, not only the first.

This is torch-free and reads no weights; checks that load the tokenizer or build the model are in `model_probe`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvcli.core.byte_sizes import counted
from nvcli.core.config import RunConfig
from nvcli.core.lora_config import AdapterChoice, adapter_choice
from nvcli.core.system.hub_access import DownloadSize
from nvcli.core.validation import show
from nvcli.errors import ConfigError, LoadError
from nvcli.job.run.adapter_modes import find_modes
from nvcli.job.run.engine_settings import load_checkpoint
from nvcli.job.run.row_settings import describe_not_applied
from nvcli.models.adapters.adapter import Adapter, read_adapter
from nvcli.models.adapters.find import find_local_adapter
from nvcli.models.checkpoint import find_model, parts_in_cache, read_file, read_tensors, weight_files
from nvcli.models.config import ModelConfig
from nvcli.models.draft_heads.own_files import MTP, find_head, with_draft_head
from nvcli.models.generation_config import GENERATION_CONFIG_FILE
from nvcli.models.hub import check_reachable, download_size, split_quantisation
from nvcli.models.tensor_info import TensorInfo
from nvcli.tools.doctor.findings import Finding, format_gib, note, ok, problem, warning

_MOST_FILES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The contents of the files; None for each file that could not be read."""

    path: Path | None
    config: ModelConfig | None
    tensors: Mapping[str, TensorInfo] | None
    findings: list[Finding]
    adapter: Adapter | None = None
    """The LoRA adapter for all rows, where one was asked for that fits the model."""
    row_adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """The LoRA adapters that rows choose, by name: those that fit the model."""


def check_model_files(run: RunConfig) -> ModelFiles:
    """Check the model of a run, its adapters and the head that drafts for it. Nothing is downloaded."""
    path, finding = _find(run.model, run.revision)
    if path is None:
        return ModelFiles(path=None, config=None, tensors=None, findings=[finding])
    config, config_findings = _read_config(run, path)
    tensors, weight_findings = _read_weights(path)
    findings = [finding, *config_findings, *weight_findings]
    adapter: Adapter | None = None
    row_adapters: dict[str, Adapter] = {}
    choice, draft_head = adapter_choice(run.lora), run.speculation.draft_head
    if config is not None:
        read = [(name, *_read_adapter(one, config, choice, is_of_rows=True)) for name, one in choice.named.items()]
        findings += [adapter_finding for *_, adapter_finding in read]
        row_adapters = {name: each for name, each, _ in read if each is not None}
        if choice.merged is not None:
            adapter, adapter_finding = _read_adapter(choice.merged, config, choice)
            findings.append(adapter_finding)
        for each in (*row_adapters.values(), adapter):
            config = config if each is None else each.adapt(config)
    if draft_head is not None and config is not None:
        config, head_finding = _read_head(draft_head, config)
        findings.append(head_finding)
    return ModelFiles(
        path=path, config=config, tensors=tensors, findings=findings, adapter=adapter, row_adapters=row_adapters
    )


def _find(name: str, revision: str | None) -> tuple[Path | None, Finding]:
    advice = "name a folder with config.json, weights and tokenizer: --model FOLDER"
    try:
        path = find_model(name, revision=revision)
    except (ConfigError, LoadError) as error:
        return None, problem("folder", str(error), advice)
    if path is not None:
        return path, ok("folder", str(path))
    try:
        gguf = check_reachable(name, revision)  # tells at once whether a download can work
        return None, _not_here(name, revision, download_size(name, revision), gguf)
    except LoadError as error:
        there = parts_in_cache(name, revision=revision)
        found = f"{error}; {there}" if there else str(error)
        return None, problem("folder", found, f"download it where the hub can be reached, or {advice}")


def _not_here(name: str, revision: str | None, size: DownloadSize, gguf: Sequence[str]) -> Finding:
    """Report what the first run would download. `gguf`: the model's files, if it is read from GGUF."""
    try:
        size.check_room(f"model {name}", LoadError)
    except LoadError as error:
        return problem("folder", str(error), "make room for the download before the first run")
    found = (
        f"{name} is not in the local Hugging Face cache; the first run would download {format_gib(size.num_bytes)} "
        f"({format_gib(size.free_bytes)} are free)"
    )
    command = shlex.join(["hf", "download", split_quantisation(name)[0], *gguf])
    command += f" --revision {revision}" if revision else ""
    return warning("folder", found, f"{command}, then run this again: its files were not checked")


def _read_config(run: RunConfig, path: Path) -> tuple[ModelConfig | None, list[Finding]]:
    try:
        config = load_checkpoint(run, path)
    except ConfigError as error:
        return None, [problem("config", str(error), "change that setting, or choose another checkpoint")]
    except LoadError as error:
        return None, [problem("config", str(error), "choose a checkpoint that nvcli serves, or correct the file")]
    quantised = "" if config.quantisation is None else f" quantised with {config.quantisation.name},"
    found = (
        f"{config.architecture}, {config.num_layers} layers, {config.dtype},{quantised} "
        f"up to {config.max_position_embeddings:,} tokens"
    )
    return config, [ok("config", found), _generation_config(run, path, config)]


def _read_adapter(
    name: str, config: ModelConfig, choice: AdapterChoice, *, is_of_rows: bool = False
) -> tuple[Adapter | None, Finding]:
    """`is_of_rows`: it is one of several that rows choose."""
    how = ""
    try:
        path = find_local_adapter(name)
        if path is None:
            found = f"{name} is not in the local Hugging Face cache; the first run would download it"
            return None, warning("adapter", found, "hf download it, then run this again: its files were not checked")
        adapter = read_adapter(path, config)
        if is_of_rows:
            how = ", merged in its turn" if find_modes(choice, [adapter], config).merged else ""
    except (ConfigError, LoadError) as error:
        return None, problem("adapter", str(error), "choose an adapter of this model: --lora FOLDER")
    changed = len({*adapter.changes, *adapter.replaced})
    return adapter, ok("adapter", f"{path}, changes {counted(changed, 'tensor')}{how}")


def _read_head(name: str, config: ModelConfig) -> tuple[ModelConfig, Finding]:
    """Return the model with the head that drafts for it, or without one that cannot."""
    try:
        found = find_head(name)
        model = with_draft_head(config, found)
    except (ConfigError, LoadError) as error:
        return config, problem("draft head", str(error), "choose a head of this model, or --speculate auto")
    head = model.draft_head
    assert head is not None
    where = "of the checkpoint" if found == MTP else found
    states = (
        f"the states before layers {', '.join(map(str, head.aux_layers))}" if head.aux_layers else "the last states"
    )
    return model, ok("draft head", f"{where}, reads {states}")


def _generation_config(run: RunConfig, path: Path, config: ModelConfig) -> Finding:
    name = "generation config"
    if not config.eos_token_ids:
        return warning(
            name,
            "no end-of-sequence id, here or in config.json",
            f"add eos_token_id to {GENERATION_CONFIG_FILE}; without one, answers end at max_tokens alone",
        )
    ends = f"ends at {', '.join(map(str, config.eos_token_ids))}"
    if not (path / GENERATION_CONFIG_FILE).exists():
        return note(name, f"no {GENERATION_CONFIG_FILE}; {ends}, by config.json")
    defaults = ", ".join(f"{key} {show(value)}" for key, value in config.generation_defaults.items())
    found = f"{ends}; {defaults or 'no sampling defaults'}"
    told = describe_not_applied(run, config)
    return note(name, f"{found}; {told}") if told else ok(name, found)


def _read_weights(path: Path) -> tuple[Mapping[str, TensorInfo] | None, list[Finding]]:
    """Check each file's header against its size, then all files against the index."""
    advice = f"copy the named files again, for example with: hf download OWNER/NAME --local-dir {path}"
    try:
        files = weight_files(path)
    except LoadError as error:
        return None, [problem("weights", str(error), advice)]
    broken = []
    for file in files:
        try:
            read_file(file)
        except LoadError as error:
            broken.append(problem("weights", str(error), advice))
    if len(broken) > _MOST_FILES_SHOWN:
        more = len(broken) - _MOST_FILES_SHOWN
        broken = [*broken[:_MOST_FILES_SHOWN], problem("weights", f"and {more} files more like these", advice)]
    if broken:
        return None, broken
    try:
        tensors = read_tensors(path)
    except LoadError as error:
        return None, [problem("weights", str(error), advice)]
    size = format_gib(sum(info.num_bytes for info in tensors.values()))
    return tensors, [ok("weights", f"{counted(len(files), 'file')}, {len(tensors)} tensors, {size}, all complete")]
