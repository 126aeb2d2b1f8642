"""RowPrompt: the prompt of a row on its way from text or messages to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nvcli.errors import RowError
from nvcli.job.images.pixel_memory import Pixels
from nvcli.job.job import Job


@dataclass(slots=True)
class RowPrompt:
    """A prompt as far as it is known. Once there is an `error`, the rest does not matter."""

    job: Job
    is_rendered: bool
    """Whether it is a conversation, whose text the chat template writes."""
    text: str
    """The text to tokenize; empty where it is not rendered yet, and where the row gives token ids."""
    ids: list[int] | None
    """The token ids; None: not tokenized yet."""
    pixels: Sequence[Pixels] = ()
    """The pixels of its images."""
    wholes: list[list[int]] = field(default_factory=list)
    """The token ids of the prompt with each continuation to score."""
    error: RowError | None = None

    def take_ids(self, ids: list[int] | RowError) -> None:
        """Take the token ids of the text, or its error."""
        if isinstance(ids, RowError):
            self.error = ids
        else:
            self.ids = ids
