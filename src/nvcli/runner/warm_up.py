"""Steps that exercise a rank before it serves: the largest batches, on the null block."""

from __future__ import annotations

from collections.abc import Iterator

from nvcli.config import EngineConfig
from nvcli.messages import NewSlot, SlotSampling, StepInput, pack

_SAMPLING = SlotSampling(top_k=2, top_p=0.9)


def warm_up_steps(config: EngineConfig, num_tokens: int, num_seqs: int) -> Iterator[StepInput]:
    """Yield a step with `num_tokens` prompt tokens in as few requests as possible, then one that decodes `num_seqs`."""
    longest = config.max_model_len - 1
    num_prompts = min(-(-num_tokens // longest), config.max_num_seqs)
    lens = [min(longest, num_tokens - i * longest) for i in range(num_prompts)]
    yield _step(-2, lens, num_decodes=0)
    # Slots filled again start at length 0: every request decodes its first token.
    yield _step(-1, [1] * num_seqs, num_decodes=num_seqs)


def _step(step_id: int, lens: list[int], *, num_decodes: int) -> StepInput:
    """The tokens come with the step, and each slot gets the null block, so that what takes them in is loaded too."""
    slots, nothing = range(len(lens)), pack([0] * len(lens))
    return StepInput(
        step_id=step_id,
        new_slots=[NewSlot(slot=slot, num_cached_tokens=0, sampling=_SAMPLING) for slot in slots],
        block_groups=nothing,
        block_slots=pack(slots),
        block_columns=nothing,
        block_ids=nothing,
        token_slots=pack(slots),
        token_starts=nothing,
        token_counts=pack(lens),
        token_ids=pack([0] * sum(lens)),
        slots=pack(slots),
        num_tokens=pack(lens),
        num_logits=pack([1] * len(lens)),
        seq_lens=pack(lens),
        num_decodes=num_decodes,
    )
