"""Runners without a model, for tests of the engine and the executor. Named by import path in a rank's argument."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import (
    EngineReady,
    KVGroup,
    PromptQuery,
    PromptQueryResult,
    SlotSampling,
    StepInput,
    StepOutput,
    pack,
    unpack,
)
from nvcli.errors import LoadError
from nvcli.worker.runner.interface import RankContext, Runner
from plain_config import plain_config

BLOCK_SIZE = 4


def engine_config(**overrides: object) -> EngineConfig:
    """Return the configuration of a small engine, which admits whatever fits."""
    small: dict[str, object] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": BLOCK_SIZE,
        "plan_admission": False,
    }
    return plain_config(**{**small, **overrides})


class Output:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class CountingRunner:
    """Each slot generates 100, 101, 102, … from its prompt's end on: a lost, doubled or misplaced token shows."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        self.context = context
        self.is_output_rank = context.rank == config.output_rank
        self.lens: dict[int, int] = {}
        """Computed tokens of each slot."""
        self.sampling: dict[int, SlotSampling] = {}
        self.ready = EngineReady(
            num_blocks=64,
            block_size=config.block_size,
            kv_cache_bytes=0,
            kv_cache_tokens=64 * config.block_size,
            weight_bytes=0,
            attention_backend="none",
            seconds={},
        )

    def peak_bytes(self) -> int:
        return 1000 + self.context.rank

    def launch(self, step: StepInput) -> Output | None:
        self.apply(step)
        tokens: list[int] = []
        for slot, num_tokens, num_logits in rows_of(step):
            self.lens[slot] += num_tokens
            num_generated = self.lens[slot] - self.sampling[slot].prompt_len
            tokens += range(100 + num_generated - num_logits + 1, 100 + num_generated + 1)
        return Output(StepOutput(step_id=step.step_id, token_ids=pack(tokens))) if self.is_output_rank else None

    def apply(self, step: StepInput) -> None:
        """Take in what changed since the last step."""
        for new in step.new_slots:
            self.lens[new.slot] = new.num_cached_tokens
            self.sampling[new.slot] = new.sampling


def rows_of(step: StepInput) -> list[tuple[int, int, int]]:
    """(slot, number of tokens, number of logits) of each row."""
    return list(zip(unpack(step.slots), unpack(step.num_tokens), unpack(step.num_logits), strict=True))


def spans_of(step: StepInput) -> list[tuple[int, int, list[int]]]:
    """(slot, first position, tokens) of each span of tokens that the step brings."""
    token_ids = unpack(step.token_ids).tolist()
    spans, first = [], 0
    for slot, start, count in zip(*map(unpack, (step.token_slots, step.token_starts, step.token_counts)), strict=True):
        spans.append((slot, start, token_ids[first : first + count]))
        first += count
    assert first == len(token_ids)
    return spans


def decode_slots_of(step: StepInput) -> list[int]:
    return unpack(step.slots)[: step.num_decodes].tolist()


def chunk_lens_of(step: StepInput) -> list[int]:
    return unpack(step.num_tokens)[step.num_decodes :].tolist()


@dataclass(frozen=True)
class Key:
    """What the cache holds of a token: enough to tell whose it is."""

    position: int
    before: int
    """Hash of the tokens before it."""
    hash: int
    """Hash of them and itself."""


class HashingRunner(CountingRunner):
    """A model in little: each token depends on all before it, by what the blocks hold for them.

    It follows `StepInput`'s contract as a real rank does, by its own true lengths, which a step advances by as many
    tokens as it accepts (`accept`; all of them unless a test sets it). A row reads the keys that its tokens attend to,
    in each KV group from that group's blocks. They must be there, be of these positions and chain up to one another: a
    key that was not written, was overwritten or is another request's shows, here or in the answer.
    """

    BAD_TOKEN = 7
    """Drafted where a token will not be accepted; never sampled."""
    THE_STATE = -1
    """Where a block of a group with states keeps its only key: that of the last token that was computed into it."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.block_size = config.block_size
        self.groups = tuple(self.ready.kv_groups)
        """The KV groups. A window has at least 2 tokens. A block of a group with states holds one, and its rows of a
        step run side by side."""
        self.states_read: dict[int, set[int]] = {}
        """By block with a state, the slots whose rows have read it in this step."""
        self.states_written: dict[int, int] = {}
        """By block with a state, the slot whose row has written it in this step."""
        self.accept: Callable[[int], int] | None = None
        """Given a row's number of logits, how many of its tokens count."""
        self.force: Callable[[], int] | None = None
        """How many of the tokens that follow a row's are told ahead, as those that a grammar forces are."""
        self.forced_until: dict[int, int] = {}
        """By slot, the position of the last token that was told."""
        self.kv: dict[tuple[int, int], Key] = {}
        self.tables: dict[tuple[int, int], dict[int, int]] = {}
        """By KV group and slot, column → block."""
        self.slots: set[int] = set()
        self.tokens: dict[int, dict[int, int]] = {}
        """By slot, position → token: those that steps brought and those that were sampled."""
        self.num_short_rows = 0
        """Rows of which fewer tokens counted than had logits."""
        self.segments: dict[tuple[int, int], tuple[int, int, int]] = {}
        """By KV group and number: first key, end of the keys, and parent."""
        self.slot_segments: dict[tuple[int, int], int] = {}
        """By KV group and slot, the last segment."""
        self.adapters: dict[int, int] = {}
        """By place, the adapter that was loaded last."""
        self.adapter_places: dict[int, int] = {}
        """By slot, the place of its adapter; 0: it has none."""
        self.num_adapter_loads = 0
        self.merged_adapter = 0
        self.num_merges = 0
        self.num_shared = 0
        """Segments that steps read once for several rows."""
        self.num_prefixes = 0
        """Prefixes that chunks of a step shared."""
        self.num_copied = 0
        """Keys that were copied from one block to another."""
        self.num_early_copies = 0
        """Steps before which keys were copied."""

    def launch(self, step: StepInput) -> Output | None:
        self.apply(step)
        self.states_read.clear()
        self.states_written.clear()
        if step.shares_segments:
            self.check_segments([slot for slot, _, _ in rows_of(step)[: step.num_decodes]])
        self.check_prefixes(step)
        rows, bounds, row_limits = rows_of(step), unpack(step.seq_lens), unpack(step.row_limits)
        starts = [self.lens[slot] for slot, _, _ in rows]
        given: list[list[int]] = [[] for _ in rows]
        if step.key_copies and not step.copies_new_keys:
            self.copy_keys(step, [slot for slot, _, _ in rows])
            self.num_early_copies += 1
        # A real rank stores all keys before it reads any. Here the row that stores them comes before those that read.
        for row in sorted(range(len(rows)), key=starts.__getitem__):
            (slot, num_tokens, num_logits), bound = rows[row], bounds[row]
            assert slot in self.slots
            assert step.has_adapters or not self.adapter_places[slot]
            assert self.lens[slot] + num_tokens <= bound, "longer than the upper bound"
            assert self.accept or self.force or self.lens[slot] + num_tokens == bound
            if step.copies_new_keys:
                self.copy_keys(step, [slot])
            limit = row_limits[row] if row < len(row_limits) else None
            given[row] = self.compute(slot, num_tokens, num_logits, limit)
        tokens = [token for of_row in given for token in of_row]
        counts = [len(of_row) for of_row, (_, _, num_logits) in zip(given, rows, strict=True) if num_logits]
        if not self.is_output_rank:
            return None
        return Output(
            StepOutput(
                step_id=step.step_id,
                token_ids=pack(tokens),
                counts=pack(counts) if self.accept or row_limits else b"",
                forced=b"" if self.force is None else self.told([slot for slot, _, _ in rows], given),
                query_results=[self.read(step, starts, read) for read in step.queries],
            )
        )

    def told(self, slots: list[int], given: list[list[int]]) -> bytes:
        """Tell tokens that must follow those given; nothing may keep rows from giving them from now on."""
        numbers: list[int] = []
        index = -1
        for slot, of_row in zip(slots, given, strict=True):
            index += len(of_row)
            position = self.lens[slot]
            if not of_row or self.force is None:
                continue
            if (count := self.forced_until[slot] - position) <= 0:
                count = self.force()
            run: list[int] = []
            last = self.check_past(slot, position) if count else 0
            for at in range(position, position + count):
                key = self.key(slot, at, last, self.tokens[slot][at])
                self.tokens[slot][at + 1] = self.sample(slot, at, key)
                run.append(self.tokens[slot][at + 1])
                last = key.hash
            if run:
                self.forced_until[slot] = position + count
                numbers += (index, len(run), *run)
        return pack(numbers)

    def read(self, step: StepInput, starts: list[int], read: PromptQuery) -> PromptQueryResult:
        """What a real rank reads of some positions depends on all tokens up to each of them, and on its target."""
        slot, num_tokens, _ = rows_of(step)[read.row]
        assert read.row >= step.num_decodes
        assert 0 <= read.start < read.start + read.count <= num_tokens
        first = starts[read.row] + read.start
        hashes = [self.kv[self.place(0, slot, first + i)].hash % 1000 for i in range(read.count)]
        if not read.targets:
            return PromptQueryResult(hidden_sum=pack([sum(hashes)]))
        targets = unpack(read.targets)
        return PromptQueryResult(logprobs=pack([1000 * h + t for h, t in zip(hashes, targets, strict=True)]))

    def apply(self, step: StepInput) -> None:
        for slot in unpack(step.freed_slots):
            self.slots.discard(slot)
        if step.merged_adapter is not None:
            self.num_merges += step.merged_adapter != self.merged_adapter
            self.merged_adapter = step.merged_adapter
        for slot, place in zip(*[iter(unpack(step.adapter_moves))] * 2, strict=True):
            self.adapter_places[slot] = place
        for new in step.new_slots:
            assert new.slot not in self.slots, "the slot is taken"
            self.slots.add(new.slot)
            self.tokens[new.slot] = {}
            self.forced_until[new.slot] = 0
            for group in range(len(self.groups)):
                self.tables[group, new.slot] = {}
            self.adapter_places[new.slot] = new.adapter_place
        super().apply(step)
        for place, adapter in zip(*[iter(unpack(step.adapter_loads))] * 2, strict=True):
            self.adapters[place] = adapter
            self.num_adapter_loads += 1
        columns = (step.block_groups, step.block_slots, step.block_columns, step.block_ids)
        for group, slot, column, block in zip(*map(unpack, columns), strict=True):
            assert slot in self.slots
            assert block > 0 or self.groups[group].is_state
            self.tables[group, slot][column] = block
            if not block:
                del self.tables[group, slot][column]
        for slot, start, tokens in spans_of(step):
            assert slot in self.slots
            self.tokens[slot].update(enumerate(tokens, start))
        changed, of_slots = unpack(step.segments), unpack(step.slot_segments)
        for group, number, begin, end, parent in zip(*[iter(changed)] * 5, strict=True):
            assert number > 0 < end - begin
            self.segments[group, number] = begin, end, parent
        for group, slot, number in zip(*[iter(of_slots)] * 3, strict=True):
            self.slot_segments[group, slot] = number

    def check_segments(self, slots: list[int]) -> None:
        """Whatever decode rows see of a segment stands in the same blocks for all of them, and a row's segments follow
        each other."""
        for group, window in enumerate(group.window for group in self.groups):
            blocks: dict[tuple[int, int], int] = {}
            readers: dict[int, int] = {}
            for slot in slots:
                first_seen = 0 if window is None else max(0, self.lens[slot] + 1 - window)
                number = self.slot_segments.get((group, slot), 0)
                begin_of_next = None
                while number:
                    begin, end, parent = self.segments[group, number]
                    assert begin_of_next in (None, end)
                    assert begin % self.block_size == end % self.block_size == 0
                    assert end <= self.lens[slot]
                    readers[number] = readers.get(number, 0) + (end > first_seen)
                    for column in range(max(begin, first_seen) // self.block_size, end // self.block_size):
                        block = self.tables[group, slot][column]
                        assert blocks.setdefault((number, column), block) == block
                    number, begin_of_next = parent, begin
                assert begin_of_next is None or begin_of_next <= first_seen or begin_of_next == 0
            self.num_shared += sum(count > 1 for count in readers.values())

    def check_prefixes(self, step: StepInput) -> None:
        """The chunks of a group stand side by side, and hold the same blocks up to the end of what they share."""
        slots, end = unpack(step.slots), step.num_decodes
        for first, count, num_keys in zip(*[iter(unpack(step.shared_prefixes))] * 3, strict=True):
            assert first >= end
            assert count > 1
            assert num_keys % self.block_size == 0 < num_keys
            end = first + count
            assert all(num_keys <= self.lens[slot] for slot in slots[first:end])
            for group, of_group in enumerate(self.groups):
                if of_group.window is not None or of_group.span > 1:
                    continue
                for column in range(num_keys // self.block_size):
                    assert len({self.tables[group, slot][column] for slot in slots[first:end]}) == 1
            self.num_prefixes += 1
        assert end <= len(slots)

    def copy_keys(self, step: StepInput, slots: list[int]) -> None:
        """Copy the keys that some rows need. A real rank copies those of all rows at a time, before the step or when
        all of its keys are stored."""
        copies = [*zip(*[iter(unpack(step.key_copies))] * 5, strict=True)]
        read = {(source, offset) for _, source, _, first, end in copies for offset in range(first, end)}
        written = [(target, offset) for _, _, target, first, end in copies for offset in range(first, end)]
        assert len(written) == len(set(written))
        assert read.isdisjoint(written), "a copy of a copy"
        assert [copy[0] for copy in copies] == sorted(copy[0] for copy in copies)
        entering = {new.slot for new in step.new_slots}.intersection(slots)
        for group, source, target, first, end in copies:
            assert not self.groups[group].is_state
            assert 0 <= first < end <= self.block_size
            if any(target in self.tables[group, slot].values() for slot in entering):
                for offset in range(first, end):
                    self.kv[target, offset] = self.kv[source, offset]
                    self.num_copied += 1

    def compute(self, slot: int, num_tokens: int, num_logits: int, limit: int | None) -> list[int]:
        """Store the keys of a row's tokens, drafted ones included; the tokens that count, which lead up to `limit`
        computed ones."""
        start, known = self.lens[slot], self.tokens[slot]
        num_certain = num_tokens - max(0, num_logits - 1)  # the others are drafted
        count = num_logits if self.accept is None else self.accept(num_logits)
        assert 0 <= count <= num_logits
        if num_logits and start + num_certain <= self.forced_until[slot]:
            count = 1
        if limit is not None:
            count = min(count, limit - start)
        given: list[int] = []
        last = self.check_past(slot, start)
        for position in range(start, start + num_tokens):
            is_right = position < start + num_certain or len(given) < count
            token = known[position] if is_right else self.BAD_TOKEN
            key = self.key(slot, position, last, token)
            for group, of_group in enumerate(self.groups):
                if not of_group.is_state:
                    self.kv[self.place(group, slot, position)] = key
                elif num_logits > 1:  # where there are drafts, a state moves on when the tokens that count are known
                    self.states_read.setdefault(self.place(group, slot, max(0, start - 1))[0], set()).add(slot)
                    if position == start + count - 1:
                        self.kv[self.place(group, slot, position)[0], self.THE_STATE] = key
                elif position // self.block_size in self.tables[group, slot] or position == start + num_tokens - 1:
                    block, _ = self.place(group, slot, position)
                    self.kv[block, self.THE_STATE] = key
                    assert self.states_written.setdefault(block, slot) == slot, "two rows write one state"
                    assert self.states_read.get(block, {slot}) == {slot}, "another row of the step reads this state"
            last = key.hash
            if position >= start + num_tokens - num_logits and len(given) < count:
                known[position + 1] = self.sample(slot, position, key)
                given.append(known[position + 1])
        self.lens[slot] = start + num_tokens - num_logits + count
        self.num_short_rows += count < num_logits
        return given

    def key(self, slot: int, position: int, last: int, token: int) -> Key:
        """The key of a token behind others, of which `last` is the hash."""
        place = self.adapter_places[slot]
        assert not place or not self.merged_adapter, "an adapter at a place is added to another one's weights"
        adapter = self.adapters[place] if place else self.merged_adapter
        return Key(position, last, hash((last, token, adapter) if adapter else (last, token)))

    def check_past(self, slot: int, start: int) -> int:
        """Read what the token at `start` attends to; the hash of all tokens before it."""
        hashes = {0 if start == 0 else self.check_group(group, slot, start) for group in range(len(self.groups))}
        assert len(hashes) == 1, "KV groups hold different tokens"
        return hashes.pop()

    def check_group(self, group: int, slot: int, start: int) -> int:
        window = self.groups[group].window
        if self.groups[group].is_state:
            block, _ = self.place(group, slot, start - 1)
            assert self.states_written.get(block, slot) == slot, "a state of the same step"
            self.states_read.setdefault(block, set()).add(slot)
            state = self.kv[block, self.THE_STATE]
            assert state.position == start - 1, "a state behind another token"
            return state.hash
        first = 0 if window is None else max(0, start - window + 1)
        keys = [self.kv[self.place(group, slot, position)] for position in range(first, start)]
        before = keys[0].before
        assert first > 0 or before == 0
        for position, key in enumerate(keys, first):
            assert key.position == position, "keys of other positions"
            assert key.before == before, "keys of other requests"
            before = key.hash
        return before

    def sample(self, slot: int, position: int, key: Key) -> int:
        sampling = self.sampling[slot]
        if sampling.repetition_penalty != 1.0:
            assert all(p in self.tokens[slot] for p in range(position + 1)), "tokens that penalties must count"
        token = 100 + key.hash % 50
        if token in sampling.stop_ids and position + 1 - sampling.prompt_len < sampling.min_tokens:
            return 1000  # nobody stops on it
        return token

    def place(self, group: int, slot: int, position: int) -> tuple[int, int]:
        size = self.groups[group].span * self.block_size
        return self.tables[group, slot][position // size], position % size


class WindowedRunner(HashingRunner):
    """Has two KV groups, one of them with a window, and few blocks."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.groups = KVGroup(), KVGroup(6)
        self.ready = msgspec.structs.replace(self.ready, num_blocks=40, kv_groups=list(self.groups))


class OutOfMemoryRunner(HashingRunner):
    """Runs out of memory in the steps of NVCLI_TEST_STEPS, before it has stored anything; on the last rank only.

    The others wait for its part of the step.
    """

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.is_last = context.rank == config.num_ranks - 1
        self.bad_steps = range(*map(int, os.environ["NVCLI_TEST_STEPS"].split(",")))

    def launch(self, step: StepInput) -> Output | None:
        if step.step_id in self.bad_steps:
            if not self.is_last:
                time.sleep(600)
            self.apply(step)
            raise MemoryError(f"none left for step {step.step_id}" + ", of which torch has a lot to say" * 8)
        return super().launch(step)


class StuckRestartRunner(OutOfMemoryRunner):
    """Never ready where it follows one that ran out of memory."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        super().__init__(config, context)
        if config.kv_blocks_before is not None:
            assert (config.kv_blocks_before, config.max_num_batched_tokens) == (64, 16)
            context.report_phase("load weights")
            Path(os.environ["NVCLI_TEST_FOLDER"], f"rank-{context.rank}-loads-again").touch()
            time.sleep(600)


def create_model_runner_out_of_memory(config: EngineConfig, context: RankContext) -> Runner:
    """The real one; on the last rank the second layer runs out of memory in the forward passes of NVCLI_TEST_STEPS."""
    import torch

    from nvcli.worker.runner.model_runner import ModelRunner

    runner = ModelRunner(config, context)
    if context.rank < config.num_ranks - 1:
        return runner
    bad_passes = range(*map(int, os.environ["NVCLI_TEST_STEPS"].split(",")))
    layer = runner.model.model.layers["1"]  # type: ignore[union-attr,index]
    count = 0

    def fail(*args: object) -> None:
        nonlocal count
        count += 1
        if count in bad_passes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")

    layer.register_forward_pre_hook(fail)
    return runner


def create_model_runner_without_room(config: EngineConfig, context: RankContext) -> Runner:
    """The real one; another program takes the memory between its plan and its KV cache."""
    import torch

    from nvcli.worker.runner import model_runner

    class LargeCache(model_runner.KVCache):
        def __init__(self, spec: object, num_blocks: int, *args: object) -> None:
            if num_blocks > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")
            super().__init__(spec, num_blocks, *args)  # type: ignore[arg-type]

    model_runner.KVCache = LargeCache  # type: ignore[misc]
    return model_runner.ModelRunner(config, context)


class SlowRunner(CountingRunner):
    """A step takes a while, so that there is time to kill things."""

    def launch(self, step: StepInput) -> Output | None:
        time.sleep(0.02)
        return super().launch(step)


class CrawlingRunner(CountingRunner):
    """A step takes a second."""

    def launch(self, step: StepInput) -> Output | None:
        time.sleep(1.0)
        return super().launch(step)


class LaggingRunner(CountingRunner):
    """Rank 1 takes its time; nothing makes rank 0 wait for it."""

    def launch(self, step: StepInput) -> Output | None:
        if self.context.rank == 1:
            time.sleep(0.02)
        return super().launch(step)


class FailingRunner(CountingRunner):
    """Rank 1 (or the only rank) fails in step 5."""

    def launch(self, step: StepInput) -> Output | None:
        if step.step_id == 5 and self.context.rank == int(os.environ.get("NVCLI_TEST_RANK", "0")):
            raise ZeroDivisionError("as planned")
        return super().launch(step)


class StuckRunner(CountingRunner):
    """Rank 0 never finishes step 3."""

    def launch(self, step: StepInput) -> Output | None:
        if step.step_id == 3:
            time.sleep(600)
        return super().launch(step)


class UnloadableRunner(CountingRunner):
    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        raise LoadError("model.safetensors: tensor lm_head.weight is missing")


class UnloadableBesideWaitingRunner(CountingRunner):
    """Rank 1 cannot be loaded; rank 0 waits for it."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        if context.rank == 1:
            raise LoadError("model.safetensors: tensor lm_head.weight is missing")
        time.sleep(600)


class DiesLoadingRunner(CountingRunner):
    """Rank 1 dies while it loads; rank 0 would load for ever."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


class SlowWarmUpRunner(CountingRunner):
    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("warm up")
        Path(os.environ["NVCLI_TEST_FOLDER"], f"rank-{context.rank}-warms-up").touch()
        time.sleep(600)


class SlowStartRunner(CountingRunner):
    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        context.report_phase("load weights")
        time.sleep(600)
