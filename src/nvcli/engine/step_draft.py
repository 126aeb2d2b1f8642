"""StepDraft: a step's input while the scheduler puts it together. ScheduledStep: the step until its output arrives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from nvcli.core.messages import MAX_STEP_GRAMMAR_BYTES, NewSlot, PromptQuery, StepInput, StepOutput, pack, unpack
from nvcli.core.structured import Constraint
from nvcli.engine.chunk_groups import Chunk
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.state import RequestState


@dataclass(slots=True)
class ScheduledStep:
    """A step as submitted, kept until its output arrives."""

    input: StepInput
    sampling: list[RequestState]
    """The requests of the rows that have logits, in batch order."""
    registered: list[list[int]]
    """Blocks of each home registered for reuse since the previous step. This step or the previous one fills them."""
    querying: list[RequestState]
    """The request of each of the step's `queries`."""

    @property
    def num_logits(self) -> list[int]:
        """The number of logits of each row that has any, in batch order."""
        return [num_logits for num_logits in unpack(self.input.num_logits) if num_logits]

    def owners(self, counts: Sequence[int]) -> list[RequestState]:
        """Return the request of each token that the step gave: `counts` tokens for each request in `sampling`."""
        if max(counts) <= 1:  # always the case when masks are late, and in most steps
            return list(compress(self.sampling, counts))
        return [state for state, count in zip(self.sampling, counts, strict=True) for _ in range(count)]

    def take_query_results(self, output: StepOutput) -> None:
        """Pass what the step has read from prompts to their requests."""
        for state, result in zip(self.querying, output.query_results, strict=True):
            if not state.finished and state.queries is not None:
                state.queries.take(result)

    def put_back(self) -> None:
        """Take the step back, because it did not run: its requests get no tokens from it, and it read nothing."""
        for state in self.sampling:
            state.num_owed = 0
        for state, query in zip(self.querying, self.input.queries, strict=True):
            assert state.queries is not None
            state.queries.put_back(query.count)


class StepDraft:
    """Collects a step's input: requests that enter slots, new blocks, tokens that the ranks lack, and the rows."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._brings_prefixes = limits.drafting.most_tokens > 1
        """Whether the ranks need the tokens of all cached prefixes, to look drafts up in them."""
        self._looks_ahead = limits.drafting.has_head
        """Whether they need the token after each chunk, from which a head makes its keys."""
        self._prefix_ids_left = limits.max_model_len + limits.max_num_batched_tokens
        """Cached tokens of entering requests that the step may carry besides those that it has; `max_step_input_bytes`
        counts them."""
        self._new_slots: list[NewSlot] = []
        self._constraints: dict[bytes, tuple[int, Constraint]] = {}
        """The constraints of requests that enter slots, with their indices in the step."""
        self._grammar_bytes = 0
        self._blocks: list[tuple[int, int, int, Sequence[int]]] = []
        """(KV group, slot, first column, blocks) for each run of blocks that a slot was given."""
        self._spans: list[tuple[int, int, int]] = []
        """(slot, first position, number of tokens) of each span of tokens that the ranks do not have."""
        self._token_ids = bytearray()
        """The ids of all spans."""
        self.chunks: list[Chunk] = []
        """The prefill chunks, in the order of their rows."""

    def has_room_for(self, state: RequestState) -> bool:
        """Whether the step has room for an entering request's grammar and, if the ranks need them, its cached prefix
        tokens. There is always room for one request."""
        if not self._new_slots:
            return True
        if self._num_prefix_ids(state) > self._prefix_ids_left:
            return False
        constraint = state.request.constraint
        if constraint is None or constraint.key in self._constraints:
            return True
        return self._grammar_bytes + len(constraint.grammar.encode()) <= MAX_STEP_GRAMMAR_BYTES

    def enter(self, state: RequestState) -> None:
        """Let a request enter its slot, with its blocks and, if the ranks need them, the tokens of its prefix."""
        assert state.slot is not None
        num_prefix_ids = self._num_prefix_ids(state)
        self._new_slots.append(
            NewSlot(
                slot=state.slot,
                num_cached_tokens=state.num_computed,
                sampling=state.request.slot_sampling(),
                constraint=self._place_of(state.request.constraint),
                adapter_place=state.adapter_place,
                images=state.request.images,
            )
        )
        for group, (blocks, first) in enumerate(zip(state.blocks, state.first_columns, strict=True)):
            if all(blocks[first:]):
                self.add_blocks(group, state.slot, first, blocks[first:])
            else:  # new slots have no blocks
                for column, block in enumerate(blocks[first:], first):
                    if block:
                        self.add_blocks(group, state.slot, column, [block])
        if num_prefix_ids:
            self.add_tokens(state, 0, num_prefix_ids)
            self._prefix_ids_left -= num_prefix_ids

    def _num_prefix_ids(self, state: RequestState) -> int:
        return state.num_computed if self._brings_prefixes or state.needs_prefix_ids else 0

    def _place_of(self, constraint: Constraint | None) -> int | None:
        """Return a constraint's index among those of the step."""
        if constraint is None:
            return None
        if constraint.key not in self._constraints:
            self._constraints[constraint.key] = len(self._constraints), constraint
            self._grammar_bytes += len(constraint.grammar.encode())
        return self._constraints[constraint.key][0]

    def add_blocks(self, group: int, slot: int, first_column: int, blocks: Sequence[int]) -> None:
        """Add blocks that a slot was given, for its columns from `first_column` on; 0: the column has none any more."""
        self._blocks.append((group, slot, first_column, blocks))

    def keep_slots(self, slots: set[int | None]) -> None:
        """Drop the requests that enter all other slots, and these slots' blocks."""
        self._new_slots = [new for new in self._new_slots if new.slot in slots]
        self._blocks = [entry for entry in self._blocks if entry[1] in slots]

    def add_tokens(self, state: RequestState, start: int, num_tokens: int) -> None:
        """Add a span of known tokens that the ranks do not have."""
        assert state.slot is not None
        self._spans.append((state.slot, start, num_tokens))
        self._token_ids += state.request.model_tokens(state.tokens(start, start + num_tokens)).tobytes()
        state.num_brought = start + num_tokens

    def add_last_tokens(self, states: Sequence[RequestState]) -> None:
        """Add the tokens of each of these requests that have come back since a step brought its last ones."""
        for state in states:
            assert state.slot is not None
            new = state.generated[state.num_brought - state.num_prompt :]
            self._spans.append((state.slot, state.num_brought, len(new)))
            self._token_ids += new.tobytes()
            state.num_brought += len(new)

    def add_chunk(self, state: RequestState, num_tokens: int) -> None:
        """Add a prefill chunk: the last `num_tokens` of a request's computed tokens, which the step brings along."""
        chunk = Chunk(state, num_tokens)
        self.add_tokens(state, chunk.start, num_tokens + (self._looks_ahead and state.num_uncomputed > 0))
        self.chunks.append(chunk)

    def finish(
        self,
        step_id: int,
        *,
        decoding: list[RequestState],
        decode_slots: bytes,
        decode_widths: Sequence[int],
        decode_lens: bytes,
        registered: list[list[int]],
        **others: Any,
    ) -> ScheduledStep:
        """Return the step, which has something to compute.

        `decoding`: the requests of the decode rows; `decode_slots` and `decode_lens` are their packed slots and lengths
        after the step, `decode_widths` the numbers of their tokens. `registered`: see `ScheduledStep`; `others`: more
        fields of the `StepInput`.
        """
        rows = [(chunk.state.slot, chunk.num_tokens, chunk.is_last, chunk.state.num_computed) for chunk in self.chunks]
        chunk_slots, chunk_tokens, chunk_logits, chunk_lens = _pack_columns(rows, 4)
        token_slots, token_starts, token_counts = _pack_columns(self._spans, 3)
        queries, querying = self._read_prompts(first_row=len(decoding))
        block_groups, block_slots, block_columns, block_ids = _pack_blocks(self._blocks)
        widths = pack(decode_widths)
        step = StepInput(
            step_id=step_id,
            new_slots=self._new_slots,
            block_groups=block_groups,
            block_slots=block_slots,
            block_columns=block_columns,
            block_ids=block_ids,
            token_slots=token_slots,
            token_starts=token_starts,
            token_counts=token_counts,
            token_ids=bytes(self._token_ids),
            slots=decode_slots + chunk_slots,
            num_tokens=widths + chunk_tokens,
            num_logits=widths + chunk_logits,
            seq_lens=decode_lens + chunk_lens,
            num_decodes=len(decoding),
            constraints=[constraint for _, constraint in self._constraints.values()],
            queries=queries,
            **others,
        )
        sampling = [chunk.state for chunk in self.chunks if chunk.is_last]
        return ScheduledStep(step, decoding + sampling, registered, querying)

    def _read_prompts(self, first_row: int) -> tuple[list[PromptQuery], list[RequestState]]:
        """Return the queries of the chunks, whose rows count from `first_row`, and the request of each query."""
        queries: list[PromptQuery] = []
        querying: list[RequestState] = []
        for row, chunk in enumerate(self.chunks, first_row):
            state = chunk.state
            if state.queries is not None and (query := state.queries.read_chunk(row, chunk.start, state.num_computed)):
                queries.append(query)
                querying.append(state)
        return queries, querying


def _pack_blocks(runs: Sequence[tuple[int, int, int, Sequence[int]]]) -> list[bytes]:
    """Return the packed KV groups, slots, columns and ids of the blocks in some runs. Columns with a single block, the
    usual case when decoding, are packed together."""
    groups, slots, columns = array("i"), array("i"), array("i")
    ids: list[int] = []
    long = [(first, first + len(blocks)) for _, _, first, blocks in runs if len(blocks) > 1]
    least = min((first for first, _ in long), default=0)
    all_columns = array("i", range(least, max((end for _, end in long), default=0)))
    for group, slot, first_column, blocks in runs:
        count = len(blocks)
        if count == 1:
            groups.append(group)
            slots.append(slot)
            columns.append(first_column)
        else:
            groups += array("i", (group,)) * count
            slots += array("i", (slot,)) * count
            columns += all_columns[first_column - least : first_column - least + count]
        ids += blocks
    return [groups.tobytes(), slots.tobytes(), columns.tobytes(), pack(ids)]


def _pack_columns(rows: Sequence[tuple[Any, ...]], num_columns: int) -> list[bytes]:
    return [pack(column) for column in zip(*rows, strict=True)] if rows else [b""] * num_columns
