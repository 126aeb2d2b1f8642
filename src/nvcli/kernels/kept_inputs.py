"""KeptInputs: what a step keeps from the rows with drafts in layers with recurrent states, so that the states can be
advanced once it is known how many tokens count.

The keys and values of wrong drafts are simply never read, but a recurrent state absorbs every token. A step with drafts
therefore computes its results from the states and leaves them unchanged. It keeps what each token would add to a state,
which is small (36 KiB, where a state of Qwen3.5-35B-A3B has 2 MiB), and `advance_states.py` then adds the tokens that
count. So a step with drafts reads states twice and writes them once; one without reads and writes them once. Storing
the state after each token and choosing one of them would write one state per draft, and would take as much memory for
each draft as the states of all requests of the step.

The additions are made token by token, as in a step without drafts.

Shapes: L layers of one KV group, T tokens, Hv value heads, Dk and Dv the sizes of key and value heads, C channels of
the convolution, of which the first are the queries and keys of all key heads.
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
    """[T, key heads × Dk], the keys as the convolution gives them."""
    written: Tensor
    """[T, Hv, Dv] float32, what each token adds to the state along its key: w in S ← S + k wᵀ."""
    decay: Tensor
    """[T, Hv] float32, the logarithms of the decays."""

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
    ) -> KeptInputs:
        """Allocate the kept data of `num_layers` layers, whose states have the shape (Hv, Dk, Dv); `key_size` is the
        size of a token's keys."""
        num_heads, _, value_dim = recurrent_shape

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_layers, num_tokens, *shape, dtype=dtype, device=device)

        return cls(
            inputs=make(num_channels, dtype=dtype),
            keys=make(key_size, dtype=dtype),
            written=make(num_heads, value_dim),
            decay=make(num_heads),
        )

    def layer(self, index: int) -> KeptInputs:
        """Return the kept data of one layer of the group."""
        return KeptInputs(*(tensor[index] for tensor in self))
