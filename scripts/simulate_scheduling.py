"""Simulates what planning and scheduling make of a job: steps, preemptions, filled slots, modelled seconds.

    python scripts/simulate_scheduling.py [--jobs uniform groups ...] [--seqs 256] [--kv-tokens 745000]
                                          [--order completion] [--known] [--read-once] [--greedy] [--accept-rate 0.7]

Planner, scheduler and block manager are the real ones; the model is not there. A row's answer has a length that only
the simulation knows: it ends with a stop id. Steps take the time that they would take Qwen3-8B in bfloat16 on an H200:
matrix products as measured (microseconds by number of rows), keys and values at the memory's speed, the attention of
prompts at the speed of its kernel. So figures of one model can be compared with each other, and with nothing else.
With `--accept-rate` the policy `auto` drafts, each draft is right with that probability, and the first step of a shape
takes as long as a graph's capture. `slots` and `KV` are the percentages of slots and of KV blocks that are in use, over
the modelled time; `again` are tokens that were computed again after a preemption; `late` is the most finished rows that
wait for an earlier one.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmark import Case, Figures, run_benchmark
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.messages import EngineReady, StepInput, StepOutput, pack, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.draft_costs import size_of
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import Request, StepRecord
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.step_recorder import StepRecorder
from nvcli.job.job import RowContext
from nvcli.job.planning.planner import Planner
from nvcli.job.run.plan import make_planner
from nvcli.job.text.prepare import PreparedRow
from plain_config import plain_config

BLOCK_SIZE = 64
MAX_MODEL_LEN = 40_960
STOP_ID = 1
LAYERS = 36
KEY_BYTES = 147_456
"""Keys and values of one token in all layers."""
FLOPS_PER_PAIR = 589_824
MATRIX_MICROSECONDS = [(1, 107), (64, 113), (128, 119), (256, 157), (512, 271), (1024, 529), (8192, 4584)]
"""A layer's matrix products, by number of rows."""
BYTES_PER_SECOND = 4.2e12
PREFILL_FLOPS_PER_SECOND = 4.0e14
HEAD_BYTES, HEAD_WEIGHTS = 1.24e9, 0.62e9
CAPTURE_SECONDS = 0.03
"""How long the device waits for the capture of a graph in the middle of a run."""
READY: dict[str, Any] = {
    "num_blocks": 1,
    "block_size": BLOCK_SIZE,
    "kv_cache_bytes": 1,
    "kv_cache_tokens": 1,
    "weight_bytes": 1,
    "attention_backend": "",
    "seconds": {},
}


def step_seconds(step: StepRecord, rows: int, *, reads_once: bool) -> float:
    """Model the device's time for a step of `rows` tokens."""
    at = min(max(bisect_right(MATRIX_MICROSECONDS, (rows, 0)), 1), len(MATRIX_MICROSECONDS) - 1)
    (low, fast), (high, slow) = MATRIX_MICROSECONDS[at - 1 : at + 1]
    matrices = LAYERS * max(107.0, fast + (slow - fast) * (rows - low) / (high - low)) * 1e-6
    head = max(HEAD_BYTES / BYTES_PER_SECOND, 2 * HEAD_WEIGHTS * step.num_sampled / 7e14)
    keys = step.decode_keys - (step.repeated_decode_keys if reads_once else 0)
    decode = keys * KEY_BYTES / BYTES_PER_SECOND
    prefill_keys = step.prefill_keys - (step.repeated_prefill_keys if reads_once else 0)
    prefill = max(
        prefill_keys * KEY_BYTES / BYTES_PER_SECOND, step.prefill_pairs * FLOPS_PER_PAIR / PREFILL_FLOPS_PER_SECOND
    )
    return matrices + head + decode + prefill + 2.5e-6 * rows + 0.3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the job, and the length that its answers will have."""

    prompt: list[int]
    length: int
    max_tokens: int | None = None
    n: int = 1


class Lengths:
    """An executor that ends each answer at its length, by the row's number, and takes the modelled time."""

    def __init__(self, rows: list[Row], limits: SchedulerLimits, *, accept_rate: float, reads_once: bool) -> None:
        self._rows, self._accept_rate, self._reads_once = rows, accept_rate, reads_once
        self._rng = random.Random(0)
        self._recorder = StepRecorder(limits)
        self._lens: dict[int, int] = {}
        """Slot → computed tokens of its request."""
        self._ends: dict[int, int] = {}
        """Slot → the length of prompt and answer at which the answer ends."""
        self._captured: set[tuple[int, float]] = set()
        """(size, tokens per row) of each shape with drafts that has run."""
        self._outputs: deque[StepOutput] = deque()

    def submit(self, step: StepInput) -> None:
        for new in step.new_slots:
            self._ends[new.slot] = new.sampling.prompt_len + self._rows[new.sampling.row].length
            self._lens[new.slot] = new.num_cached_tokens
        limits = unpack(step.row_limits) if step.row_limits else [MAX_MODEL_LEN] * step.num_decodes
        limits = [*limits, *[MAX_MODEL_LEN] * (step.num_rows - step.num_decodes)]
        tokens: list[int] = []
        counts: list[int] = []
        rows = zip(unpack(step.slots), unpack(step.num_tokens), unpack(step.num_logits), limits, strict=True)
        for slot, num_tokens, num_logits, limit in rows:
            self._lens[slot] += num_tokens - num_logits
            if num_logits:
                count = 1
                while count < num_logits and self._rng.random() < self._accept_rate:
                    count += 1
                counts.append(max(0, min(count, limit - self._lens[slot])) if num_logits > 1 else 1)
                length = self._lens[slot]
                self._lens[slot] += counts[-1]
                places = range(length + 1, length + 1 + counts[-1])
                tokens += [STOP_ID if place + 1 >= self._ends[slot] else 5 for place in places]
        self._recorder.submitted(step, num_used_blocks=0)
        self._recorder.collected(StepOutput(step_id=step.step_id, token_ids=b""))
        (record,) = self._recorder.take()
        output = StepOutput(
            step_id=step.step_id,
            token_ids=pack(tokens),
            counts=pack(counts) if step.row_limits else b"",
            seconds=step_seconds(record, step.total_tokens, reads_once=self._reads_once),
            idle_seconds=self._capture_seconds(step),
        )
        self._outputs.append(output)

    def _capture_seconds(self, step: StepInput) -> float:
        """Return how long the device waits for the graph of a step with drafts."""
        if not step.row_limits:
            return 0.0
        shape = size_of(step.num_decodes), round(sum(unpack(step.num_tokens)[: step.num_decodes]) / step.num_decodes, 1)
        is_new = shape not in self._captured
        self._captured.add(shape)
        return CAPTURE_SECONDS * is_new

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        raise AssertionError("no step runs out of memory")


@dataclass(slots=True)
class Outcome:
    """The totals of a simulated run."""

    seconds: float = 0.0
    steps: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    """Tokens of prefill chunks, those that were computed again included."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    slot_seconds: float = 0.0
    kv_seconds: float = 0.0
    finished_out_of_order: int = 0
    """The most finished rows that waited for an earlier one."""


def simulate(
    rows: list[Row],
    *,
    seqs: int,
    kv_tokens: int,
    batched_tokens: int = 8192,
    order: str = "completion",
    reads_once: bool = False,
    plans_admission: bool = True,
    accept_rate: float | None = None,
) -> Outcome:
    """Run a job, fed as the parent's loop feeds a replica.

    Without `plans_admission` requests are admitted as long as blocks are free. `accept_rate` None: nothing is drafted.
    """
    settings = plain_config(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched_tokens,
        block_size=BLOCK_SIZE,
        plan_admission=plans_admission,
        max_draft_tokens=0 if accept_rate is None else 7,
        draft_accept_rate=accept_rate,
    )
    ready = EngineReady(**READY, max_draft_step_tokens=settings.max_draft_step_tokens)
    limits = scheduler_limits(settings, ready)
    scheduler = Scheduler(limits, BlockManager(kv_tokens // BLOCK_SIZE))
    executor = Lengths(rows, limits, accept_rate=accept_rate or 0.0, reads_once=reads_once)
    core = EngineCore(scheduler, executor, max_in_flight=2, recorder=StepRecorder(limits))
    run = RunConfig(model="", max_num_seqs=seqs, job=JobConfig(order=order))  # type: ignore[arg-type]
    planner = make_planner(run, settings, 1)
    source = prepared(rows)
    outcome = Outcome()
    held: dict[int, int] = {}
    """Request id → row."""
    left = [row.n for row in rows]
    done: set[int] = set()
    next_row = next_id = 0
    exhausted = False
    while True:
        exhausted = exhausted or fill(planner, source)
        requests = []
        while len(held) < 2 * seqs and (row := planner.take(0)) is not None:
            request = request_of(row, next_id)
            next_id += request.n
            held.update(dict.fromkeys(range(request.request_id, next_id), row.context.index))
            requests.append(request)
        core.scheduler.add(requests)
        if not core.has_work:
            break
        for output in core.step():
            index = held.pop(output.request_id)
            assert output.finish_reason in ("stop", "length"), output.error
            outcome.output_tokens += len(output.token_ids) // 4
            outcome.cached_tokens += output.num_cached_tokens
            outcome.prompt_tokens += len(rows[index].prompt)
            left[index] -= 1
            if not left[index]:
                done.add(index)
        while next_row in done:
            done.remove(next_row)
            next_row += 1
        outcome.finished_out_of_order = max(outcome.finished_out_of_order, len(done))
        for record in core.take_records():
            seconds = record.seconds + record.idle_seconds
            outcome.seconds += seconds
            outcome.steps += 1
            outcome.computed_tokens += record.num_prefill_tokens
            outcome.slot_seconds += seconds * (record.num_decodes + record.num_chunks) / seqs
            outcome.kv_seconds += seconds * record.num_used_blocks * BLOCK_SIZE / kv_tokens
    outcome.preemptions = core.scheduler.stats.num_preemptions
    return outcome


def prepared(rows: list[Row]) -> Iterator[PreparedRow]:
    for index, row in enumerate(rows):
        yield PreparedRow(
            context=RowContext(id=index, index=index, line=f"line {index + 1}"),
            prompt_ids=pack(row.prompt),
            num_prompt_tokens=len(row.prompt),
            max_tokens=row.max_tokens or MAX_MODEL_LEN - len(row.prompt),
            stop_ids=[STOP_ID],
            sampling=SamplingParams(max_tokens=row.max_tokens, n=row.n),
            num_bytes=200 + 4 * len(row.prompt),
        )


def fill(planner: Planner, source: Iterator[PreparedRow]) -> bool:
    """Fill the planner's window; return whether all rows were read."""
    while not planner.is_full:
        row = next(source, None)
        if row is None:
            return True
        planner.add(row)
    return False


def request_of(row: PreparedRow, request_id: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=row.prompt_ids,
        max_tokens=row.max_tokens,
        sampling=row.sampling,
        stop_ids=row.stop_ids,
        seed=0,
        row=row.context.index,
        sample=0,
        n=row.sampling.n,
    )


class Jobs:
    """The kinds of jobs; each method makes one."""

    def __init__(self, seed: int, *, known: bool) -> None:
        """`known`: rows say how long their answers will be, by `max_tokens`."""
        self._rng = random.Random(seed)
        self._known = known

    def _row(self, prompt: list[int], length: int, cap: int | None = None, **fields: int) -> Row:
        length = max(1, length if cap is None else min(length, cap))
        return Row(prompt=prompt, length=length, max_tokens=length if self._known else cap, **fields)

    def _tokens(self, low: int, high: int) -> list[int]:
        first = self._rng.randrange(1 << 30)
        return list(range(first, first + self._rng.randint(low, high)))

    def _around(self, mean: float, sigma: float = 0.7) -> int:
        return int(mean * self._rng.lognormvariate(-sigma * sigma / 2, sigma))

    def uniform(self) -> list[Row]:
        """4,096 prompts and answers of 100 to 1,024 tokens."""
        return [self._row(self._tokens(100, 1024), self._rng.randint(100, 1024), 1024) for _ in range(4096)]

    def unsaid(self) -> list[Row]:
        """The same with answers of about 400 tokens, and no `max_tokens`."""
        return [self._row(self._tokens(100, 1024), self._around(400)) for _ in range(4096)]

    def prompts(self) -> list[Row]:
        """400 long prompts of 8,000 to 24,000 tokens with answers of about 250."""
        return [self._row(self._tokens(8000, 24000), self._around(250), 1024) for _ in range(400)]

    def thoughts(self) -> list[Row]:
        """1,500 short prompts with answers of about 4,000 tokens, of at most 16,384."""
        return [self._row(self._tokens(50, 300), self._around(4000), 16384) for _ in range(1500)]

    def fixed(self) -> list[Row]:
        """2,000 short prompts with answers of 3,000 tokens each."""
        return [self._row(self._tokens(50, 300), 3000, 3000) for _ in range(2000)]

    def groups(self) -> list[Row]:
        """64 groups of 64 rows with 2,048 tokens in common, in random order, with answers of about 300."""
        prefixes = [self._tokens(2048, 2048) for _ in range(64)]
        rows = [self._row(prefixes[i % 64] + self._tokens(64, 64), self._around(300), 1024) for i in range(4096)]
        self._rng.shuffle(rows)
        return rows

    def nested(self) -> list[Row]:
        """1,024 tokens in common, 8 variants of 1,024 more and 8,000 tokens of 20 documents in each."""
        common = self._tokens(1024, 1024)
        variants = [common + self._tokens(1024, 1024) for _ in range(8)]
        documents = [variant + self._tokens(8000, 8000) for variant in variants for _ in range(20)]
        rows = [self._row(documents[i % 160] + self._tokens(40, 80), self._around(200), 800) for i in range(1600)]
        self._rng.shuffle(rows)
        return rows

    def samples(self) -> list[Row]:
        """128 prompts of 200 tokens with 64 answers of 512 tokens each."""
        return [self._row(self._tokens(200, 200), 512, 512, n=64) for _ in range(128)]

    def halves(self) -> list[Row]:
        """600 long prompts with short answers, then 1,200 short prompts with long answers."""
        first = [self._row(self._tokens(4000, 8000), self._around(30), 100) for _ in range(600)]
        return first + [self._row(self._tokens(50, 300), self._around(800), 2000) for _ in range(1200)]

    def tail(self) -> list[Row]:
        """512 prompts of 100 to 1,024 tokens with answers of 50 to 8,000."""
        return [self._row(self._tokens(100, 1024), self._rng.randint(50, 8000), 8192) for _ in range(512)]


def measure(kind: str, options: argparse.Namespace, number: int) -> Figures:
    make: Callable[[], list[Row]] = getattr(Jobs(0, known=options.known), kind)
    outcome = simulate(
        make(),
        seqs=options.seqs,
        kv_tokens=options.kv_tokens,
        batched_tokens=options.batched_tokens,
        order=options.order,
        reads_once=options.read_once,
        plans_admission=not options.greedy,
        accept_rate=options.accept_rate,
    )
    least = outcome.prompt_tokens - outcome.cached_tokens
    return {
        "seconds": outcome.seconds,
        "tokens/s": outcome.output_tokens / outcome.seconds,
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
        "again": outcome.computed_tokens - least,
        "slots": 100 * outcome.slot_seconds / outcome.seconds,
        "KV": 100 * outcome.kv_seconds / outcome.seconds,
        "computed": least,
        "prompt tokens": outcome.prompt_tokens,
        "late": outcome.finished_out_of_order,
    }


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    for kind in options.jobs:
        yield Case(kind, partial(measure, kind, options))


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = [name for name in vars(Jobs) if not name.startswith("_")]
    parser.add_argument("--jobs", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=745_000)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--order", default="completion", choices=("completion", "input"))
    parser.add_argument("--known", action="store_true", help="each row's max_tokens is the length of its answer")
    parser.add_argument("--read-once", action="store_true", help="shared keys are read once for a step")
    parser.add_argument("--accept-rate", type=float, help="share of drafts that are right [default: none are made]")
    parser.add_argument("--greedy", action="store_true", help="admit requests as long as blocks are free")


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options)
