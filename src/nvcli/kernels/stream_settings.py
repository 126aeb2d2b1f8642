"""Settings of residual streams that run side by side, without their weights (`kernels/streams.py`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How the shares of N streams are made."""

    count: int
    """The number of streams, N."""
    norm_eps: float
    """The epsilon of the norm of all streams of a token."""
    eps: float
    """A number that is added to each stream's share of a block's input, and to the sums by which shares of streams in
    each other are divided."""
    factor: float
    """Each stream takes up to this share of a block's result."""
    result_eps: float = 0.0
    """A number that is added to these shares."""
    iterations: int = 0
    """How often rows and columns of the shares of streams in each other are divided by their sums (Sinkhorn); 0: each
    stream goes on by itself."""

    ends_with_mean: bool = False
    """Whether the mean of the streams follows the last layer, and not a sum with shares."""
    gate_rank: int = 0
    """With it a block reads the mean of the streams, each normed with weights of its own and multiplied number by
    number by gates, which matrices of this rank make (`streams.gate_streams`), and shares have no weights in float32;
    0: it reads a sum with shares."""

    @property
    def num_kernels(self) -> int:
        """The kernels by which a block reads and changes them, besides the one of a norm."""
        return 4 if self.gate_rank else 1

    @property
    def num_kept(self) -> int:
        """The shares of a token that are needed after a block: of its result in each stream, and of the streams in each
        other."""
        return self.count * (1 + self.count) if self.iterations else self.count

    @property
    def num_shares(self) -> int:
        """All shares of a token: those of each stream in a block's input first."""
        return self.count + self.num_kept

    @property
    def num_scales(self) -> int:
        """The kinds of shares."""
        return 3 if self.iterations else 2
