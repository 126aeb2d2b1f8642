"""KeptInputs: what the rows with drafts of a step leave behind in layers with recurrent states, from which the states
move on once it is known how many of their tokens count.

Keys and values of drafts that turn out wrong are never read, but a state takes in every token. A step with drafts
therefore computes its results from the states and leaves these as they are. It keeps what each token adds to a state,
which is small (36 KiB, where a state of Qwen3.5-35B-A3B has 2 MiB), and `advance_states.py` adds what the tokens that
count have kept. So a step with drafts reads states twice and writes them once; one without reads and writes them once.
Storing a state behind each token, and choosing one of them, would write one for each draft, and take as much memory for
each draft as the states of all requests of the step.

What is added is computed token by token, as a step without drafts does it.

Shapes: L layers of one KV group, T tokens, Hv value heads, Dk and Dv their sizes, C channels of the convolution, which
begin with the queries and the keys of all key heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeptInputs(NamedTuple):
    """The kept numbers of one layer, or with a leading dimension L those of all layers of a KV group."""

    inputs: Tensor
    """[T, C], the inputs of the convolution."""
    keys: Tensor
    """[T, key heads × Dk], the keys as the convolution gives them."""
    written: Tensor
    """[T, Hv, Dv] float32, what is added to a state where the key reads it."""
    decay: Tensor
    """[T, Hv] float32, the logarithms of the decays."""

    @classmethod
    def empty(
        cls,
        num_layers: int,
        num_tokens: int,
        recurrent_shape: tuple[int, int, int],
        num_channels: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KeptInputs:
        """Allocate those of `num_layers` layers, whose states have the shape (Hv, Dk, Dv)."""
        num_heads, _, value_dim = recurrent_shape
        key_size = (num_channels - num_heads * value_dim) // 2

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_layers, num_tokens, *shape, dtype=dtype, device=device)

        return cls(
            inputs=make(num_channels, dtype=dtype),
            keys=make(key_size, dtype=dtype),
            written=make(num_heads, value_dim),
            decay=make(num_heads),
        )

    def layer(self, index: int) -> KeptInputs:
        """Return the numbers of one layer of the group."""
        return KeptInputs(*(tensor[index] for tensor in self))
