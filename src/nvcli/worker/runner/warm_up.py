"""Steps that exercise a rank before it serves, on the null block: the largest batches, and others that load or compile
other kernels: a middling number of tokens, and decode rows that share segments of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nvcli.core.engine_config import UNEVEN_ROWS, EngineConfig
from nvcli.core.messages import NO_ADAPTER, NewSlot, PromptQuery, SlotSampling, StepInput, pack
from nvcli.errors import LimitsTooHigh
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.worker.runner.device import wait_for_gpu
from nvcli.worker.runner.rank_attention import RankAttention

_SAMPLING = SlotSampling(top_k=2, top_p=0.9)
_MIDDLING_TOKENS = 512
"""Between the few and the many rows of `kernels/linear.py`, which each have their own kind of product."""
_CAPTURED_TOKENS = 2048
"""Up to about this many tokens every step size has a graph, and its capture runs the step (`sizing/graph_sizes.py`)."""
_FEW_FP8_TOKENS = 128
"""With more, products with FP8 weights use the kernels for many rows (`kernels/triton/products/launch_rule.py`)."""
_FEWER_ROWS = (64, 2)
"""A middling and a small number of decode rows, which have their own launches (`decode_attention.py`)."""
_CPU_TOKENS = 16


def run_largest_batches(
    launch: Callable[[StepInput], object],
    config: EngineConfig,
    device: torch.device,
    attention: RankAttention,
    *,
    num_places: int,
) -> None:
    """Run the steps that exercise a rank with `launch`, the largest first. Requests have LoRA adapters in `num_places`
    places. Raises LimitsTooHigh if memory runs out.

    A CPU's KV cache has its own budget, so there a small batch is enough, to load everything that loads lazily.
    """
    on_gpu, num_slots, config = device.type == "cuda", config.max_num_seqs, config.of_home
    num_tokens = config.max_num_batched_tokens if on_gpu else min(config.max_num_batched_tokens, _CPU_TOKENS)
    num_seqs = config.max_num_seqs if on_gpu else 1
    warm_up = WarmUp(
        config=config,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_sharing=min(num_seqs, attention.max_shared_rows),
        shares_prefixes=attention.shares_prefixes and num_seqs > 1,
        projects_latents=attention.projects_latents,
        chooses_keys=attention.chooses_keys,
        drafts=[(min(num_seqs, config.max_draft_step_tokens // width), width) for width in attention.draft_widths],
        num_places=num_places,
        num_slots=num_slots,
    )
    for step in warm_up.steps():
        try:
            launch(step)
            wait_for_gpu()  # the memory of uploads serves the next steps, too
        except MemoryError as error:
            raise LimitsTooHigh(
                f"the largest batches ({num_tokens} tokens, {num_seqs} requests) do not fit beside the weights "
                f"({error}): lower max_num_batched_tokens or max_num_seqs, or raise tensor_parallel_size (--tp)"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Steps that exercise a rank. With several homes each of them has the rows of a step."""

    config: EngineConfig
    """The limits of one home."""
    num_tokens: int
    """The tokens of the largest steps."""
    num_seqs: int
    """The most requests that a step decodes."""
    num_sharing: int = 0
    """The most requests that may share segments of keys."""
    shares_prefixes: bool = False
    projects_latents: bool = False
    chooses_keys: bool = False
    drafts: Sequence[tuple[int, int]] = ()
    """(most rows, tokens per row) of each kind of step with drafts."""
    num_places: int = 0
    """The places of LoRA adapters; 0: requests have none."""
    num_slots: int | None = None
    """The slots of all homes together, which bound the rows of a step; None: nothing does."""

    def steps(self) -> Iterator[StepInput]:
        """Yield steps with `num_tokens` and at most 512 prompt tokens (with FP8 weights, also with powers of two
        between), each in as few requests as possible, then one that decodes `num_seqs` requests. The first step also
        scores all of its tokens and copies keys within its layers; the others copy before their layers.

        Then come steps that read shared segments once for all, with `num_sharing` requests and with fewer. With
        `shares_prefixes` a step has two chunks that share a block, and with `projects_latents` one has a chunk of one
        token; with `chooses_keys` besides, one with `num_tokens` is said to have the longest requests, so that keys are
        chosen. The last steps have `drafts`, with the most rows and with fewer, and may share segments too.
        """
        config = self.config
        yield self._step(self._prompt_lens(self.num_tokens), num_decodes=0, is_scored=True)
        for fewer in self._fp8_tokens() if config.quantization == "fp8" else ():
            yield self._step(self._prompt_lens(fewer), num_decodes=0)
        if self.num_tokens > _MIDDLING_TOKENS:
            yield self._step(self._prompt_lens(_MIDDLING_TOKENS), num_decodes=0)
        if self.projects_latents:
            yield self._step([1], num_decodes=0)
            if self.chooses_keys:
                yield self._step(self._prompt_lens(self.num_tokens), num_decodes=0, most_keys=config.max_model_len)
        # Slots filled again start at length 0: every request decodes its first token.
        fewer_rows = _fewer(self.num_seqs) if config.enforce_eager else []  # a graph's capture runs its own
        for rows in (self.num_seqs, *fewer_rows):
            yield self._step([1] * rows, num_decodes=rows)
        if self.num_sharing > 1:
            for rows in (self.num_sharing, *_fewer(self.num_sharing)):
                yield self._step([1] * rows, num_decodes=rows, shares_segments=True)
        if self.shares_prefixes and config.block_size < config.max_model_len:
            yield self._step([1, 1], num_decodes=0, num_shared=config.block_size)
        for most, width in self.drafts:
            for rows in sorted({most, min(most, _FEWER_ROWS[-1])} - {0}, reverse=True):
                yield self._step([width] * rows, num_decodes=rows)
                if min(rows, self.num_sharing) > 1:
                    sharing = min(rows, self.num_sharing)
                    yield self._step([width] * sharing, num_decodes=sharing, shares_segments=True)
        means = config.uneven_draft_widths if self.drafts and config.draft_head is not None else ()
        for mean in means[:1]:  # the ranks choose among the drafts alike for every number of them
            most = min(self.num_seqs, int(config.max_draft_step_tokens / mean))
            for rows in sorted({most, min(most, _FEWER_ROWS[0])}, reverse=True):
                if rows >= UNEVEN_ROWS:
                    yield self._step([config.most_of_uneven] * rows, num_decodes=rows, draft_tokens=int(mean * rows))

    def _fp8_tokens(self) -> Iterator[int]:
        """Yield the numbers of tokens for which products with FP8 weights may use other launches, and which have no
        graphs."""
        has_graphs = not self.config.enforce_eager and self.config.max_num_seqs > 1
        fewer = 1 << max(0, self.num_tokens - 1).bit_length() >> 1
        while fewer > (_CAPTURED_TOKENS if has_graphs else _FEW_FP8_TOKENS):
            if fewer != _MIDDLING_TOKENS:
                yield fewer
            fewer //= 2

    def _prompt_lens(self, num_tokens: int) -> list[int]:
        """Return the lengths of as few prompts as hold `num_tokens` tokens."""
        longest = self.config.max_model_len - 1
        num_prompts = min(ceil_div(num_tokens, longest), self.config.max_num_seqs)
        return [min(longest, num_tokens - i * longest) for i in range(num_prompts)]

    def _step(
        self,
        lens: list[int],
        *,
        num_decodes: int,
        is_scored: bool = False,
        shares_segments: bool = False,
        num_shared: int = 0,
        most_keys: int = 0,
        draft_tokens: int = 0,
    ) -> StepInput:
        """Make a step that brings its tokens along and gives every slot the null block, to load the code that takes
        these in. For the same reason it has a segment without keys, a slot without segments, and a key copied onto
        itself; none of these changes anything. Decode rows of several tokens have drafts. With `num_places` the slots
        have LoRA adapters in these places, where none is loaded yet.

        `num_shared`: keys that all requests begin with, already in the cache. `most_keys`: a bound of each request's
        keys, where it is more than these have.
        """
        num_homes, num_places = self.config.num_homes, self.num_places
        if num_homes > 1:
            lens = [length for length in lens for _ in range(num_homes)][: self.num_slots]
            num_decodes = len(lens) if num_decodes else 0
        slots, nothing = range(len(lens)), pack([0] * len(lens))
        return StepInput(
            step_id=-1,
            new_slots=[
                NewSlot(
                    slot=slot,
                    num_cached_tokens=num_shared,
                    sampling=_SAMPLING,
                    adapter_place=1 + slot % num_places if num_places else NO_ADAPTER,
                )
                for slot in slots
            ],
            has_adapters=num_places > 0,
            extends_drafts=bool(self.drafts) and self.config.draft_head is not None,
            draft_tokens=draft_tokens,
            block_groups=nothing,
            block_slots=pack(slots),
            block_columns=nothing,
            block_ids=nothing,
            token_slots=pack(slots),
            token_starts=pack([num_shared] * len(lens)),
            token_counts=pack(lens),
            token_ids=pack([0] * sum(lens)),
            slots=pack(slots),
            num_tokens=pack(lens),
            num_logits=pack([lens[0] if num_decodes else 1] * len(lens)),
            seq_lens=pack(max(num_shared + length, most_keys) for length in lens),
            num_decodes=num_decodes,
            row_limits=pack([lens[0]] * num_decodes) if num_decodes and lens[0] > 1 else b"",
            queries=[
                PromptQuery(row=row, start=0, count=count, targets=pack([0] * count)) for row, count in enumerate(lens)
            ]
            if is_scored
            else [],
            key_copies=pack([0, 0, 0, 0, 1]),
            copies_new_keys=is_scored,
            segments=pack([0, 1, 0, 0, 0]) if shares_segments else b"",
            slot_segments=pack([0, 0, 0]) if shares_segments else b"",
            shares_segments=shares_segments,
            shared_prefixes=pack([0, len(lens), num_shared]) if num_shared else b"",
        )


def _fewer(rows: int) -> list[int]:
    return [fewer for fewer in _FEWER_ROWS if fewer < rows]
