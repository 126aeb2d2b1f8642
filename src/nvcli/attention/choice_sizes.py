"""ChoiceSizes: the memory of attention beside backends (`chosen_keys.py`), for its plan and for the run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nvcli.attention.spec import AttentionSpec, Geometry
from nvcli.kernels.pool_settings import Pools

_SCORE_BYTES = 256 << 20
"""The most bytes of the scores by which keys are chosen, but for one token's."""
_OTHER_NUMBERS, _LIST_NUMBERS = 3, 12
"""How many keys a token sees and its slot, and its part of a list of work of Hopper GPUs, in numbers of 32 bits."""
_LIST_BYTES = 35_000_000
"""The results of parts of rows that each list has room for on an H200, in bytes."""


class ChoiceKind(NamedTuple):
    """The settings that layers with one list of work have in common, whatever numbers they keep beside their keys."""

    geometry: Geometry
    top_k: int | None
    rate: int
    window: int
    """0: there is none."""

    @classmethod
    def of(cls, spec: AttentionSpec) -> ChoiceKind:
        """Return the kind of a layer that is attended beside backends."""
        keys = spec.attended
        return cls(keys.key_geometry, keys.top_k, keys.rate, 0 if spec.compressed is None else spec.window or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSizes:
    """The sizes of what is kept of each token of a step."""

    most_scores: int
    """The most keys, or pools of them, that it chooses from; 0: none are chosen."""
    top_k: int
    """The most keys of a choice."""
    num_choices: int
    """The choices of a layer: one, or one of each KV head."""
    pools: Pools
    rates: tuple[int, ...]
    """The numbers of tokens that have one key together."""
    num_lists: int
    """The lists of work of Hopper GPUs."""

    @classmethod
    def of(cls, specs: Iterable[AttentionSpec], max_model_len: int) -> ChoiceSizes:
        """Return the sizes for layers with these specs, at least one of which is attended beside backends. All that
        choose do so by the same pools."""
        beside = [spec for spec in specs if spec.is_beside_backends]
        attended = [spec.attended for spec in beside]
        choosing = [spec for spec in attended if spec.top_k is not None]
        scored = (max_model_len // (spec.rate * spec.index_pools.size) for spec in choosing)
        return cls(
            most_scores=max((max(1, number) for number in scored), default=0),
            top_k=max((spec.top_k or 0 for spec in choosing), default=0),
            num_choices=max(spec.num_choices for spec in attended),
            pools=max((spec.index_pools for spec in attended), key=lambda pools: pools.size),
            rates=tuple(dict.fromkeys(spec.rate for spec in attended if spec.rate > 1)),
            num_lists=len({ChoiceKind.of(spec) for spec in beside if not spec.row_heads}),
        )

    @property
    def most_pools(self) -> int:
        """The most pools of a choice; 0: keys are chosen one by one."""
        return self.pools.most_chosen(self.top_k) if self.pools.size > 1 else 0

    def score_rows(self, num_tokens: int) -> int:
        """Return for how many of a step's tokens there is room for all scores."""
        return min(num_tokens, max(1, _SCORE_BYTES // (4 * self.most_scores))) if self.most_scores else 0

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes for steps of up to this many tokens."""
        of_pools = self.most_pools + 1 if self.most_pools else 0  # and how many keys are chosen
        of_lists = len(self.rates) + self.num_lists * _LIST_NUMBERS
        of_token = self.num_choices * self.top_k + of_pools + of_lists + _OTHER_NUMBERS
        numbers = self.score_rows(num_tokens) * self.most_scores + num_tokens * of_token
        return 4 * numbers + self.num_lists * _LIST_BYTES
