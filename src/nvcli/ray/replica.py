"""Replica: an LLM that answers tables. Ray Data makes one in each of its actors.

A row gets the same answer whichever actor computes it, and when it is recomputed. Its random numbers follow from its
own values and not from its position, which differs from batch to batch: so equal rows get equal answers, unless their
ids differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import pyarrow

from nvcli.core.config import RunConfig
from nvcli.core.config_types import MAX_INT64
from nvcli.errors import ClosedError, ConfigError, WorkerError
from nvcli.job.output.parquet_output import ANSWER_TYPES, fit_row
from nvcli.job.rows.conversation import CONVERSATION_KEYS
from nvcli.job.rows.raw_values import without_nulls
from nvcli.job.rows.row_warnings import RowWarnings
from nvcli.job.run.engines import StartEngine, start_engine
from nvcli.job.run.row_settings import row_keys
from nvcli.llm.answer import Answer
from nvcli.llm.llm import LLM, log_note

COLUMNS = ("choices", "usage", "error")
"""The columns that answers add."""
MAX_DEATHS = 3
"""Engine deaths in a row, without an answered batch between them, after which the actor fails."""
_NO_SEED = (None, -1)


class Replica:
    """One LLM and the batches that it answers, several at a time."""

    def __init__(self, run: RunConfig, start: StartEngine = start_engine) -> None:
        """Load the model. Raises ConfigError, LoadError, CapacityError or WorkerError."""
        self._run = run
        self._start = start
        self._keys = row_keys(run.job)
        self._lock = threading.Lock()
        self._num_deaths = 0
        self._warned: set[str] = set()
        self._llm = self._load()

    async def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Answer a batch, concurrently with others."""
        return await asyncio.to_thread(self.answer, table)

    def answer(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return the table with the answers' columns added. Raises ConfigError if it has such columns already."""
        self._check_columns(table.column_names)
        rows = self._rows_of(table)
        answers = self._answers(rows)
        for answer in answers:
            fit_row(answer)
        for name in COLUMNS:
            column = pyarrow.array([answer[name] for answer in answers], ANSWER_TYPES[name])
            table = table.append_column(name, column)
        return table

    def close(self) -> None:
        """End the engine."""
        self._llm.close()

    def _load(self) -> LLM:
        return LLM.from_config(self._run, start=self._start)

    def _answers(self, rows: list[dict[str, Any]]) -> list[Answer]:
        """Answer rows, with a new LLM if the engine dies. Raises the error of an engine that keeps dying."""
        while True:
            llm = self._llm
            try:
                answers = list(llm.generate(rows, order="input"))
            except (WorkerError, ClosedError) as error:
                self._replace(llm, error)
            else:
                self._num_deaths = 0
                return answers

    def _replace(self, dead: LLM, error: WorkerError | ClosedError) -> None:
        """Reload the model after an engine has died, unless another batch has done so."""
        with self._lock:
            if self._llm is not dead:
                return
            self._num_deaths += 1
            if self._num_deaths > MAX_DEATHS:
                raise error
            logging.getLogger("nvcli").warning("an engine died; its rows are recomputed: %s", error)
            dead.close()
            self._llm = self._load()

    def _rows_of(self, table: pyarrow.Table) -> list[dict[str, Any]]:
        """Return the rows' columns that concern nvcli, without nulls; a row gets its own seed unless the job has
        one."""
        keys, job = self._keys, self._run.job
        has_template = job.prompt_template is not None or bool(job.messages_template)
        names = {*keys.prompts, *keys.beside_prompt, *CONVERSATION_KEYS}
        # A template may name any column; otherwise, columns that do not affect the answer are not decoded.
        wanted = [name for name in table.column_names if has_template or name in names]
        rows: list[dict[str, Any]] = [without_nulls(row) for row in table.select(wanted).to_pylist()]
        if not wanted:
            rows = [{} for _ in range(table.num_rows)]
        for row in rows:
            if self._run.sampling.get("seed") in _NO_SEED:
                self._give_seed(row)
            row.pop(keys.id, None)  # a dataset does not need ids that differ
        return rows

    def _give_seed(self, row: dict[str, Any]) -> None:
        sampling = row.get(self._keys.sampling, {})
        if isinstance(sampling, dict) and sampling.get("seed") in _NO_SEED:
            with contextlib.suppress(RecursionError):  # nested too deeply: it becomes an error
                row[self._keys.sampling] = {**sampling, "seed": row_seed(row, self._run.seed)}

    def _check_columns(self, names: list[str]) -> None:
        """Raise ConfigError for columns that collide with answers, and warn once about those that look like
        settings."""
        for name in names:
            if name in COLUMNS:
                raise ConfigError(
                    f"the dataset has a column `{name}`, as do the answers; rename it: "
                    f'ds.rename_columns({{"{name}": …}})'
                )
        warnings = RowWarnings()
        warnings.add_keys(set(names) - self._warned, "the dataset", is_native=True)
        self._warned.update(names)
        for warning in warnings.take_new():
            log_note(warning)


def row_seed(row: Mapping[str, Any], seed: int) -> int:
    """Derive a row's seed from its values and the run's seed."""
    data = msgspec.json.encode([seed, row], enc_hook=str, order="deterministic")
    return int.from_bytes(blake2b(data, digest_size=8).digest()) & MAX_INT64
