"""Counts the pages of a job's PDF files, in image processes, before its rows are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from nvcli.errors import ConfigError
from nvcli.job.file_formats import is_pdf
from nvcli.job.images.image_process import PageCount
from nvcli.job.images.image_processes import ImageProcesses
from nvcli.job.images.pdf_page import ENCRYPTED
from nvcli.job.input.pdf_source import PdfFile


def count_pages_of_inputs(inputs: Sequence[str]) -> dict[str, PdfFile]:
    """Count the pages of the PDF files among `inputs`, and return these by name.

    Raises ConfigError if none of the inputs can be read, and WorkerError if no process can be started.
    """
    names = [name for name in inputs if is_pdf(name)]
    if not names:
        return {}
    with closing(ImageProcesses()) as processes:
        files = list(processes.threads.map(lambda name: _count_pages(name, processes), names))
    if len(names) == len(inputs) and all(file.problem for file in files):
        others = f"; the other {len(files) - 1:,} inputs cannot be read either" if len(files) > 1 else ""
        raise ConfigError(f"the input {names[0]}: {files[0].problem}{others}")
    return {file.name: file for file in files}


def _count_pages(name: str, processes: ImageProcesses) -> PdfFile:
    """Count the pages of a file. Raises WorkerError."""
    counted = processes.ask(PageCount(Path(name)))
    problem = counted.problem
    if problem and ENCRYPTED not in problem:
        problem = f"{problem.rstrip('.')}; replace it with an intact PDF file, or leave it out"
    return PdfFile(name, counted.num_pages, problem)
