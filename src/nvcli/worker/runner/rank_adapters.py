"""RankAdapters: the LoRA adapters that rows choose from, on one rank.

Those with places on the device are multiplied beside the weights of each step, and those that take turns are merged
into the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nvcli.core.engine_config import EngineConfig
from nvcli.models.adapter_bank import LoadedAdapters
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.causal_lm import CausalLM
from nvcli.models.merged_weights import MergedWeights
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.memory import host_bytes_for_adapters, places_that_fit
from nvcli.worker.runner.slot_table import SlotTable
from nvcli.worker.runner.step_adapters import StepAdapters

_READING_THREADS = 4
"""Threads that read adapters ahead of use."""


class RankAdapters:
    """The adapters of one rank, and the memory that they take there."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        adapters: Mapping[int, Adapter],
        slots: SlotTable,
        device: torch.device,
        world: TensorParallelGroup,
        dtype: torch.dtype,
    ) -> None:
        """Make places for the adapters that need them, as many on all ranks of the `world`. `adapters` are by number,
        counted from 1."""
        self._config, self._model, self._adapters = config, model, adapters
        self.num_places = 0
        self.num_bytes = 0
        """Bytes on the device, including the base of weights into which adapters are merged."""
        self.of_steps: StepAdapters | None = None
        """Applies adapters to steps; None: no request has one."""
        if not config.lora_paths:
            return
        loaded = None
        if config.placed_adapters:
            placed = {number: adapters[number] for number in config.placed_adapters}
            loaded = LoadedAdapters(model, placed, dtype, max_host_bytes=host_bytes_for_adapters(config))
            self.num_places = world.min(places_that_fit(config, loaded.num_bytes, device))
            loaded.make_places(self.num_places)
            loaded.on_host.read_ahead(_READING_THREADS)
            self.num_bytes = loaded.num_bytes(self.num_places)
        self.of_steps = StepAdapters(
            loaded,
            slots,
            max_tokens=config.max_padded_tokens,
            batch_invariant=config.batch_invariant,
        )

    def keep_base_weights(self) -> str:
        """Keep the base of the weights into which adapters are merged in turn, once these are loaded. Return a note
        for the user."""
        config = self._config
        assert self.of_steps is not None
        merged = MergedWeights(
            self._model,
            None if config.load_format == "dummy" else config.model_path,
            {number: self._adapters[number] for number in config.merged_adapters},
            max_host_bytes=host_bytes_for_adapters(config),
            num_ranks=config.num_ranks_here,
        )
        self.of_steps.merged = merged
        if merged.place == "device":
            self.num_bytes += merged.num_bytes
        return merged.note
