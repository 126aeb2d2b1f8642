"""Sampler: logits → token ids, each row by its slot's parameters. A rank has the logits of its shard of the vocabulary.

A row's outcome depends on its logits, its parameters and its counter alone, never on the rest of the batch. A batch
takes one of two paths:

- `sample` launches kernels only, so that a CUDA graph can hold it. With one rank it handles forbidden tokens,
  temperatures, top-k, top-p and min-p; with several ranks forbidden tokens and temperatures: each rank finds the best
  token of its shard, and the best of those is exactly the token that would be sampled from the whole vocabulary.
- `sample_fully` handles everything that rows can ask for, after the forward pass. With several ranks, a small top-k
  does not need the whole logits: the ranks exchange the tokens that it may keep, and all choose alike. Neither do
  masks, which rank 0 sends to all ranks, each of which applies them to its shard. For the rest (other limits,
  penalties, biases, log-probabilities) rank 0 gathers the logits, chooses, and tells the others.

Neither waits for the device. What only a few rows ask for is done for those rows only. A row whose logits are not
finite gets `NOT_FINITE` instead of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.kernels.candidates import choose_candidates, shard_candidates
from nvcli.kernels.logit_changes import change_logits, forbid_tokens
from nvcli.kernels.sampling import packed_argmax, sample, unpack_argmax
from nvcli.kernels.token_mask import apply_token_mask
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.logprobs import PendingLogprobs, find_logprobs
from nvcli.worker.runner.sampling_table import SamplingFlag
from nvcli.worker.runner.slot_table import SlotTable

_CHANGES = SamplingFlag.PENALTIES | SamplingFlag.ADJUSTED | SamplingFlag.ALLOWED | SamplingFlag.BAD_WORDS
_CHANGES_AND_LOGPROBS = _CHANGES | SamplingFlag.LOGPROBS


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Demands of a batch's rows on the sampler, as the host knows them."""

    slots: np.ndarray
    """[N], the slot of each row."""
    flags: np.ndarray
    """[N] uint8, the `SamplingFlag`s of each row."""
    is_simple: bool
    """Whether `Sampler.sample` does everything that the rows ask for."""
    is_simple_behind_masks: bool
    """Whether it does everything except applying masks."""
    needs_whole_logits: bool
    """Whether rows need the logits of the whole vocabulary in one place."""

    def rows(self, flag: SamplingFlag, *, without: SamplingFlag | None = None) -> np.ndarray:
        """Return the numbers of the rows that have a flag, but not the flag `without`, ascending."""
        has_flag = self.flags & flag
        return np.flatnonzero(has_flag if without is None else (has_flag > 0) & (self.flags & without == 0))


NO_MASK = -1
"""Stands for the mask of a row that has none."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a batch's constrained rows (`kernels.token_mask`)."""

    masks: Tensor
    """[R, W] int32 on the device."""
    places: np.ndarray
    """[n], the index in `masks` of each constrained row."""

    @classmethod
    def allowing_all(cls, num_rows: int, num_words: int, device: torch.device) -> TokenMasks:
        """Make masks that allow every token, for this many rows."""
        masks = torch.full((num_rows, num_words), -1, dtype=torch.int32, device=device)
        return cls(masks, np.arange(num_rows))

    def by_row(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Map a batch's rows, of which `rows` [n] are constrained, to their masks: [num_rows] int32."""
        mask_of = np.full(num_rows, NO_MASK, dtype=np.int32)
        mask_of[rows] = self.places
        return mask_of


class Sampler:
    """Samples for the slots of one table. `sample` and `sample_fully` are collective: every rank calls them alike."""

    def __init__(
        self, slots: SlotTable, group: TensorParallelGroup, vocab_size: int, *, batch_invariant: bool = False
    ) -> None:
        """`batch_invariant`: a row's log-probabilities have the same bits in every batch, as its token does."""
        self._batch_invariant = batch_invariant
        self._slots, self._table = slots, slots.sampling
        self.group = group
        """The ranks that choose together."""
        self._vocab_size = vocab_size
        with_ranks = SamplingFlag.OTHER_LIMITS if group.size > 1 else SamplingFlag(0)
        self._whole_logits_flags = int(_CHANGES_AND_LOGPROBS | with_ranks)
        with_ranks |= SamplingFlag.SMALL_TOP_K if group.size > 1 else SamplingFlag(0)
        self._full_flags = int(_CHANGES_AND_LOGPROBS | SamplingFlag.CONSTRAINED | with_ranks)

    def needs(self, slots: np.ndarray, is_first: np.ndarray | None = None) -> SamplingNeeds:
        """Look up what the rows of these slots [N] ask for. `is_first`: [N] bool, the first of each request's rows, the
        only ones that have masks; None: each has one row."""
        flags = self._table.flags_host[slots]
        if is_first is not None:
            flags[~is_first] &= ~np.uint8(SamplingFlag.CONSTRAINED)
        asked = int(np.bitwise_or.reduce(flags))
        return SamplingNeeds(
            slots=slots,
            flags=flags,
            is_simple=not asked & self._full_flags,
            is_simple_behind_masks=not asked & self._full_flags & ~SamplingFlag.CONSTRAINED,
            needs_whole_logits=bool(asked & self._whole_logits_flags),
        )

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, *, few_allowed: bool = False) -> Tensor:
        """Choose ids [N] int32 for a simple batch, the same on every rank; rows of other batches get some token, or
        `NOT_FINITE`.

        logits: [N, M] as `CausalLM.compute_logits` gives them, in which tokens are forbidden; slots: [N] int64;
        positions: [N] of the tokens to be sampled; few_allowed: whether most tokens of many rows are forbidden. On a
        GPU it launches kernels only, for a CUDA graph.
        """
        columns = self._table.columns
        shard, start = self._shard(logits, slots, positions)
        if self.group.size == 1:
            return sample(shard, columns, slots, positions, few_allowed=few_allowed)
        return unpack_argmax(self.group.max(packed_argmax(shard, columns, slots, positions, start=start)))

    def sample_masked(self, logits: Tensor, slots: Tensor, positions: Tensor, masks: Tensor, mask_of: Tensor) -> Tensor:
        """Do what `sample` does, with masks as `apply_token_mask` takes them; with one rank only. `logits` are
        overwritten."""
        assert self.group.size == 1
        apply_token_mask(logits[:, : self._vocab_size], masks, mask_of)
        return self.sample(logits, slots, positions, few_allowed=True)

    def sample_fully(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        needs: SamplingNeeds,
        masks: TokenMasks | None = None,
    ) -> tuple[Tensor, PendingLogprobs | None]:
        """Choose ids [N] int32 for any batch, the same on every rank. Rank 0 also returns the log-probabilities that
        rows asked for, or None if none did.

        The first three arguments are those of `sample`; `logits` may be overwritten. needs: the rows' demands; masks:
        those of the constrained rows, or None. Rank 0 has the masks; the other ranks pass any of the same size.
        """
        if not needs.needs_whole_logits:
            if masks is not None:
                shard, start = self.group.without_padding(logits, self._vocab_size)
                if self.group.size > 1:
                    masks = self._share_masks(masks)
                self._mask(shard, needs, masks, start)
            return self._sample_limited(logits, slots, positions, needs, few_allowed=masks is not None), None
        whole = self.group.gather(logits)
        if whole is None:
            return self._share(slots, None), None
        whole = whole[:, : self._vocab_size]
        penalised, asking = needs.rows(SamplingFlag.PENALTIES), needs.rows(SamplingFlag.LOGPROBS)
        changing = np.concatenate([penalised, needs.rows(SamplingFlag.ADJUSTED, without=SamplingFlag.PENALTIES)])
        at_changing, at_asking = self._slots.upload(changing, asking)
        at_asking = at_asking.long()
        unmodified = whole[at_asking] if len(asking) else None
        if masks is not None:
            self._mask(whole, needs, masks, 0)
        logits = whole
        if len(needs.rows(_CHANGES)):
            logits = whole.float()
        if len(changing):
            num_entries = int(self._table.num_adjusted_host[needs.slots[changing]].max())
            change_logits(
                logits,
                self._table.changes,
                at_changing,
                slots,
                positions,
                self._slots.state.token_ids,
                num_penalised=len(penalised),
                num_entries=num_entries,
            )
        forbid_tokens(logits, self._table.changes, slots, positions)
        self._restrict(logits, slots, positions, needs)
        chosen = sample(logits, self._table.columns, slots, positions, few_allowed=masks is not None)
        ids = self._share(slots, chosen)
        if unmodified is None:
            return ids, None
        counts = self._table.num_logprobs_host[needs.slots[asking]]
        return ids, find_logprobs(unmodified, ids, asking, at_asking, counts, batch_invariant=self._batch_invariant)

    def _sample_limited(
        self, logits: Tensor, slots: Tensor, positions: Tensor, needs: SamplingNeeds, *, few_allowed: bool
    ) -> Tensor:
        """Choose by temperature and limits. With several ranks the only limits here are those of rows with a small
        top-k."""
        if self.group.size == 1 or needs.is_simple:
            return self.sample(logits, slots, positions, few_allowed=few_allowed)
        columns = self._table.columns
        shard, start = self._shard(logits, slots, positions)
        packed, lists = shard_candidates(shard, columns, slots, positions, start=start)
        return choose_candidates(self.group.max(packed), self.group.all_gather(lists), columns, slots, positions)

    def _shard(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, int]:
        """Return this rank's logits of tokens [N, M], some of which are forbidden now, and the first token's id."""
        shard, start = self.group.without_padding(logits, self._vocab_size)
        forbid_tokens(shard, self._table.changes, slots, positions, start=start)
        return shard, start

    def _mask(self, logits: Tensor, needs: SamplingNeeds, masks: TokenMasks, start: int) -> None:
        """Apply masks to the constrained rows of logits [N, M] of the tokens from `start` on, in place."""
        (mask_of,) = self._slots.upload(masks.by_row(needs.rows(SamplingFlag.CONSTRAINED), len(needs.flags)))
        apply_token_mask(logits, masks.masks, mask_of, start=start)

    def _share_masks(self, masks: TokenMasks) -> TokenMasks:
        """Send rank 0's masks to every rank."""
        (places,) = self._slots.upload(masks.places)
        shared = self.group.broadcast(masks.masks.index_select(0, places))
        return TokenMasks(shared, np.arange(len(shared)))

    def _share(self, slots: Tensor, ids: Tensor | None) -> Tensor:
        """Send rank 0's ids to every rank. The other ranks pass None."""
        if ids is None:
            ids = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
        return self.group.broadcast(ids)

    def _restrict(self, logits: Tensor, slots: Tensor, positions: Tensor, needs: SamplingNeeds) -> None:
        """Forbid tokens that complete a bad word, and all except allowed tokens, in logits [N, V] float32, in place."""
        table = self._table
        with_words, restricted = needs.rows(SamplingFlag.BAD_WORDS), needs.rows(SamplingFlag.ALLOWED)
        if not len(with_words) and not len(restricted):
            return
        at_words, at = (rows.long() for rows in self._slots.upload(with_words, restricted))
        if len(with_words):
            tokens, prompt_lens = self._slots.state.token_ids, table.changes.prompt_len
            table.bad_words.forbid(logits, at_words, slots, positions, tokens=tokens, prompt_lens=prompt_lens)
        if len(restricted):
            width = int(table.num_adjusted_host[needs.slots[restricted]].max())
            ids = table.changes.entry_ids[slots[at], :width].long()
            is_allowed = (table.changes.entry_values[slots[at], :width] == torch.inf).int()
            counts = torch.zeros(len(at), logits.shape[1], dtype=torch.int32, device=logits.device)
            counts.scatter_add_(1, ids, is_allowed)  # an id may have another entry there too
            logits[at] = logits[at].masked_fill(counts == 0, -torch.inf)
