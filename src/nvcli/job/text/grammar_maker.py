"""GrammarMaker: compiles the forms that rows ask for to grammars, in a process that can be killed.

Equal ones are made once; the latest are kept, refusals too, within a bound of bytes. Schemas come with rows and are
untrusted. llguidance limits its own work; should a schema get past that, its process is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from nvcli.core.grammars import CHECK_STACK_BYTES, GrammarError, Vocabulary, check_structured
from nvcli.core.lru_cache import LruCache
from nvcli.core.structured import MAX_END_IDS, MAX_GRAMMAR_BYTES, Structured
from nvcli.core.system.host_memory import limit_more_memory
from nvcli.errors import RowError
from nvcli.job.text.guarded_process import PATIENCE, GuardedProcess, NoAnswer

MAX_SECONDS = 5.0
"""Timeout of a grammar. Ordinary ones take a millisecond."""

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Maximum bytes of grammars to keep, including the forms they were made from."""

_ENTRY_BYTES = 500
"""Approximate overhead of a grammar that is kept."""
_BYTES_PER_CHAR = 10
"""Approximate bytes of a schema as objects, per character of its JSON."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar, shared by all rows that ask for the same form."""

    text: str
    """The grammar in llguidance's format."""
    wanted: Structured
    """The form that it was made from, as the first row gave it."""

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of both in memory."""
        return _ENTRY_BYTES + (1 + _BYTES_PER_CHAR) * len(self.text)


class GrammarMaker:
    """Makes grammars for a model. The process starts with the first row that asks for one.

    Used by one thread; `close` may be called by any.
    """

    def __init__(
        self,
        model_path: Path | None,
        *,
        vocab_size: int = 1,
        end_ids: Sequence[int] = (),
        max_seconds: float = MAX_SECONDS,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """`vocab_size` is the number of the model's logits, `end_ids` its end-of-sequence ids. Without a model it is
        not known whether a model's tokens can follow a grammar."""
        self._kept = LruCache[bytes, Grammar | RowError](max_kept_bytes, _num_bytes)
        """Grammars or errors by the form asked for."""
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(MadeGrammar).decode
        self.worker = GuardedProcess(
            "nvcli.job.text.grammar_maker:main",
            # Which ids end an answer is all the same for whether a grammar can be made, but there must be one.
            (model_path, vocab_size, list(end_ids[:MAX_END_IDS]) or [vocab_size - 1]),
            name="grammar process",
            max_seconds=max_seconds,
            patience=PATIENCE,
        )

    def grammar(self, wanted: Structured, *, name: str) -> Grammar:
        """Return the grammar of the form that a row asks for.

        `name` is what the row calls it, for messages. Raises RowError, and WorkerError if no process can be started.
        """
        key = self._encode(wanted)
        found = self._kept.get(key) or self._make(wanted, key)
        if isinstance(found, Grammar):
            return found
        raise RowError(found.type, f"{name} {found.message}")

    def close(self) -> None:
        """Kill the process, even while it works. Idempotent."""
        self.worker.close()

    def _make(self, wanted: Structured, key: bytes) -> Grammar | RowError:
        """Make and keep a grammar, or the error that says why there is none."""
        if len(key) > MAX_GRAMMAR_BYTES:
            return RowError("invalid_structured", f"takes {len(key):,} bytes; allowed: {MAX_GRAMMAR_BYTES:,}")
        answer = self.worker.ask(key)
        if isinstance(answer, NoAnswer):
            made: Grammar | RowError = _no_grammar(answer)
        elif error := (found := self._decode(answer)).error:
            made = RowError("invalid_structured", f"cannot be used: {error}")
        else:
            made = Grammar(found.grammar, wanted)
        if not isinstance(made, RowError) or made.type != "aborted":
            self._kept.put(key, made)
        return made


def _no_grammar(answer: NoAnswer) -> RowError:
    """Return the error that says why there is no grammar, as the end of a sentence."""
    if not answer.reason:
        return RowError("aborted", "is not looked at: the run ends")
    if answer.is_late:
        return RowError(
            "structured_timeout",
            f"cannot be compiled to a grammar: the process for it {answer.reason}. It is too complex, or the "
            "machine was busy; ask for something simpler, or try the row again (--retry-errors)",
        )
    return RowError(
        "invalid_structured",
        f"cannot be compiled to a grammar: the process for it {answer.reason}, as happens where something is nested "
        "too deeply or takes too much memory; ask for something simpler",
    )


def _num_bytes(key: bytes, made: Grammar | RowError) -> int:
    return len(key) + (made.num_bytes if isinstance(made, Grammar) else _ENTRY_BYTES + len(made.message))


_MAX_PROCESS_BYTES = 2 * 1024 * 1024 * 1024
"""Maximum memory of the process for grammars."""


class MadeGrammar(msgspec.Struct, frozen=True, array_like=True):
    """The grammar of a form, or why there is none."""

    grammar: str
    error: str = ""


def main(model: tuple[Path | None, int, list[int]], control: Connection) -> None:
    """Load a model's tokens, say so with an empty message, and answer each `Structured`, written as JSON.

    `model` is the checkpoint's folder, the number of its logits, and its end-of-sequence ids; without a folder grammars
    are checked alone. Where the tokens cannot be loaded, every answer is the reason: rows without a grammar need none.
    Memory and stack are limited.
    """
    path, vocab_size, end_ids = model
    refusal = ""
    vocabulary: Vocabulary | None = None
    try:
        vocabulary = None if path is None else Vocabulary.load(path, vocab_size=vocab_size, end_ids=end_ids)
    except GrammarError as error:
        refusal = str(error)

    def make(wanted: Structured) -> MadeGrammar:
        if refusal:
            return MadeGrammar("", refusal)
        try:
            if vocabulary is not None:
                return MadeGrammar(vocabulary.compile(wanted))
            check_structured(wanted)
            return MadeGrammar("")
        except GrammarError as error:
            return MadeGrammar("", str(error))

    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.json.Decoder(Structured).decode
    threading.stack_size(CHECK_STACK_BYTES)
    limit_more_memory(_MAX_PROCESS_BYTES)
    with ThreadPoolExecutor(max_workers=1) as thread:
        control.send_bytes(b"")
        while True:
            control.send_bytes(encode(thread.submit(make, decode(control.recv())).result()))
