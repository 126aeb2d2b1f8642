"""StepMasks and MaskOutcome: the masks of one step's constrained rows, as the host leaves them to the device, and what
became of them there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nvcli.runner.mask_memory import MaskMemory
from nvcli.runner.sampler import TokenMasks

_MOST_NANOSECONDS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step's constrained rows, as they were when the host went on."""

    masks: TokenMasks
    """The masks, anything for rows whose masks are late."""
    wanted: np.ndarray
    """[n] int32, of late masks the low half of what `MaskTable.numbers` will be once they are there; 0 for the others.
    On a rank that does not follow grammars none is late."""
    has_failed: np.ndarray
    """[n] bool, the rows whose grammars cannot be followed any further. What is chosen for them is no token."""
    memory: MaskMemory | None
    """Where late masks come from; None if none can be late."""
    late_seconds: float = 0.0
    """How long the device may wait for each late mask."""

    @property
    def any_late(self) -> bool:
        return bool(self.wanted.any())

    def by_row(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Return, for the sampled rows of a step, of which `rows` [n] are constrained, the mask of each and what it
        waits for: [2, num_rows] int32, as `take_late_masks` takes them."""
        found = np.zeros((2, num_rows), dtype=np.int32)
        found[0] = self.masks.by_row(rows, num_rows)
        found[1, rows] = self.wanted
        return found

    @property
    def patience(self) -> np.ndarray:
        """[2] int32, as `take_late_masks` takes it."""
        nanoseconds = min(_MOST_NANOSECONDS, int(1e9 * self.late_seconds))
        return np.array([np.count_nonzero(self.wanted), nanoseconds], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class MaskOutcome:
    """What became of the masks of a step's constrained rows; complete when the step's tokens are on the host."""

    rows: np.ndarray
    """[n], the constrained ones of the sampled rows."""
    has_failed: np.ndarray
    """[n] bool, those that had failed when the host went on."""
    found: Tensor | None
    """[2, num_sampled] int32 on the host, what `take_late_masks` returned; None: no mask was late."""

    @property
    def is_held(self) -> np.ndarray:
        """[n] bool, the rows that the step left out."""
        return self._found(0)

    @property
    def held_rows(self) -> np.ndarray:
        """The sampled rows that the step left out, each of one token."""
        held: np.ndarray = self.rows[self.is_held]
        return held

    @property
    def failed_rows(self) -> np.ndarray:
        """The sampled rows whose grammars cannot be followed any further."""
        failed: np.ndarray = self.rows[self.has_failed | self._found(1)]
        return failed

    def _found(self, kind: int) -> np.ndarray:
        if self.found is None:
            return np.zeros(len(self.rows), dtype=np.bool_)
        found: np.ndarray = self.found[kind].numpy()[self.rows] > 0
        return found
