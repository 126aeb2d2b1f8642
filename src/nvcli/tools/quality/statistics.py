"""TokenSums: sums over two models' predictions of the same tokens. Torch-free."""

from __future__ import annotations

import math

import msgspec


class TokenSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over positions, in float64. A and B are the two models; logarithms are natural."""

    positions: int = 0
    """Positions at which both models gave a distribution of the next token."""
    kl_sum: float = 0.0
    """The sum of the Kullback-Leibler divergences of B's distribution from A's."""
    kl_max: float = 0.0
    same_best: int = 0
    """Positions at which both models' likeliest token is the same."""
    targets: int = 0
    """Positions that are followed by a token of the text."""
    nll_a: float = 0.0
    """The sum of A's negative log-probabilities of those tokens."""
    nll_b: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(
            positions=self.positions + other.positions,
            kl_sum=self.kl_sum + other.kl_sum,
            kl_max=max(self.kl_max, other.kl_max),
            same_best=self.same_best + other.same_best,
            targets=self.targets + other.targets,
            nll_a=self.nll_a + other.nll_a,
            nll_b=self.nll_b + other.nll_b,
        )

    @property
    def mean_kl(self) -> float:
        return self.kl_sum / max(1, self.positions)

    @property
    def top1_agreement(self) -> float:
        return self.same_best / max(1, self.positions)

    @property
    def perplexities(self) -> tuple[float, float]:
        """The perplexity of the text for A and for B."""
        return _perplexity(self.nll_a, self.targets), _perplexity(self.nll_b, self.targets)


def _perplexity(nll: float, targets: int) -> float:
    mean = nll / max(1, targets)
    return math.exp(mean) if mean < 700 else math.inf
