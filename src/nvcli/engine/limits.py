"""SchedulerLimits: the scheduler's part of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvcli.core.messages import KVGroup
from nvcli.engine.chunk_groups import PrefixCosts
from nvcli.engine.draft_policy import NO_DRAFTS, Drafting
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.kernels.whole_numbers import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The limits of a step. Sizes are in tokens and requests, as in `EngineConfig`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    whole_tokens: int = 0
    """`EngineConfig.whole_tokens`"""
    keeps_prompts_whole: bool = False
    """`EngineConfig.keeps_prompts_whole`"""
    num_micro_batches: int = 1
    """Steps in flight at a time; with more than one, a decoding request is in only one of them (pipeline stages)."""
    drafting: Drafting = NO_DRAFTS
    kv_groups: tuple[KVGroup, ...] = (KVGroup(),)
    num_homes: int = 1
    """The number of homes of requests (`engine.homes`). With several, `max_num_batched_tokens` is at least
    `max_num_seqs`, no decode row has drafts, and rows share nothing that steps would read or copy once."""
    segment_costs: SegmentCosts | None = None
    """Costs that decide which shared blocks of decoding requests are read once for all of them; None if the ranks
    cannot do that."""
    prefix_costs: PrefixCosts | None = None
    """Costs that decide which prefill chunks attend together to their shared prefix; None if the ranks process each
    chunk on its own."""
    max_loaded_adapters: int = 0
    """Maximum LoRA adapters on the ranks at a time; 0 only if no request has one."""
    merged_adapters: tuple[int, ...] = ()
    """LoRA adapters that may be merged into the weights in turn, for all requests that run."""
    merged_only_adapters: tuple[int, ...] = ()
    """Merged adapters that have no other way."""
    plans_admission: bool = False
    """Whether requests are admitted by forecasts of their answers' lengths (`Admission`), rather than while blocks are
    free."""

    @property
    def takes_all_runs(self) -> bool:
        """Whether forced tokens are taken in runs even if that makes the job no faster."""
        return self.drafting.policy == "always"

    @property
    def tokens_per_home(self) -> int:
        """The most tokens that a step computes for the requests of one home."""
        return ceil_div(self.max_num_batched_tokens, self.num_homes)

    def max_decode_rows(self, num_running: int) -> int:
        """Return the most decode rows of a step: a micro-batch's share of the running requests, within its tokens."""
        return min(ceil_div(num_running, self.num_micro_batches), self.max_num_batched_tokens)

    def lowered(self) -> SchedulerLimits | None:
        """Return limits with half the `max_num_batched_tokens`; once that is no more than `max_num_seqs`, half of both.

        Returns None if a step is down to one request and one token, or to an image or prompt that must not be cut.
        """
        num_tokens, num_seqs = self.max_num_batched_tokens, self.max_num_seqs
        least = max(1, self.whole_tokens)
        if num_tokens > max(num_seqs, least):
            num_tokens = max(num_tokens // 2, num_seqs, least)
        elif num_seqs > 1:
            num_seqs //= 2
            num_tokens = max(least, min(num_tokens, num_seqs))
        else:
            return None
        return replace(self, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
