"""DecoderNames: maps transformers' names of modules and parameters to the decoder's tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nvcli.models.checkpoint_layout import CheckpointLayout, fused_parts, stacked_parts
from nvcli.models.tensor_info import RowPlaces, fused_places
from nvcli.models.tensor_spec import EXPERTS

_TEXT = ("model.layers.", "model.embed_tokens", "model.embed_positions", "model.norm.", "lm_head.")
"""Prefixes of the decoder's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor of the decoder that holds all or some of the features of a tensor in transformers."""

    name: str
    features: RowPlaces


class DecoderNames:
    """The names of a decoder's tensors.

    Adapters name modules as in the class that they were trained with: the whole model with an LM head, its text part,
    or a model without a head.
    """

    def __init__(self, layout: CheckpointLayout, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        """The decoder's tensor names, with each expert's tensors listed separately → shapes."""
        self.layout = layout
        self._layouts = (layout, replace(layout, is_part=False))

    def find(self, name: str) -> str | None:
        """Return the decoder's name of a tensor in transformers, which may be a fused tensor or a stack of all experts;
        None if the decoder has no such tensor."""
        return next((one for one in self._candidates(name) if self._is_known(one)), None)

    def places(self, name: str) -> list[Place]:
        """Return the tensors that make up a tensor that `find` found and that is not a stack."""
        if name in self.shapes:
            return [Place(name=name, features=RowPlaces())]
        parts = [part for part in fused_parts(name) if part in self.shapes]
        return self._places(parts, self.layout.num_groups(name, self.shapes[parts[0]][0]))

    def places_in_stack(self, name: str) -> list[list[Place]]:
        """Return the tensors of each expert in a stack that `find` found."""
        experts = stacked_parts(name, self.shapes)
        num_groups = self.shapes[experts[0][0]][0] if self.layout.interleaves_experts and experts else 1
        return [self._places(parts, num_groups) for parts in experts]

    def num_routed(self, name: str) -> int:
        """Return the number of experts that the router of a stack chooses from; some may have no weights. 0: the stack
        has no router."""
        return self.shapes.get(f"{name.partition(f'.{EXPERTS}.')[0]}.gate.weight", (0,))[0]

    def is_left(self, name: str) -> bool:
        """Whether a tensor that was not found belongs to another part of the model, which stays on disk."""
        return self.layout.decoder_name(name) is None and not any(
            candidate.startswith(_TEXT) for candidate in self._candidates(name)
        )

    def _is_known(self, name: str) -> bool:
        parts = name, *fused_parts(name)
        return any(part in self.shapes for part in parts) or bool(stacked_parts(name, self.shapes))

    def _places(self, parts: list[str], num_groups: int) -> list[Place]:
        """Return the parts of a fused tensor. `num_groups`: see `fused_places`."""
        places = fused_places([self.shapes[part][0] for part in parts], num_groups)
        return [Place(name=part, features=features) for part, features in zip(parts, places, strict=True)]

    def _candidates(self, name: str) -> list[str]:
        """Return the names that the decoder may have for a tensor of transformers, the likeliest first."""
        names = [layout.decoder_name(one) for layout in self._layouts for one in (name, f"model.{name}")]
        return list(dict.fromkeys(name for name in names if name is not None))
