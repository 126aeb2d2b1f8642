"""The process that makes grammars (`GrammarMaker`): what rows ask for in, grammars or reasons out.

A schema comes with a row, from people one does not know. llguidance limits its own work; should a schema get past that,
this process is ended in its place. How much memory it may take is limited here; the parent limits its time.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from nvcli.grammars import GrammarError, Vocabulary
from nvcli.host_memory import limit_more_memory
from nvcli.structured import Structured

_MAX_BYTES = 2 * 1024 * 1024 * 1024
"""The most memory that grammars may take."""


class MadeGrammar(msgspec.Struct, frozen=True, array_like=True):
    """The grammar of what a row asks for, or why there is none."""

    grammar: str
    error: str = ""


def main(model: tuple[Path, int, list[int]], control: Connection) -> None:
    """Load a model's tokens, say so with an empty message, and answer each `Structured`, written as JSON.

    `model` is the checkpoint's folder, the number of its logits, and its end-of-sequence ids. Where the tokens cannot
    be loaded, every answer is the reason: rows without a grammar need none.
    """
    path, vocab_size, end_ids = model
    refusal = ""
    vocabulary: Vocabulary | None = None
    try:
        vocabulary = Vocabulary.load(path, vocab_size=vocab_size, end_ids=end_ids)
    except GrammarError as error:
        refusal = str(error)
    limit_more_memory(_MAX_BYTES)
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.json.Decoder(Structured).decode
    control.send_bytes(b"")
    while True:
        wanted = decode(control.recv())
        control.send_bytes(encode(MadeGrammar("", refusal) if vocabulary is None else _make(vocabulary, wanted)))


def _make(vocabulary: Vocabulary, wanted: Structured) -> MadeGrammar:
    try:
        return MadeGrammar(vocabulary.compile(wanted))
    except GrammarError as error:
        return MadeGrammar("", str(error))
