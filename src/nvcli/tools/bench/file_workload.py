"""A workload from a file: its rows as `generate` prepares them, with answers of fixed lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from nvcli.core.byte_sizes import counted
from nvcli.engine.request import Request
from nvcli.errors import ConfigError
from nvcli.job.files import STREAM, check_inputs, expand_inputs
from nvcli.job.images.pdf_files import count_pages_of_inputs
from nvcli.job.input.column_check import ColumnsError
from nvcli.job.input.fetch import fetch_inputs
from nvcli.job.input.reader import RowReader
from nvcli.job.job import JobResult
from nvcli.job.run.image_settings import check_reads_pdfs
from nvcli.job.run.open_rows import OpenRow
from nvcli.job.run.resolve import ResolvedModel
from nvcli.job.text.prepare import PreparedRow
from nvcli.job.text.tokenizer import check_tokenizer_files


def prepared_rows(
    model: ResolvedModel, input_file: str, *, limit: int | None = None
) -> Iterator[PreparedRow | JobResult]:
    """Yield the rows of a file as `generate` prepares them, and the results of those that would become error rows.
    Rows with structured answers are among the latter.

    Imports the tokenizer, which takes seconds. Raises ConfigError and LoadError.
    """
    inputs = expand_inputs([input_file], STREAM)
    check_inputs(inputs)
    inputs = fetch_inputs(inputs)
    check_reads_pdfs(model.run, model.model_path, model.model, inputs)
    check_tokenizer_files(model.model_path)
    parser = model.make_parser(model.choose_chat())
    pdfs = count_pages_of_inputs(inputs)
    reader = RowReader(inputs, parser, limit=limit, check_columns=model.run.job.check_columns, pdfs=pdfs)
    try:
        for rows in model.prepare(reader, model.load_tokenizer(), has_grammars=False):
            yield from rows
    except ColumnsError as error:
        raise error.in_settings() from None


def answerable_rows(
    model: ResolvedModel, input_file: str, *, limit: int | None, say: Callable[[str], None], way_out: str = ""
) -> list[PreparedRow]:
    """Return the rows of a file that can be answered, and report others to `say`. Raises as `prepared_rows` does, and
    ConfigError if no row is left, with `way_out` after it."""
    rows: list[PreparedRow] = []
    reasons: list[str] = []
    for row in prepared_rows(model, input_file, limit=limit):
        if isinstance(row, PreparedRow):
            rows.append(row)
        elif row.error is not None:
            reasons.append(row.error.message)
    reason = reasons[0] if reasons else "it has no rows"
    if not rows:
        among = "" if limit is None else f" among its first {limit:,}"
        raise ConfigError(f"{input_file} has no row{among} that can be answered: {reason}{way_out}")
    if reasons:
        say(f"{input_file}: left out {counted(len(reasons), 'row')} that cannot be answered; the first: {reason}")
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWorkload:
    """The rows of a file. Each answer has exactly its row's `max_tokens`; nothing ends it early."""

    input: str
    num_rows: int | None = None
    """Number of rows, from the first; None: all."""
    output_len: tuple[int, int] = (100, 1024)
    """The range of answer tokens for rows without `max_tokens`: uniform, ends included, and within `max_model_len`."""
    seed: int = 0

    def requests(self, model: ResolvedModel, *, say: Callable[[str], None]) -> list[Request]:
        """Return a request for each sample of each row. Rows that would become error rows are skipped and reported to
        `say`.

        Imports the tokenizer, which takes seconds. Raises ConfigError if no row is left, and LoadError.
        """
        rng = random.Random(self.seed)
        requests: list[Request] = []
        for row in answerable_rows(model, self.input, limit=self.num_rows, say=say):
            requests += OpenRow(self._with_fixed_length(row, rng), len(requests)).request(self.seed).samples()
        return requests

    def _with_fixed_length(self, row: PreparedRow, rng: random.Random) -> PreparedRow:
        sampling = msgspec.structs.replace(row.sampling, ignore_eos=True, stop=[], stop_token_ids=[], min_tokens=0)
        drawn = rng.randint(*self.output_len) if sampling.max_tokens is None else row.max_tokens
        return msgspec.structs.replace(row, max_tokens=min(drawn, row.max_tokens), stop_ids=[], sampling=sampling)
