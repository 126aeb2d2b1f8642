"""A workload from a file: its rows as `generate` prepares them, with answers of fixed lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvcli.core.config import RunConfig
from nvcli.engine.request import Request
from nvcli.errors import ConfigError
from nvcli.job.files import STREAM, check_inputs, expand_inputs
from nvcli.job.input.fetch import fetch_inputs
from nvcli.job.input.reader import RowReader
from nvcli.job.job import JobResult
from nvcli.job.run.chat_choice import choose_chat
from nvcli.job.run.open_rows import OpenRow
from nvcli.job.run.resolve import make_parser, own_chat_template, sampling_defaults
from nvcli.job.run.several_prompts import split_rows
from nvcli.job.text.chat_renderer import ChatRenderer
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.tokenizer import Tokenizer, check_tokenizer_files, has_chat_template
from nvcli.models.config import ModelConfig


def prepared_rows(
    run: RunConfig, model_path: Path, model: ModelConfig, input_file: str, *, limit: int | None = None
) -> Iterator[PreparedRow | JobResult]:
    """Yield the rows of a file as `generate` prepares them, and the results of those that would become error rows.

    Imports the tokenizer, which takes seconds. Raises ConfigError and LoadError.
    """
    inputs = expand_inputs([input_file], STREAM)
    check_inputs(inputs)
    inputs = fetch_inputs(inputs)
    check_tokenizer_files(model_path)
    limits = ModelLimits(
        max_model_len=run.max_model_len or model.max_position_embeddings,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        on_too_long=run.job.on_too_long,
        special_tokens=run.job.special_tokens,
    )
    template = own_chat_template(run.job)
    has_template = has_chat_template(model_path) if template is None else bool(template)
    chat = choose_chat(run, is_task=False, has_chat_template=has_template)
    parser = make_parser(run.job, sampling_defaults(run, model), chat=chat, has_chat_template=has_template)
    with closing(ChatRenderer(model_path, chat_template=template)) as chat_renderer:
        preparer = Preparer(Tokenizer.load(model_path, chat_template=template), limits, chat_renderer.render)
        reader = RowReader(inputs, parser, limit=limit, check_columns=run.job.check_columns)
        for rows in reader.batches():
            for some in split_rows(rows):
                yield from preparer.prepare(some)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWorkload:
    """The rows of a file. Each answer has exactly its row's `max_tokens`; nothing ends it early."""

    input: str
    num_rows: int | None = None
    """Number of rows, from the first; None: all."""
    output_len: tuple[int, int] = (100, 1024)
    """The range of answer tokens for rows without `max_tokens`: uniform, ends included, and within `max_model_len`."""
    seed: int = 0

    def requests(
        self, run: RunConfig, model_path: Path, model: ModelConfig, *, say: Callable[[str], None]
    ) -> list[Request]:
        """Return a request for each sample of each row. Rows that would become error rows are skipped and reported to
        `say`.

        Imports the tokenizer, which takes seconds. Raises ConfigError if no row is left, and LoadError.
        """
        rng = random.Random(self.seed)
        requests: list[Request] = []
        failed: list[JobResult] = []
        for row in prepared_rows(run, model_path, model, self.input, limit=self.num_rows):
            if isinstance(row, PreparedRow):
                requests += OpenRow(self._with_fixed_length(row, rng), len(requests)).request(self.seed).samples()
            else:
                failed.append(row)
        reason = failed[0].error.message if failed and failed[0].error is not None else "it has no rows"
        if not requests:
            raise ConfigError(f"--input {self.input} has no row that can be answered: {reason}")
        if failed:
            say(f"{self.input}: {len(failed)} rows cannot be answered and are left out; the first: {reason}")
        return requests

    def _with_fixed_length(self, row: PreparedRow, rng: random.Random) -> PreparedRow:
        sampling = msgspec.structs.replace(row.sampling, ignore_eos=True, stop=[], stop_token_ids=[], min_tokens=0)
        drawn = rng.randint(*self.output_len) if sampling.max_tokens is None else row.max_tokens
        return msgspec.structs.replace(row, max_tokens=min(drawn, row.max_tokens), stop_ids=[], sampling=sampling)
