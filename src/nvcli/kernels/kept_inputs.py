"""KeptInputs: what a step keeps from the rows with drafts in layers with recurrent states, so that the states can be
advanced once it is known how many tokens count.

The keys and values of wrong drafts are simply never read, but a recurrent state absorbs every token. A step with drafts
therefore computes its results from the states and does not store those after its own tokens. It keeps what each token
would add to a state, which is small (36 KiB, where a state of Qwen3.5-35B-A3B has 2 MiB). The next step with drafts of
the same request adds the tokens that count to the state that it reads, stores it, and goes on from there. So a step
with drafts reads and writes states once, as one without does; the states of rows that it does not have are brought up
to date before it (`advance_states.py`). Storing the state after each token and choosing one of them would write one
state per draft, and would take as much memory for each draft as the states of all requests of the step.

The additions are made token by token, as in a step without drafts. A step reads what the last one kept while it keeps
its own, so there is room for two, which take turns. The states of convolutions are small, and advanced at once.

Shapes: L layers of one KV group, T tokens of a step, Hv value heads, Dk and Dv the sizes of key and value heads, C
channels of the convolution, of which the first are the queries and keys of all key heads, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeptInputs(NamedTuple):
    """The kept data of one layer, or with a leading dimension L of all layers of a KV group."""

    inputs: Tensor
    """[T, C], the inputs of the convolution."""
    keys: Tensor
    """[2 T, key heads × Dk], the keys as the convolution gives them."""
    written: Tensor
    """[2 T, Hv, Dv] float32, what each token adds to the state along its key: w in S ← S + k wᵀ."""
    decay: Tensor
    """[2 T, Hv, 1] float32, the logarithms of the decays; [2 T, Hv, Dk] where each row of a state has its own; where
    there are `rates`, [2 T, Hv, Dv] step sizes."""
    rates: Tensor
    """[Dk, Dv] float32, the logarithms of the decays of a state's numbers in a step of size 1, which each step with
    drafts writes anew; [0, Dv] where a token's decays say all."""

    @classmethod
    def empty(
        cls,
        num_layers: int,
        num_tokens: int,
        recurrent_shape: tuple[int, int, int],
        num_channels: int,
        key_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_decays: int = 1,
        has_rates: bool = False,
    ) -> KeptInputs:
        """Allocate the kept data of `num_layers` layers, whose states have the shape (Hv, Dk, Dv); `key_size` is the
        size of a token's keys, `num_decays` the number of a head's decays: 1, Dk or, if it `has_rates`, Dv."""
        num_heads, key_dim, value_dim = recurrent_shape

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_layers, *shape, dtype=dtype, device=device)

        return cls(
            inputs=make(num_tokens, num_channels, dtype=dtype),
            keys=make(2 * num_tokens, key_size, dtype=dtype),
            written=make(2 * num_tokens, num_heads, value_dim),
            decay=make(2 * num_tokens, num_heads, num_decays),
            rates=make(key_dim if has_rates else 0, value_dim),
        )

    def layer(self, index: int) -> KeptInputs:
        """Return the kept data of one layer of the group."""
        return KeptInputs(*(tensor[index] for tensor in self))


class PendingTokens(NamedTuple):
    """The tokens of the last step with drafts that count, which the states of a KV group do not have yet. R rows of the
    step."""

    earlier: Tensor
    """[R] int32, for each row of the present step its request's row in the last one; -1: nothing is pending."""
    starts: Tensor
    """[R] int32, where the kept data of each row of the last step begin."""
    counts: Tensor
    """[R] int32, how many of each row's tokens count."""
    sources: Tensor
    """[R] int64, the block of each row's state, without them; 0: it is zeros."""
    targets: Tensor
    """[R] int64, the block that the state with them is stored in; 0: the row has none."""
    turn: Tensor
    """[1] int32, which half of the kept data the present step writes: 0 or 1."""

    @classmethod
    def empty(cls, num_rows: int, turn: Tensor) -> PendingTokens:
        """Allocate room for steps of up to `num_rows` rows. KV groups have one `turn` in common."""

        def make(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=turn.device)

        return cls(
            earlier=make(torch.int32) - 1,
            starts=make(torch.int32),
            counts=make(torch.int32),
            sources=make(torch.int64),
            targets=make(torch.int64),
            turn=turn,
        )
