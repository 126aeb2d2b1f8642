"""RowNeeds: what the rows of a job ask of the engines, judging by the first of them, before any setting is chosen.

A vision tower is loaded only where rows have images, so files of text are searched for them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nvcli.job.compression import compression_of
from nvcli.job.file_formats import input_format, is_pdf
from nvcli.job.images.image_parts import images_of_row
from nvcli.job.input.pdf_source import PdfFile
from nvcli.job.input.reader import RowReader, first_rows
from nvcli.job.job import Job
from nvcli.job.rows.prompt_rules import PromptKind, TextKinds
from nvcli.job.run.image_settings import why_no_images
from nvcli.job.run.row_settings import RowSettings

_PART = re.compile(rb'type[\\"]{1,4}\s*:\s*[\\"]{1,4}(?:(?:input_)?image|pdf)')
"""The type of a part that is an image or a PDF file, also where a conversation is a JSON text in a key or column."""
_LONGEST_PART = 64
"""More bytes than any match has in practice."""
_SEARCHED_FORMATS = ("jsonl", "json", "csv")
_MAX_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 22


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
    kinds: set[PromptKind] = set()
    grammars = images = False
    for name in sampled:  # one after the other: there may be thousands
        reader = RowReader([name], settings.make_parser(chat), limit=limit, check_columns=True, pdfs=pdfs)
        rows = first_rows(reader)
        kinds |= reader.kinds
        grammars = grammars or any(isinstance(row, Job) and row.wants_grammar for row in rows)
        images = images or any(map(images_of_row, rows))
    run = settings.run
    reads_images = run.images == "auto" and why_no_images(run, settings.model_path, settings.model) is None
    return RowNeeds(
        kinds=frozenset(kinds),
        images=reads_images and (images or run.job.image_field is not None or _have_images(inputs)),
        grammars=grammars,
    )


def _have_images(inputs: Sequence[str]) -> bool:
    """Tell whether inputs seem to have images beyond their first rows: they are PDF files, or the text of files names
    some. Text files are searched, up to 256 MiB of them together."""
    if any(map(is_pdf, inputs)):
        return True
    left = _MAX_BYTES
    for name in inputs:
        if not compression_of(name) and input_format(name) in _SEARCHED_FORMATS:
            for piece in _first_pieces(Path(name), left):
                if _PART.search(piece):
                    return True
                left -= len(piece)
    return False


def _first_pieces(file: Path, most: int) -> Iterator[bytes]:
    """Yield the first bytes of a file, at most about `most`, in pieces that begin with the end of the piece before.
    A file that cannot be read has none; reading its rows will report what is wrong."""
    end = b""
    with suppress(OSError), file.open("rb", buffering=0) as source:
        while most > 0 and (chunk := source.read(_CHUNK_BYTES)):
            yield end + chunk
            most -= len(chunk)
            end = chunk[-_LONGEST_PART:]
