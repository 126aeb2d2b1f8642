"""Sums over two models' predictions of the same tokens, and the figures derived from them. Torch-free."""

from __future__ import annotations

import math

import msgspec


class TokenSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over positions, in float64. A and B are the two models; logarithms are natural."""

    positions: int = 0
    """Positions at which both models gave a distribution of the next token."""
    kl_sum: float = 0.0
    """The sum of the Kullback-Leibler divergences of B's distributions from A's."""
    kl_max: float = 0.0
    same_best: int = 0
    """Positions at which both models' likeliest token is the same."""
    targets: int = 0
    """Positions followed by a token of the text."""
    nll_a: float = 0.0
    """The sum of A's negative log-probabilities of those tokens."""
    nll_b: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        return TokenSums(**{**sums, "kl_max": max(self.kl_max, other.kl_max)})


class Predictions(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of both models' predictions at some positions."""

    tokens: int
    """Positions at which both models predicted the next token."""
    mean_kl: float
    """The mean Kullback-Leibler divergence of B's predictions from A's, in nats."""
    max_kl: float
    top1_agreement: float
    """The share of positions at which the likeliest next token is the same."""
    perplexity_a: float
    perplexity_b: float

    @classmethod
    def of(cls, sums: TokenSums) -> Predictions:
        """Derive the figures from sums over the positions."""
        return cls(
            tokens=sums.positions,
            mean_kl=sums.kl_sum / max(1, sums.positions),
            max_kl=sums.kl_max,
            top1_agreement=sums.same_best / max(1, sums.positions),
            perplexity_a=_perplexity(sums.nll_a, sums.targets),
            perplexity_b=_perplexity(sums.nll_b, sums.targets),
        )


def _perplexity(nll: float, targets: int) -> float:
    mean = nll / max(1, targets)
    return math.exp(mean) if mean < 700 else math.inf
