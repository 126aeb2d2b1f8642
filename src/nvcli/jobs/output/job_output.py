"""What a job's output can do, whatever kind it is, and its settings. `open_output` makes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nvcli.config_types import Order
from nvcli.jobs.output.digest_file import DigestFile
from nvcli.jobs.output.manifest import Finished, Manifest
from nvcli.jobs.output.sink import Sink
from nvcli.jobs.own_files import is_csv
from nvcli.jobs.row_set import AnsweredRows
from nvcli.jobs.rows.output_row import CSV_TEXT_FIELD, OutputForm
from nvcli.jobs.rows.row_digest import InputRows
from nvcli.jobs.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The settings of an output beside its name."""

    order: Order = "completion"
    """The order of its rows."""
    can_continue: bool = True
    """Whether the inputs can be read again, so that another run may continue the output."""
    overwrite: bool = False
    """An output that is there is started anew."""
    retry_errors: bool = False
    """Failed rows of an output that is there are dropped, to be answered again."""
    update: bool = False
    """An output that is there is brought up to inputs that have changed."""
    identify_rows: Callable[[], InputRows] | None = None
    """Reads the inputs and returns their rows, to be compared with the rows that were answered; None: not possible."""
    limit: int | None = None
    """Only so many rows of the inputs are wanted; None: all."""
    shard: Shard | None = None
    """The shard of the job whose rows the output has; None: it has all rows."""
    reorder_bytes: int = 1 << 28
    """The memory that rows may take while they wait for their turn, when the output is put in order."""
    text_field: str | None = None
    """The key of each row for the text of its first choice; None: none, and in CSV `generated_text`."""
    on_begin: Callable[[], None] = lambda: None
    """Called once a new output is begun: the rows and the manifest that were there before are gone then."""


class JobOutput:
    """The part that all kinds of output have in common."""

    sink: Sink

    def __init__(self, form: OutputForm) -> None:
        self.form = form
        self.answered = AnsweredRows()
        """Rows that the output held when it was opened."""
        self.errors: Counter[str] = Counter()
        """The failed rows among them, by error type."""
        self.finished: Finished | None = None
        """How the job ended, if it came to its end before and there is nothing to do."""
        self.notes: list[str] = []
        """Lines that tell the user what was found and done."""
        self.digests: DigestFile | None = None
        """Takes the digests of the rows that are read, where another run may continue the output."""

    @property
    def folder(self) -> Path | None:
        """The folder for temporary files of the output's size; None: the system's own."""
        return None

    def finish(self, *, rows: int, errors: Mapping[str, int], rows_read: int, all_read: bool) -> None:
        """Finish the output once every row that was read is answered and the sink is closed. Raises OutputError.

        `rows` and `errors` count the whole output, which may hold later rows too. `rows_read` and `all_read` say how
        far the inputs were read. Rows that inputs which were read to their end do not have are dropped, from `answered`
        and `errors` too.
        """

    def close(self) -> None:
        """Give the output up, so that others may have it. Idempotent."""
        self.sink.close()


def output_form(path: Path, job: Manifest, options: OutputOptions) -> OutputForm:
    """Return the form that an output's rows have."""
    text_field = options.text_field or (CSV_TEXT_FIELD if is_csv(path) else None)
    return OutputForm(created=job.created, model=job.model, text_field=text_field)
