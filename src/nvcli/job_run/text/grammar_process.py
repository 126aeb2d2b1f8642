"""The process that makes grammars (`GrammarMaker`): what rows ask for in, grammars or reasons out.

A schema comes with a row, from people one does not know. llguidance limits its own work; should a schema get past that,
this process is ended in its place. How much memory and stack it may take is limited here; the parent limits its time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from nvcli.grammars import CHECK_STACK_BYTES, GrammarError, Vocabulary, check_structured
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

    encode = msgspec.msgpack.Encoder().encode

    def make(wanted: Structured) -> bytes:
        return encode(MadeGrammar("", refusal) if vocabulary is None else _make(vocabulary, wanted))

    _answer(control, make)


def check(argument: None, control: Connection) -> None:
    """Say that it can work with an empty message, and answer each `Structured`, written as JSON, with the reason why it
    is no grammar, whatever the model; empty: it is one."""

    def explain(wanted: Structured) -> bytes:
        try:
            check_structured(wanted)
        except GrammarError as error:
            return str(error).encode()
        return b""

    _answer(control, explain)


def _answer(control: Connection, answer: Callable[[Structured], bytes]) -> None:
    """Answer questions within limits of memory and stack, until the parent is gone."""
    decode = msgspec.json.Decoder(Structured).decode
    threading.stack_size(CHECK_STACK_BYTES)
    limit_more_memory(_MAX_BYTES)
    with ThreadPoolExecutor(max_workers=1) as thread:
        control.send_bytes(b"")
        while True:
            control.send_bytes(thread.submit(answer, decode(control.recv())).result())


def _make(vocabulary: Vocabulary, wanted: Structured) -> MadeGrammar:
    try:
        return MadeGrammar(vocabulary.compile(wanted))
    except GrammarError as error:
        return MadeGrammar("", str(error))
