"""`open_output`: the output of a job by its name, as a file that may be continued or as a stream."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from nvcli.errors import ConfigError
from nvcli.jobs.compression import compression_of, make_packer
from nvcli.jobs.files import STREAM, STREAM_FOLDERS
from nvcli.jobs.output.file_output import FileOutput
from nvcli.jobs.output.job_output import JobOutput, OutputOptions, output_form
from nvcli.jobs.output.manifest import Manifest
from nvcli.jobs.output.sink import Sink
from nvcli.jobs.rows.output_row import OutputForm


class StreamOutput(JobOutput):
    """An output that is written once and not continued: standard output, a pipe or a device."""

    def __init__(self, sink: Sink, form: OutputForm) -> None:
        super().__init__(form)
        self.sink = sink


def open_output(name: str, job: Manifest, options: OutputOptions) -> JobOutput:
    """Open the output `name` (`-`: standard output) for a job. Raises ConfigError and OutputError."""
    form = output_form(Path(name), job, options)
    if name == STREAM:
        if sys.__stdout__ is None:
            raise ConfigError("standard output is closed; name an output file with -o")
        return StreamOutput(Sink(os.dup(sys.__stdout__.fileno()), "standard output"), form)
    path = Path(name)
    if path.exists() and (path.parent in STREAM_FOLDERS or not stat.S_ISREG(path.stat().st_mode)):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None
        return StreamOutput(Sink(fd, name, pack=make_packer(compression_of(name))), form)
    return FileOutput(path, job, options)
