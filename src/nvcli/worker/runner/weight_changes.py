"""WeightChanges: what a rank does when its weights are replaced, or when it is to sleep and to wake up again.

All ranks of a replica do the same together: before anything is changed, each says whether it can, and if one cannot,
none does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from nvcli.core.byte_sizes import format_bytes
from nvcli.core.weight_changes import LoadWeights, Sleep, WeightsChange
from nvcli.errors import CapacityError, ConfigError, LoadError, NvcliError, WorkerError
from nvcli.worker.distributed.process_group import World
from nvcli.worker.runner.device import wait_for_gpu
from nvcli.worker.runner.memory import out_of_memory_line, reserve_contiguous
from nvcli.worker.runner.memory_regions import MemoryRegion
from nvcli.worker.runner.rank_weights import FoundWeights, RankWeights

T = TypeVar("T")


class WeightChanges:
    """Changes the weights of a rank that serves. No step may run meanwhile."""

    def __init__(
        self,
        weights: RankWeights,
        kv_region: MemoryRegion | None,
        world: World,
        device: torch.device,
        *,
        activation_bytes: int,
    ) -> None:
        """`kv_region`: the memory of the KV cache. `activation_bytes`: what the largest step needs besides."""
        self._weights = weights
        self._kv_region = kv_region
        self._world = world
        self._device = device
        self._activation_bytes = activation_bytes
        self._is_asleep = False
        self._num_fills = 0

    def apply(self, change: WeightsChange) -> None:
        """Carry out a change, the same on all ranks. If one rank cannot, nothing is changed on any, and each rank that
        knows why raises a LoadError, ConfigError or CapacityError.

        Raises WorkerError if files that were found cannot be read; the weights are then undefined.
        """
        if self._device.type == "cuda":
            wait_for_gpu()
        if isinstance(change, LoadWeights):
            if (found := self._together(lambda: self._weights.find(Path(change.path)))) is not None:
                self._fill(found)
        elif isinstance(change, Sleep):
            self._sleep(keeps_weights=change.level == 1)
        elif self._is_asleep and (again := self._together(lambda: (self._weights.find_again(),))) is not None:
            self._fill(again[0])

    def _sleep(self, *, keeps_weights: bool) -> None:
        """Give the memory back. A rank that sleeps already may only give up its copy of the weights."""
        if self._is_asleep:
            if not keeps_weights:
                self._weights.check_replaceable()
                self._weights.forget_copy()
                self._weights.release()
        elif self._together(lambda: self._prepare_sleep(keeps_weights)) is None:
            self._weights.forget_copy()
        else:
            self._give_back()
            self._is_asleep = True

    def _give_back(self) -> None:
        self._weights.release()
        assert self._kv_region is not None
        self._kv_region.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare_sleep(self, keeps_weights: bool) -> bool:
        if self._weights.region is None or self._kv_region is None:
            raise ConfigError(
                "LLM.sleep: the driver of this GPU has no virtual memory management, so its memory cannot come back at "
                "the same addresses; use llm.close(), then make a new LLM"
            )
        if keeps_weights:
            self._weights.keep_copy()
        else:
            self._weights.check_replaceable()
        return True

    def _fill(self, found: FoundWeights | None) -> None:
        """Wake up if asleep, and fill the memory of the weights."""
        if self._together(self._take_memory) is None:
            if self._is_asleep:
                self._give_back()
            return
        try:
            self._weights.fill(found)
        except LoadError as error:
            raise WorkerError(f"the weights are only partly replaced, because a file broke off: {error}") from error
        if self._device.type == "cuda":
            wait_for_gpu()
            if self._is_asleep:
                torch.cuda.empty_cache()  # what reading took in passing is not free for others
                reserve_contiguous(self._activation_bytes, self._device)
        self._is_asleep = False
        self._num_fills += 1
        self._world.meet(f"weights were changed {self._num_fills} times")  # files may be slow for some ranks

    def _take_memory(self) -> bool:
        """Put memory behind both regions. Raises CapacityError."""
        regions = [region for region in (self._weights.region, self._kv_region) if region is not None]
        try:
            for region in regions:
                region.restore()
        except RuntimeError as error:
            if out_of_memory_line(error) is None:
                raise
            self._give_back()
            free = torch.cuda.mem_get_info(self._device)[0]
            raise CapacityError(
                f"waking up takes {format_bytes(sum(region.num_bytes for region in regions))} of GPU "
                f"{self._device.index}, and only {format_bytes(free)} are free: let other programs give up "
                "memory, then call llm.wake() again"
            ) from None
        return True

    def _together(self, prepare: Callable[[], T]) -> T | None:
        """Prepare a change on every rank. Returns None if another rank cannot; raises the error if this one cannot."""
        prepared, error = None, None
        try:
            prepared = prepare()
        except NvcliError as raised:
            error = raised
        all_can = self._world.group.min(int(error is None))
        if error is not None:
            raise error
        return prepared if all_can else None
