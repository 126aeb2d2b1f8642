"""What the engine and the ranks say to each other in a step, and how it is laid out in bytes.

`StepInput` carries deltas only; everything that a rank can remember (block tables, lengths, tokens, sampling
parameters) lives in its slot table. Token ids, slots and block ids travel as packed int32, so that a message is
built and read without a Python object per token. Sizes are bounded by the config (`max_step_input_bytes`,
`max_step_output_bytes`): the channel between the processes is sized from them and never overflows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from nvcli.sampling_params import MAX_BIASED_TOKENS, MAX_LOGPROBS

MAX_STOP_IDS = MAX_BIASED_TOKENS + 64
"""Most ids that a request may stop on: its own and the model's end-of-sequence ids."""


def pack(ids: Iterable[int]) -> bytes:
    """int32 in native byte order."""
    return array("i", ids).tobytes()


def unpack(data: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids


class ForwardMode(IntEnum):
    """What kind of batch a step is (SGLang's names)."""

    EXTEND = 1
    """Prompt slices only."""
    DECODE = 2
    """One token for each request."""
    MIXED = 3
    """Decode rows first, then prompt slices."""
    IDLE = 4
    """Nothing for this rank, which still takes part in collectives."""
    TARGET_VERIFY = 5
    DRAFT_EXTEND = 6


class SlotSampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What it takes to sample for one slot, from admission to release."""

    seed: int
    """Key of the counter-based generator, 64 bits."""
    row: int
    """Counter words: row of the job (0 where the row brought its own seed) and which of its `n` samples."""
    sample: int
    prompt_len: int
    """Tokens of the original prompt; what follows is output (penalties, min_tokens)."""
    temperature: float
    top_k: int
    """0: off."""
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    num_logprobs: int
    """Alternatives wanted beside the chosen token; -1: no log-probabilities at all."""
    stop_ids: list[int]
    """Ids that must not be chosen before `min_tokens`; empty when `min_tokens` is 0."""
    bias_ids: list[int]
    bias_values: list[float]


class NewSlot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request enters a slot, for the first time or again after a preemption."""

    slot: int
    num_cached_tokens: int
    """Leading tokens whose keys and values are in its blocks already; the first slice starts behind them."""
    prefix_ids: bytes
    """Packed ids of those tokens where penalties must count them; else empty."""
    sampling: SlotSampling


class StepInput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One step for every rank. Order of application: freed slots, new slots, blocks, then the forward pass.

    The batch is `decode_slots` (one token each) followed by the prompt slices.
    """

    step_id: int
    mode: ForwardMode
    freed_slots: bytes = b""
    new_slots: list[NewSlot] = []
    block_slots: bytes = b""
    """With `block_columns` and `block_ids`: block_table[slot, column] = id."""
    block_columns: bytes = b""
    block_ids: bytes = b""
    decode_slots: bytes = b""
    decode_ids: bytes = b""
    """The token of each of them, with several stages: what the last one sampled the first one has not. Else empty: the
    ranks have them on the device, and the engine may not know them yet."""
    extend_slots: bytes = b""
    extend_lens: bytes = b""
    """Tokens to compute, one count for each of `extend_slots`."""
    extend_samples: bytes = b""
    """1 where the slice ends its prompt, so that a token is sampled; else 0."""
    token_ids: bytes = b""
    """The slices' tokens, one slice after the other."""
    restarts: bool = False
    """The first step after one that did not run: every slot is freed, and requests enter theirs anew."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log-probabilities of one generated token under the unmodified distribution (before temperature and penalties)."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What was sampled in a step: for each sampling request, in batch order, `counts[i]` tokens."""

    step_id: int
    token_ids: bytes
    counts: bytes = b""
    """Packed; empty: one token each."""
    logprobs: list[TokenLogprobs | None] = []
    """One for each token where any request of the batch asked; else empty."""
    seconds: float = 0.0
    """The device's time for the step, from its first kernel to its last."""
    idle_seconds: float = 0.0
    """How long the device had nothing to do before it."""
    out_of_memory: str = ""
    """Not empty: the step did not run, for this reason, or because the one before it did not. Nothing of it counts, and
    no step runs until one that `restarts`."""


class MemoryUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One rank's memory, in bytes: what was planned for each item, and what the item then took."""

    device: str
    """Name of the GPU, or CPU."""
    total: int
    """Of the device."""
    budget: int
    """What the run may use of it."""
    weights: dict[str, int]
    """By group: embeddings, attention, MLP, …; together the planned and measured item `weights`."""
    planned: dict[str, int]
    """By item, in the order of `runner.memory.ITEMS`."""
    measured: dict[str, int] = {}
    """Likewise; empty unless the run was asked to measure."""

    @property
    def beside_cache(self) -> int:
        """Of all planned items but the KV cache."""
        return sum(size for name, size in self.planned.items() if name != "KV cache")


class EngineReady(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine reports once its ranks can run."""

    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    """Of one rank."""
    weight_bytes: int
    """Of rank 0."""
    attention_backend: str
    seconds: dict[str, float]
    """Start-up by part, of rank 0: imports, process group, load, warmup, kv cache, graphs."""
    notes: list[str] = []
    """For the log: what `auto` chose and why, limits worth a warning."""
    memory: list[MemoryUse] = []
    """A rank reports its own; the engine, one for each rank."""


def max_step_input_bytes(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, max_blocks_per_seq: int
) -> int:
    """Largest encoded StepInput that the scheduler can produce.

    Each new slot: fixed fields (under 256 bytes) plus stop and biased ids (5 bytes an id, 9 a float); prefix ids of
    all new slots of a step together are held under `max_model_len + max_num_batched_tokens` by the scheduler.
    """
    new_slot_bytes = 256 + 5 * (MAX_STOP_IDS + MAX_BIASED_TOKENS) + 9 * MAX_BIASED_TOKENS
    block_bytes = 3 * 4 * max_blocks_per_seq
    per_seq = new_slot_bytes + block_bytes + 6 * 4
    return 1024 + max_num_seqs * per_seq + 4 * (2 * max_num_batched_tokens + max_model_len)


def max_step_output_bytes(*, max_num_seqs: int) -> int:
    """Largest encoded StepOutput: one token a request, with `MAX_LOGPROBS` alternatives each."""
    return 1024 + max_num_seqs * (2 * 4 + 32 + MAX_LOGPROBS * (5 + 9))
