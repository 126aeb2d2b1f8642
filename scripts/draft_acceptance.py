"""Counts how many drafts are right in real text: the tokens that rows would get in a step. No model runs.

    python scripts/draft_acceptance.py ROWS.jsonl --tokenizer FOLDER [--drafts 2,4,8,15] [--running 16] [--alone]

A line of the file has a `prompt` and the `answer` that a model is to be assumed to give, both texts. So many rows at a
time are answered step by step, by the drafter of a run (its plain torch, `nvcli.kernels.drafts`): every step drafts
that many tokens for each row, keeps those that the answer goes on with, and gives one more. With `--alone` no drafts
are from other answers. A line is printed for each number of drafts: tokens a step, and the drafted and the right tokens
by what they were drafted from.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nvcli.core.engine_config import ANSWER_TABLE_BYTES
from nvcli.core.messages import DRAFT_SOURCES
from nvcli.kernels.answer_table import empty_answer_table, enter_answer, forget_answers, refill_answers
from nvcli.kernels.drafts import find_drafts
from nvcli.kernels.step_tensors import AnswerTable, DraftRows, SlotState, StepRows


@dataclass(frozen=True, slots=True)
class Row:
    """A row's tokens: the prompt's, then the answer's."""

    tokens: Tensor
    num_prompt: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--drafts", default="2,4,8,15", help="numbers of drafts [default: 2,4,8,15]")
    parser.add_argument("--running", type=int, default=16, help="rows at a time [default: 16]")
    parser.add_argument("--alone", action="store_true", help="no drafts from other answers")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    rows = [read_row(line, tokenizer) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    print(f"{len(rows):,} rows, {sum(len(row.tokens) - row.num_prompt for row in rows):,} tokens of answers")
    for text in args.drafts.split(","):
        tokens_per_step, drafted, right = draft(rows, int(text), num_slots=args.running, is_alone=args.alone)
        sources = ", ".join(
            f"{source} {r:,} of {d:,}" for source, d, r in zip(DRAFT_SOURCES, drafted, right, strict=False)
        )
        print(f"{text:>3} drafts: {tokens_per_step:.2f} tokens a step ({sources})", flush=True)


def read_row(line: str, tokenizer: Tokenizer) -> Row:
    """Tokenize a line of the file."""
    row = json.loads(line)
    prompt, answer = (tokenizer.encode(row[key], add_special_tokens=False).ids for key in ("prompt", "answer"))
    if not prompt or not answer:
        raise SystemExit(f"every row needs a prompt and an answer, but one is {line[:80]}")
    return Row(torch.tensor(prompt + answer, dtype=torch.int32), len(prompt))


def draft(rows: list[Row], most: int, *, num_slots: int, is_alone: bool) -> tuple[float, list[int], list[int]]:
    """Answer all rows. Return the tokens that a row gets in a step, and the drafted and the right tokens by source."""
    longest = max(len(row.tokens) for row in rows)
    state = SlotState(
        lengths=torch.zeros(num_slots + 1, dtype=torch.int32),
        token_ids=torch.zeros(num_slots + 1, longest + most, dtype=torch.int32),
        block_tables=torch.zeros(1, num_slots + 1, 1, dtype=torch.int32),
        block_size=1,
    )
    answers = empty_answer_table(ANSWER_TABLE_BYTES, num_slots + 1, torch.device("cpu"))
    waiting, running = rows[::-1], dict[int, Row]()
    num_steps = num_tokens = 0
    drafted, right = [0] * len(DRAFT_SOURCES), [0] * len(DRAFT_SOURCES)
    while waiting or running:
        for slot in set(range(num_slots)) - running.keys():
            if waiting:
                row = running[slot] = waiting.pop()
                slots, lengths = torch.tensor([[slot], [row.num_prompt]], dtype=torch.int32)
                refill_answers(answers, state, slots, lengths)
                state.lengths[slot] = row.num_prompt - 1
                state.token_ids[slot, : row.num_prompt] = row.tokens[: row.num_prompt]
        if is_alone:
            forget_answers(answers)
        slots = torch.tensor(list(running), dtype=torch.int32)
        found = look_up(slots, most, state, answers)
        for slot, num_drafts, source in zip(slots.tolist(), found[0].tolist(), found[1].tolist(), strict=True):
            tokens, first = running[slot].tokens, int(state.lengths[slot]) + 1
            given = tokens[first : first + num_drafts]
            is_right = given == state.token_ids[slot, first : first + len(given)]
            num_right = int(is_right.int().cumprod(0).sum())
            count = min(num_right + 1, len(tokens) - first)
            state.token_ids[slot, first : first + count] = tokens[first : first + count]
            state.lengths[slot] = first - 1 + count
            enter_answer(answers, state, slot, first)
            drafted[source] += num_drafts
            right[source] += num_right
            num_tokens += count
            num_steps += 1
            if first + count == len(tokens):
                del running[slot]
    return num_tokens / num_steps, drafted, right


def look_up(slots: Tensor, most: int, state: SlotState, answers: AnswerTable) -> tuple[Tensor, Tensor]:
    """Draft up to `most` tokens for each slot; return their numbers and what they are from."""
    none = torch.zeros(len(slots) + 1, dtype=torch.int32)
    rows = StepRows(slots, *[none] * 4)
    drafts = DraftRows(none, torch.full_like(slots, most), *[torch.zeros_like(slots) for _ in range(4)])
    find_drafts(rows, state, drafts, answers)
    return drafts.num_drafts, drafts.sources


if __name__ == "__main__":
    main()
