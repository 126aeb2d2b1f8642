"""RowNeeds: what the first rows of a job ask of the engines, before any setting of these is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvcli.job.images.image_rows import have_images
from nvcli.job.input.pdf_source import PdfFile
from nvcli.job.input.reader import check_first_rows
from nvcli.job.job import Job
from nvcli.job.rows.prompt_rules import PromptKind, TextKinds
from nvcli.job.run.image_settings import why_no_images
from nvcli.job.run.row_settings import RowSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNeeds:
    """The needs of a job's rows; without arguments, those of rows that nobody has seen."""

    kinds: frozenset[PromptKind] = frozenset()
    """Kinds of prompts among the first rows."""
    images: bool = True
    """Whether `images: auto` loads a vision tower where the model has one."""
    grammars: bool = False
    """Whether rows want structured answers, whose grammars are then prepared early."""


def needs_of_rows(
    settings: RowSettings,
    chat: TextKinds,
    inputs: Sequence[str],
    *,
    limit: int | None,
    pdfs: Mapping[str, PdfFile],
) -> RowNeeds:
    """Look at the first rows of inputs that can be read twice. Raises ConfigError if their columns are not those of a
    job. `pdfs` are those of `RowReader`."""
    sampled = inputs if limit is None else inputs[:1]
    parsers = [settings.make_parser(chat) for _ in sampled]
    rows = check_first_rows(sampled, iter(parsers).__next__, limit=limit, pdfs=pdfs)
    run = settings.run
    reads_images = run.images == "auto" and why_no_images(run, settings.model_path, settings.model) is None
    return RowNeeds(
        kinds=frozenset().union(*(parser.kinds for parser in parsers)),
        images=reads_images and (run.job.image_field is not None or have_images(inputs, rows)),
        grammars=any(isinstance(row, Job) and row.wants_grammar for row in rows),
    )
