"""The maximum sizes of the messages between the engine and the ranks, from which the channel between them is sized."""

from nvcli.core.messages import MAX_KV_GROUPS, MAX_STEP_GRAMMAR_BYTES, MAX_STOP_IDS, MOST_KEY_COPIES
from nvcli.core.sampling_params import MAX_BIASED_TOKENS, MAX_LOGPROBS
from nvcli.core.structured import MAX_END_IDS, MAX_FORCED_TOKENS, MAX_MARK_IDS


def max_step_input_bytes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    max_blocks_per_seq: int,
    max_draft_tokens: int = 0,
) -> int:
    """Compute the size in bytes of the largest encoded StepInput that the scheduler can produce.

    `max_blocks_per_seq` counts the blocks of all KV groups. Each new slot has fixed fields (under 256 bytes), stop and
    biased ids and those of its constraint (5 bytes an id, 9 a float). Allowed ids and bad words replace biased ids and
    take less room. In each KV group a slot may have another shared segment, and as many segments may change. Cached
    prefixes that travel for penalties, bad words and grammars are together held under `max_model_len +
    max_num_batched_tokens` tokens by the scheduler. A row takes 16 bytes in the batch, 24 in two spans of tokens, 4
    where its slot was freed before, 32 where its prompt is read, plus the targets, and 6 for its part of a group of
    chunks, and 4 for its limit. A new slot may have keys copied in each KV group, and its adapter loaded. A
    running slot may have another place of its adapter, which takes 8 bytes. Of requests that wait for their last token,
    a row brings up to `max_draft_tokens` more. Images come on top (`EngineConfig.image_message_bytes`).
    """
    num_ids = MAX_STOP_IDS + MAX_BIASED_TOKENS + MAX_END_IDS + 2 * MAX_MARK_IDS
    new_slot_bytes = 256 + 5 * num_ids + 9 * MAX_BIASED_TOKENS
    segment_bytes = MAX_KV_GROUPS * (3 + 5) * 4
    copy_bytes = MAX_KV_GROUPS * MOST_KEY_COPIES * 5 * 4
    per_seq = new_slot_bytes + 4 * 4 * max_blocks_per_seq + segment_bytes + copy_bytes + 17 * 4 + 32 + 6
    num_tokens = 3 * max_num_batched_tokens + max_model_len
    return 1024 + MAX_STEP_GRAMMAR_BYTES + max_num_seqs * (per_seq + 4 * max_draft_tokens + 5) + 4 * num_tokens


def max_step_output_bytes(
    *, max_num_seqs: int, max_step_logits: int, max_num_batched_tokens: int, hidden_size: int = 0
) -> int:
    """Compute the size in bytes of the largest encoded StepOutput: `max_step_logits` tokens, with `MAX_LOGPROBS`
    alternatives each, and as many for each prompt token that is read. `hidden_size`: that of the hidden states that
    requests may ask for, or the number of a classifier's classes; 0: they may not."""
    per_token = 4 + 32 + MAX_LOGPROBS * (5 + 9)
    per_seq = 3 * 4 + 4 * (2 + MAX_FORCED_TOKENS) + 32 + 4 * hidden_size
    return 1024 + max_step_logits * per_token + max_num_seqs * per_seq + max_num_batched_tokens * 8 * (1 + MAX_LOGPROBS)
