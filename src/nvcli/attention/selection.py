"""Which attention backend serves a run: by name, or the fastest that can."""

from __future__ import annotations

from importlib import import_module

from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.errors import ConfigError

BACKENDS = {"torch": "nvcli.attention.torch_backend:TorchBackend"}
"""Fastest first: the order in which `auto` asks them."""


def select_backend(name: str, case: AttentionCase) -> tuple[AttentionBackend, list[str]]:
    """(the backend `name`, notes for the log). `auto` takes the first that can serve `case`.

    Raises ConfigError for an unknown name, and for a backend that cannot serve `case`, with its reasons.
    """
    if name != "auto":
        backend = _load(name)
        if reasons := backend.unsupported(case):
            raise ConfigError(f"attention_backend {name} cannot serve this run: {'; '.join(reasons)}; use `auto`")
        return backend(case), []
    notes: list[str] = []
    for candidate in BACKENDS:
        backend = _load(candidate)
        reasons = backend.unsupported(case)
        if not reasons:
            return backend(case), [*notes, f"attention backend: {candidate}"]
        notes.append(f"attention backend {candidate} passed over: {'; '.join(reasons)}")
    raise ConfigError(f"no attention backend can serve this run; {'; '.join(notes)}")


def _load(name: str) -> type[AttentionBackend]:
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend {name!r} is unknown; known: auto, {', '.join(BACKENDS)}")
    module_name, _, class_name = BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module_name), class_name)
    return backend
