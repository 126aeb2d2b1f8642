"""Stage: which part of a model one stage of a pipeline holds. Torch-free: memory plans count with it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, which share a model's layers in order; the whole model unless said otherwise.

    The first one has the embedding too, the last one the final norm and the LM head.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Numbers of its layers. Where they do not divide, earlier stages have one more: the last has the LM head."""
        size, extra = divmod(num_layers, self.count)
        first = self.index * size + min(self.index, extra)
        return range(first, first + size + (self.index < extra))


WHOLE = Stage()
"""The only one."""
