"""RankWeights: the weights of one rank's model, where they came from, and the memory region that they lie in.

They are loaded at the start of a rank. Later they may be replaced by those of another checkpoint, given up and put
back, always in place: nothing that holds an address of theirs has to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.host_memory import available_ram
from nvcli.errors import CapacityError, ConfigError, LoadError
from nvcli.models.adapters.adapter import Adapter, read_adapter
from nvcli.models.causal_lm import CausalLM
from nvcli.models.checkpoint_check import describe_unused
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.draft_heads.own_files import with_draft_head
from nvcli.models.loader import (
    CheckpointWeights,
    begin_reading,
    find_weights,
    init_random_weights,
    materialize,
    read_kv_scales,
    set_kv_scales,
)
from nvcli.models.registry import stored_dtype
from nvcli.models.same_architecture import check_same_architecture
from nvcli.models.stored_tensors import with_stored_tensors
from nvcli.worker.runner.device import wait_for_gpu
from nvcli.worker.runner.memory_regions import HostCopy, MemoryRegion, make_region


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Weights of a checkpoint that fit the model."""

    checkpoint: CheckpointWeights
    kv_scales: dict[int, list[float]]
    """Empty unless the KV cache is in FP8."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint's config as a run computes the model, and the run's adapters."""

    config: ModelConfig
    adapter: Adapter | None
    """The adapter of all rows, which is merged into the weights as they are read."""
    row_adapters: dict[int, Adapter]
    """The adapters that rows choose from, by number."""

    @property
    def has_own_head(self) -> bool:
        """Whether a head that the checkpoint ties to the embedding is a weight of its own."""
        return any(adapter.unties_head for adapter in self.row_adapters.values())


def read_files(config: EngineConfig, path: Path) -> ModelFiles:
    """Read the config of a checkpoint folder, and the adapters of a run. Raises LoadError and ConfigError."""
    model = load_model_config(
        path,
        expert_parallel=config.enable_expert_parallel,
        attention_dp=config.enable_attention_dp,
        overrides=config.hf_overrides,
    )
    model = with_stored_tensors(model.for_length(config.max_model_len), path)
    model = model.headless() if config.embedding_size else model
    model = model.with_tower() if config.max_image_tokens else model
    adapter = None
    if config.lora_path is not None:
        adapter = read_adapter(config.lora_path, model)
        model = adapter.adapt(model)
    row_adapters = {number: read_adapter(each, model) for number, each in enumerate(config.lora_paths, 1)}
    for number in config.merged_adapters:
        model = row_adapters[number].adapt(model)
    if config.draft_head is not None:
        model = with_draft_head(model, config.draft_head, is_random=config.load_format == "dummy")
    return ModelFiles(model.with_quantization(config.quantization), adapter, row_adapters)


class RankWeights:
    """The weights of a rank."""

    def __init__(self, model: CausalLM, config: EngineConfig, device: torch.device, files: ModelFiles) -> None:
        """`files`: the checkpoint files that the model was built from."""
        self._model = model
        self._config = config
        self._device = device
        self._files = files
        self._is_dummy = config.load_format == "dummy"
        self._path = config.model_path
        """The checkpoint folder of the weights."""
        self.region: MemoryRegion | None = None
        """The memory of the weights; None if the GPU's driver knows no regions."""
        self._kept: HostCopy | MemoryRegion | None = None
        """The weights while the rank is asleep and keeps them: a copy, or on a CPU the region itself."""
        self._kv_scales: dict[int, list[float]] = {}
        self._finish: Callable[[], str | None] = wait_for_gpu

    # ------------------------------------------------------------------ start

    def begin(self, say: Callable[[str], object]) -> None:
        """Allocate the model and begin to load its weights on threads. `say` takes notes for the user.

        Raises LoadError, before any memory is allocated, if the checkpoint does not fit the model.
        """
        if self._is_dummy:
            materialize(self._model, self._device, self._make_memory)
            init_random_weights(self._model, self._device)
            return
        found = self._found(self._path, self._files)
        for note in found.checkpoint.notes:
            say(note)
        materialize(self._model, self._device, self._make_memory)
        self._finish = begin_reading(self._model, found.checkpoint)
        self._kv_scales = found.kv_scales
        if found.checkpoint.unused:
            say(describe_unused(found.checkpoint.unused))
        if (kv_note := set_kv_scales(self._model, found.kv_scales, self._device)) is not None:
            say(kv_note)

    def finish(self, say: Callable[[str], object]) -> None:
        """Wait until the weights are loaded. `say` takes notes for the user. Raises LoadError for files that cannot be
        read."""
        if (note := self._finish()) is not None:
            say(note)

    def _make_memory(self, num_bytes: int) -> Tensor:
        self.region = make_region(num_bytes, self._device)
        if self.region is not None:
            return self.region.memory
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def _found(self, path: Path, files: ModelFiles) -> FoundWeights:
        has_scales = self._config.kv_dtype == "fp8"
        checkpoint = find_weights(
            self._model,
            path,
            config=files.config,
            adapter=files.adapter,
            has_own_head=files.has_own_head,
            reads_kv_scales=has_scales,
        )
        return FoundWeights(checkpoint, read_kv_scales(self._model, checkpoint) if has_scales else {})

    # ------------------------------------------------------------------ later

    def find(self, path: Path) -> FoundWeights:
        """Find weights that can take the place of the model's in a checkpoint folder; nothing is changed yet.

        Raises LoadError if there are none, and ConfigError as `check_replaceable` does.
        """
        self.check_replaceable()
        try:
            files = read_files(self._config, path)
        except ConfigError as error:  # what it says to set cannot be set any more
            raise LoadError(f"{path}: {error}; or make a new LLM for this checkpoint") from None
        check_same_architecture(
            self._model.config,
            files.config,
            path,
            tensors=self._model.tensors,
            dtype=stored_dtype(getattr(torch, self._config.dtype)),
            stage=self._model.stage,
        )
        found = self._found(path, files)
        if found.kv_scales.keys() != self._kv_scales.keys():
            raise LoadError(
                f"{path}: it has scales for an FP8 KV cache in {len(found.kv_scales):,} layers, and the loaded model "
                f"in {len(self._kv_scales):,}; set kv_cache_dtype: auto, or make a new LLM for this checkpoint"
            )
        return found

    def find_again(self) -> FoundWeights | None:
        """Find the weights that were dropped; None if there is nothing to read: they are kept, or made up.

        Raises LoadError and ConfigError if the folder no longer has them.
        """
        return None if self._is_dummy or self._kept is not None else self.find(self._path)

    def check_replaceable(self) -> None:
        """Raise ConfigError if the weights cannot be read again, because adapters take turns being merged into them."""
        if self._config.merged_adapters:
            raise ConfigError(
                "LoRA adapters are merged into the weights in turn (`lora.mode`), so these cannot be read anew: set "
                "lora.mode to batched, use sleep(level=1), or make a new LLM"
            )

    def keep_copy(self) -> None:
        """Copy the weights to host memory; on a CPU they stay where they are. Raises CapacityError."""
        assert self.region is not None
        if self._device.type == "cpu":
            self._kept = self.region
            return
        num_bytes, free = self.region.num_bytes, available_ram()
        if num_bytes > free:
            raise CapacityError(
                f"a copy of a rank's weights takes {format_bytes(num_bytes)} of host memory, but only "
                f"{format_bytes(free)} are free; use sleep(level=2), which drops them and reads them again"
            )
        self._kept = HostCopy(self.region.memory)

    def forget_copy(self) -> None:
        """Forget what `keep_copy` kept. Idempotent."""
        self._kept = None

    def release(self) -> None:
        """Give the memory of the weights back, unless they are kept in it. Idempotent."""
        assert self.region is not None
        if self._kept is not self.region:
            self.region.release()

    def fill(self, found: FoundWeights | None) -> None:
        """Fill the memory: with weights that were found, the kept copy, or made-up weights. Raises LoadError for files
        that cannot be read; what the weights are is then undefined."""
        if found is not None:
            begin_reading(self._model, found.checkpoint)()
            set_kv_scales(self._model, found.kv_scales, self._device)
            self._path, self._is_dummy = found.checkpoint.path, False
        elif self._kept is not None:
            assert self.region is not None
            if isinstance(self._kept, HostCopy):
                self._kept.copy_to(self.region.memory)
        elif self._is_dummy:
            init_random_weights(self._model, self._device)
        self._kept = None
