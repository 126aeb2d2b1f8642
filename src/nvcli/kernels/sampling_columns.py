"""The sampling parameters of all slots, as columns of a table, and the form of what ranks exchange."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAX_CANDIDATES = 64
"""A `top_k` up to this number is *small*: the few tokens that it can keep are found without a search over the row."""
LIST_WIDTH = 2 * MAX_CANDIDATES + 1
"""Words of a list, int32: the bits of MAX_CANDIDATES logits (float32, -inf where there is no token), their tokens, and
the number of tokens that share the last logit. The last entry is the k-th largest logit and the best token that has it;
the entries before are the tokens above it, in any order."""

INFINITE_SCORE = 0x7F800000
"""The score +inf in the numbers that ranks exchange (`packed_argmax`), above those of all tokens: a rank has a NaN or
+inf among its logits."""


class SamplingColumns(NamedTuple):
    """The sampling parameters of each slot. Every tensor is [S], contiguous. Kernels take them as they are."""

    temperature: Tensor
    """float32; 0 is greedy, and then no limit matters."""
    top_k: Tensor
    """int32; 0: off."""
    top_p: Tensor
    """float32; 1 and above: off."""
    min_p: Tensor
    """float32; 0: off."""
    seed: Tensor
    """int64, key of the random numbers (see `nvcli.kernels.philox`)."""
    row: Tensor
    """int64, the row of the job: a counter word of the random numbers."""
    sample: Tensor
    """int64, the sample of the row: a counter word of the random numbers."""

    def at(self, slots: Tensor) -> SamplingColumns:
        """Select the parameters of some slots: `slots` [N] int64 → tensors [N]."""
        return SamplingColumns(*(column[slots] for column in self))

    @property
    def is_limited(self) -> Tensor:
        """[S] bool, the slots whose tokens are drawn from a part of the vocabulary."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @property
    def has_small_top_k(self) -> Tensor:
        """[S] bool, the slots that draw their tokens from at most `MAX_CANDIDATES`, ties aside."""
        return (self.temperature > 0) & (self.top_k > 0) & (self.top_k <= MAX_CANDIDATES)


class LogitChanges(NamedTuple):
    """The changes that the requests of all slots make to their logits (see `nvcli.kernels.logit_changes`). Every tensor
    is contiguous; a slot has E entries."""

    presence_penalty: Tensor
    """[S] float32; 0: none."""
    frequency_penalty: Tensor
    """[S] float32; 0: none."""
    repetition_penalty: Tensor
    """[S] float32; 1: none."""
    prompt_len: Tensor
    """[S] int32, tokens of the prompt."""
    min_len: Tensor
    """[S] int32, positions below it forbid stop ids."""
    num_forbidden: Tensor
    """[S] int32, the first entries, which forbid tokens and do nothing else (`forbid_tokens`). 0: there are none, or
    only `change_logits` may apply them."""
    entry_ids: Tensor
    """[S, E] int32, tokens; the same token may stand there twice."""
    entry_values: Tensor
    """[S, E] float32, what is added to the logits of those tokens: -inf for stop ids, 0 after the last; +inf has
    another meaning, and is not added."""
