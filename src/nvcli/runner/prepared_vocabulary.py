"""PreparedVocabulary: the tokens of a model as grammars see them, loaded while a rank loads its weights.

Loading takes most of a second for a large vocabulary, and 140 MB: it is done for runs of which it is known that they
have constrained answers. Other runs load the tokens with the first constrained answer, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvcli.grammars import GrammarError, Vocabulary


class PreparedVocabulary:
    """A vocabulary that is loaded by a thread of its own, which begins at once."""

    def __init__(self, model_path: Path, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        """The arguments are those of `Vocabulary.load`."""
        self._end_ids = [*end_ids]
        pool = ThreadPoolExecutor(1, "nvcli-vocabulary")
        self._loading = pool.submit(Vocabulary.load, model_path, vocab_size=vocab_size, end_ids=end_ids)
        pool.shutdown(wait=False)

    def take(self, end_ids: Sequence[int]) -> Vocabulary | None:
        """Wait for the vocabulary and return it; None: it cannot be loaded, or has other end-of-sequence ids."""
        try:
            return self._loading.result() if [*end_ids] == self._end_ids else None
        except GrammarError:
            return None
