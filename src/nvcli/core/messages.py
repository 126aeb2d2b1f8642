"""The messages between the engine and the ranks.

`StepInput` carries deltas only; everything that a rank can remember (block tables, lengths, tokens, sampling
parameters) lives in its slot table. Token ids, slots and block ids travel as packed int32, so that a message is built
and read without a Python object per token. Sizes are bounded by the config (`core.message_sizes`): the channel between
the processes is sized from them and never overflows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from nvcli.core.prompt_image import PromptImage
from nvcli.core.sampling_params import MAX_BIASED_TOKENS
from nvcli.core.structured import MAX_GRAMMAR_BYTES, Constraint

MAX_STOP_IDS = MAX_BIASED_TOKENS + 64
"""The maximum ids that a request may stop on: its own and the model's end-of-sequence ids."""

NOT_FINITE = -1
"""Stands for a token id when none can be chosen, because a logit is NaN or +inf, or because all are -inf."""

CONSTRAINT_FAILED = -2
"""Stands for a token id when the grammar of an answer has become too complex to follow."""

MAX_STEP_GRAMMAR_BYTES = 2 * MAX_GRAMMAR_BYTES
"""The maximum bytes of the different grammars in a step."""
NO_ADAPTER = 0
"""The number of an adapter, or of its place on the device, for requests without one."""
FORBIDDEN = -1e30
"""Added to the logit of a token that must not be chosen. It is finite, so that a row with nothing else left still
gets a token, and stays finite when divided by the lowest temperature."""

MOST_KEY_COPIES = 2
"""Most copy runs per new slot and KV group."""

DRAFT_SOURCES = ("lookup", "answers", "head")
"""Sources of drafts: a row's own prompt and answer, other answers of the job, or a head that drafts from the model's
hidden states."""

MAX_KV_GROUPS = 16
"""The maximum KV groups of a model. The step channel is made before a rank can report their number."""

TOKEN_BYTES = 4
"""The bytes of a packed token id."""


def pack(ids: Iterable[int]) -> bytes:
    """Pack integers as int32 in native byte order."""
    return array("i", ids).tobytes()


def unpack(data: bytes) -> array[int]:
    """Unpack the integers that `pack` packed."""
    return array("i", data)


class ForwardMode(IntEnum):
    """The kinds of rows that a step contains (SGLang's names). The mode is derived, for records and logs: no code
    path depends on it."""

    EXTEND = 1
    """Prefill chunks only."""
    DECODE = 2
    """Decode rows only."""
    MIXED = 3
    """Decode rows, then prefill chunks."""


class SlotSampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The sampling parameters of one slot, from admission to release."""

    seed: int = 0
    """The key of the counter-based random numbers, 64 bits."""
    row: int = 0
    """The number of the job's row, a counter word; 0 if the row brought its own seed."""
    sample: int = 0
    """The number of the sample among the row's `n`, a counter word."""
    prompt_len: int = 0
    """The tokens of the original prompt; what follows is output, for penalties and `min_tokens`."""
    temperature: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    num_logprobs: int = -1
    """The number of alternatives wanted besides the chosen token; -1: no log-probabilities at all."""
    stop_ids: list[int] = []
    """Ids that must not be chosen before `min_tokens`, unless a constraint allows no others; empty when `min_tokens` is
    0."""
    bias_ids: list[int] = []
    bias_values: list[float] = []
    allowed_ids: list[int] = []
    """The only ids that may be chosen; empty: all."""
    bad_words: list[list[int]] = []
    """Sequences of at least two ids, none of which the answer may hold. Together with the ids of the other lists,
    not counting the model's own end-of-sequence ids, they are at most `MAX_BIASED_TOKENS`."""


class NewSlot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request that enters a slot, for the first time or again after a preemption."""

    slot: int
    num_cached_tokens: int
    """Leading tokens whose keys and values are already in its blocks; the first chunk starts after them."""
    sampling: SlotSampling
    constraint: int | None = None
    """The index of the answer's constraint in `StepInput.constraints`; None: unconstrained."""
    adapter_place: int = NO_ADAPTER
    """The place on the device of the request's LoRA adapter, from 1; NO_ADAPTER: it has none."""
    images: list[PromptImage] = []
    """The images of its prompt, in order; at most `EngineConfig.max_prompt_images`."""


class PromptQuery(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A query about consecutive tokens of one prefill chunk: the log-probabilities of given next tokens, or the sum
    of their hidden states."""

    row: int
    """The number of the chunk's row in the batch."""
    start: int
    """The first of the tokens, counted from the first token of the chunk."""
    count: int
    """The number of the tokens, at least 1."""
    targets: bytes = b""
    """The packed ids of the `count` tokens whose log-probabilities are wanted, each following one of the tokens
    read. Empty: the hidden states are wanted."""
    num_top: int = 0
    """The number of likeliest next tokens wanted besides each target."""


class StepInput(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """One step for every rank: what changed since the last step, and the batch as rows (slot, num_tokens, num_logits).

    It is applied in this order: freed slots, new slots, blocks, tokens, then the forward pass over the rows. Packed
    fields are int32. Decode rows come first: requests whose next input was sampled by an earlier step. The prefill
    chunks follow.

    A row computes the next `num_tokens` tokens of its request and multiplies the last `num_logits` of them by the LM
    head. Of those, `StepOutput.counts` says how many gave a token that counts; after the step the request's length on
    the device has grown by `num_tokens - num_logits + count`.
    """

    step_id: int
    freed_slots: bytes = b""
    new_slots: list[NewSlot] = []
    block_groups: bytes = b""
    """This field and the next three are the new entries of the block tables: block_tables[group, slot, column] = id."""
    block_slots: bytes = b""
    block_columns: bytes = b""
    block_ids: bytes = b""
    token_slots: bytes = b""
    """This field and the next three are spans of tokens that the ranks do not have: prefill chunks, cached prefixes
    that penalties must count, and sampled tokens of requests that wait for their last token. Span i puts the next
    `token_counts[i]` of `token_ids` at positions `token_starts[i]` and on of slot `token_slots[i]`."""
    token_starts: bytes = b""
    token_counts: bytes = b""
    token_ids: bytes = b""
    slots: bytes = b""
    """The slot of each row of the batch; no slot is in two rows."""
    num_tokens: bytes = b""
    """The number of tokens that each row computes, at least 1."""
    num_logits: bytes = b""
    """The number of each row's last tokens that need logits; 0 for a prefill chunk that does not end its prompt."""
    extends_drafts: bool = False
    """Whether the head that drafts tokens computes the step's tokens too, so that later steps can have its drafts."""
    seq_lens: bytes = b""
    """An upper bound on each row's length after this step, its own tokens included. It is exact unless an earlier step
    whose counts the engine does not know yet may accept a number of tokens of its own; so with stages it always is."""
    num_decodes: int = 0
    """The number of decode rows, which come first. They have as many logits as tokens: those after the first token are
    drafts."""
    draft_tokens: int = 0
    """Tokens of all rows together, if the ranks give most drafts to the rows that are surest of theirs, none more than
    `num_tokens` says, in a step without prefill chunks; 0: rows have as many tokens as it says."""
    row_limits: bytes = b""
    """The most tokens of each decode row's request that may be computed when the step is over: the row gives no more
    tokens than lead there. Empty: decode rows have no drafts."""
    constraints: list[Constraint] = []
    """The constraints of new slots, each once. Their grammars have at most `MAX_STEP_GRAMMAR_BYTES` together."""
    restarts: bool = False
    """Whether this is the first step after one that did not run: every slot is freed, and requests enter slots anew."""
    queries: list[PromptQuery] = []
    """Queries about the prompts, besides the rows' own logits; at most one for each prefill chunk."""
    segments: bytes = b""
    """Segments of KV blocks that decoding requests share and that are new or changed (`engine.shared_segments`), five
    numbers each: KV group, number of the segment (from 1), first key, end of its keys, and number of the segment before
    it (0: none)."""
    slot_segments: bytes = b""
    """Three numbers for each slot whose last shared segment has changed: KV group, slot, and number of the segment
    (0: none)."""
    shares_segments: bool = False
    """Whether decode rows read their shared segments once for all of them."""
    shared_prefixes: bytes = b""
    """Three numbers for each group of prefill chunks that are attended together to their requests' shared first
    keys: the number of the first chunk's row in the batch, the number of chunks, and the number of keys, which are
    whole blocks and come before all of the chunks' tokens (`engine.chunk_groups`)."""
    key_copies: bytes = b""
    """Five numbers for each run of keys and values that is copied in all layers of a KV group: KV group, source
    block, target block, and the first token and the end of the run, counted in either block (`engine.key_copies`).
    They are sorted by KV group. No copy reads what another copy of the step writes."""
    copies_new_keys: bool = False
    """Whether the step itself computes some of these keys, so that each layer copies after storing them; else all
    are copied before the step."""
    adapter_loads: bytes = b""
    """The place on the device and the number, both from 1, of each LoRA adapter to load before the step
    (`engine.adapter_places`). It replaces the adapter that was in the place."""
    has_adapters: bool = False
    """Whether some rows may have adapters at a place on the device."""
    merged_adapter: int | None = None
    """The number of the LoRA adapter that is merged into the base weights from this step on; NO_ADAPTER: none; None:
    the one before stays (`engine.merged_adapter`)."""
    adapter_moves: bytes = b""
    """The slot and the place of its adapter from this step on, for each slot whose place changes while its request
    runs. They apply before new slots."""

    @property
    def num_rows(self) -> int:
        return len(self.slots) // 4

    @property
    def total_tokens(self) -> int:
        return self.draft_tokens or sum(unpack(self.num_tokens))

    @property
    def mode(self) -> ForwardMode:
        if self.num_decodes == self.num_rows:
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.num_decodes else ForwardMode.EXTEND


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log-probabilities of one generated token under the unmodified distribution (before temperature and penalties)."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptQueryResult(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The result of one `PromptQuery`. Packed numbers are in native byte order."""

    logprobs: bytes = b""
    """[count] packed float32, the log-probability of each target under the unmodified distribution."""
    best_ids: bytes = b""
    """[count] packed int32, the likeliest next tokens."""
    top_ids: bytes = b""
    """[count, num_top] packed int32, the likeliest next tokens, the likeliest first."""
    top_logprobs: bytes = b""
    """[count, num_top] packed float32, their log-probabilities."""
    hidden_sum: bytes = b""
    """[hidden size] packed float32, the sum of the hidden states after the final norm; or a classifier's logits."""


class StepOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tokens that a step gave: `counts[i]` tokens for each row with logits, in batch order."""

    step_id: int
    token_ids: bytes
    """The packed ids, row after row; `NOT_FINITE` where the logits were not finite, `CONSTRAINT_FAILED` where a grammar
    cannot be followed any further."""
    counts: bytes = b""
    """The packed number of tokens of each row with logits, 0 to `num_logits`; empty: as many tokens as logits."""
    drafted: bytes = b""
    """The packed number of drafts of each decode row, up to `num_tokens - 1`; empty: they have none."""
    draft_sources: bytes = b""
    """The source of each decode row's drafts, packed indices of `DRAFT_SOURCES`; empty: they have no drafts."""
    forced: bytes = b""
    """Tokens that must follow some of the tokens given, because grammars allow nothing else. For each of these, packed:
    its index in `token_ids`, the number of tokens that must follow it, and those tokens. The engine may ignore them."""
    logprobs: list[TokenLogprobs | None] = []
    """One entry for each token if any request of the batch asked; else empty."""
    seconds: float = 0.0
    """The device's time for the step, from its first kernel to its last."""
    idle_seconds: float = 0.0
    """The time that the device waited for the host, before the step and in it."""
    is_graph: bool = False
    """Whether the step ran as a CUDA graph."""
    out_of_memory: str = ""
    """The reason why this step, or the one before it, did not run; empty if it ran. The rest of the output is then
    meaningless, and no step runs until one that `restarts`."""
    query_results: list[PromptQueryResult] = []
    """One entry for each of the step's `queries`, in their order."""
    note: str = ""
    """A message for the user; a line of up to 300 characters, or empty."""


class MemoryUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One rank's memory, in bytes: planned and measured for each item."""

    device: str
    """The name of the GPU, or CPU."""
    total: int
    """The memory of the device."""
    budget: int
    """The part of it that the run may use."""
    weights: dict[str, int]
    """The weights by group (embeddings, attention, MLP, …); together they are the item `weights`."""
    planned: dict[str, int]
    """The planned memory of each item, in the order of `sizing.memory_plan.ITEMS`."""
    measured: dict[str, int] = {}
    """The measured memory of each item; empty unless the run was asked to measure."""

    @property
    def beside_cache(self) -> int:
        """The sum of all planned items except the KV cache."""
        return sum(size for name, size in self.planned.items() if name != "KV cache")


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of layers that keep the same KV blocks."""

    window: int | None = None
    """A token attends to itself and the `window - 1` tokens before it; None: to all tokens before it."""
    is_state: bool = False
    """Whether a block holds the recurrent state after the last token of its column, rather than keys. Its window is
    two tokens: a token continues from the state after the previous one."""
    token_bytes: int = 0
    """The bytes that a token's keys and values, or those that several tokens share, take in the layers: on one rank in
    its report, and on all ranks of a replica for its scheduler."""
    layers: tuple[int, ...] = ()
    """The layers' numbers in a stage, from 0, in ascending order. A stage may have no layers of a group. Layers that
    read the keys and values of others are in no group."""
    span: int = 1
    """The columns that one block fills, each of `block_size` tokens; more than one where several tokens share a key.
    Such a group has no window."""

    def first_column(self, position: int, block_size: int) -> int:
        """The first column of a block table that a token at `position`, or a later one, attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int = 1) -> int:
        """The maximum blocks needed at a time to compute `num_tokens` tokens, up to `chunk` in a step. Blocks that
        a window has passed are freed between steps."""
        if self.is_state:  # it moves along from column to column
            return 1
        blocks = -(-num_tokens // (self.span * block_size))
        if self.window is None:
            return blocks
        seen = min(num_tokens, self.window - 1 + chunk)
        return min(blocks, -(-(seen - 1) // block_size) + 1)  # the first of them may begin before the window


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """The report of a rank, and the first message of an engine: it can run."""

    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    """The bytes of one rank's KV cache."""
    kv_cache_tokens: int
    """The tokens of requests of `max_model_len` that the blocks hold."""
    weight_bytes: int
    """The bytes of rank 0's weights."""
    attention_backend: str
    kv_groups: list[KVGroup] = msgspec.field(default_factory=lambda: [KVGroup()])
    """The KV groups of rank 0. At most `MAX_KV_GROUPS`."""
    reads_segments: bool = False
    """Whether the ranks read shared blocks of decoding requests once for all of them."""
    max_draft_step_tokens: int = 0
    """Maximum tokens of a step's decode rows together, if they have drafts; 0: they have none."""
    prefix_tile_tokens: int = 0
    """`AttentionBackend.prefix_tile_tokens`, if the ranks attend prefill chunks that share prefixes together; 0:
    they do not."""
    max_loaded_adapters: int = 0
    """Places for LoRA adapters on the ranks; 0 only without adapters."""
    seconds: dict[str, float]
    """The seconds that each part of rank 0's start took: imports, process group, loading weights, warm-up and so on."""
    notes: list[str] = []
    """Messages for the log: the choices of `auto` and why, and limits worth a warning."""
    memory: list[MemoryUse] = []
    """A rank reports its own memory; the engine reports one entry for each rank."""
