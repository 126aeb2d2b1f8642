"""AlibiConfig: attention whose scores fall with the distance of tokens (ALiBi, https://arxiv.org/abs/2108.12409).
`models/alibi.py` computes it.

The softmax of a query does not change where all its scores are moved alike, so that a score may rise with the position
of its key instead. Keys hold their position, and queries the slope of their head, as further numbers: any kernel then
computes the rise in its product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from typing import ClassVar

from nvcli.attention.spec import AttentionSpec
from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mixer import Ranks

ALIBI_DIM = 16
"""The further numbers of queries and keys, of which four are used: kernels take no fewer after a head's own."""
ALIBI_UNIT = 256
"""Positions are kept as two numbers below it, which bfloat16 holds exactly."""
ALIBI_POSITIONS = ALIBI_UNIT**2
"""The positions that these can tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiConfig(AttentionConfig):
    """Attention of one layer, whose scores fall with the distance of tokens."""

    module: ClassVar[str] = "nvcli.models.alibi:AlibiAttention"
    slopes: tuple[float, ...]
    """The differences of each head's scores from one key to the one before it."""
    needs_exact_keys: ClassVar[bool] = True

    def _plain_spec(self, tensor_parallel_size: int, kv_group: int = 0) -> AttentionSpec:
        plain = AttentionConfig._plain_spec(self, tensor_parallel_size, kv_group)
        return replace(plain, head_dim=self.head_dim + ALIBI_DIM, value_dim=self.head_dim)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements, and those of the longer queries and keys beside them."""
        heads = self.num_heads // ranks.size + 2 * self.kv_heads_per_rank(ranks.size)
        longer = heads * (self.head_dim + ALIBI_DIM)
        return AttentionConfig.activation_elements(self, hidden_size, ranks, quantization) + longer


def with_alibi(plain: AttentionConfig, most: float = 8.0, factor: float = 1.0) -> AlibiConfig:
    """Return attention whose scores fall with distance. `most`: as in `alibi_slopes`; `factor`: that of all slopes."""
    values = {field.name: getattr(plain, field.name) for field in fields(plain)}
    slopes = tuple(factor * slope for slope in alibi_slopes(plain.num_heads, most))
    return AlibiConfig(**values, slopes=slopes)


def alibi_slopes(num_heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Return the slopes of heads: powers of 2 with equally spaced exponents down to -`most`. If the number of heads is
    no power of 2, those of the next lower one come first, and then every second one of the next higher one."""
    lower = 2 ** math.floor(math.log2(num_heads))
    exponents = chain(
        (number / lower for number in range(1, lower + 1)), ((number - 0.5) / lower for number in range(1, lower + 1))
    )
    return tuple(2.0 ** (-most * exponent) for exponent in islice(exponents, num_heads))
