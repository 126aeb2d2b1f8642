"""Stage: the part of a model that one stage of a pipeline holds. It is torch-free, because memory plans use it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` pipeline stages, which share a model's layers in order. The default is the whole model.

    The first stage also has the embedding, and the last one the final norm and the LM head.
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
        """Layer numbers of this stage, in a model of `num_layers` layers.

        If the layers do not divide evenly, earlier stages get one more, because the last one has the LM head.
        """
        size, extra = divmod(num_layers, self.count)
        first = self.index * size + min(self.index, extra)
        return range(first, first + size + (self.index < extra))


WHOLE = Stage()
"""The only stage of a model that is not divided."""
