"""The choice of the attention backend that serves a run: by name, or the fastest that can.

A choice is `auto`, a backend's name, or `prefill:decode`, each side one of those.
"""

from __future__ import annotations

from dataclasses import replace
from pkgutil import resolve_name

from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.chosen_keys import ChosenKeys, check_sizes
from nvcli.attention.hybrid import HybridBackend
from nvcli.errors import ConfigError

BACKENDS = {
    "triton": "nvcli.attention.triton_backend:TritonBackend",
    "flash-attn": "nvcli.attention.flash_attn_backend:FlashAttnBackend",
    "flashinfer": "nvcli.attention.flashinfer_backend:FlashInferBackend",
    "torch": "nvcli.attention.torch_backend:TorchBackend",
}
BATCH_INVARIANT = {"torch": "nvcli.attention.row_by_row_backend:RowByRowBackend"}
"""Backends that replace the usual ones in a batch-invariant run."""
AUTO_ORDER = {"cuda": ("triton", "torch"), "cpu": ("torch",)}
"""The backends that `auto` asks on each device, fastest first."""
NOT_ASKED = {
    "cuda": {
        "flash-attn": "slower than triton where measured (version 2 on an H200)",
        "flashinfer": "compiles its kernels for a minute or more at first use",
    },
    "cpu": {},
}
"""The backends that `auto` never picks on each device, and why. They serve only when named."""


def select_backend(choice: str, case: AttentionCase) -> tuple[AttentionBackend, list[str]]:
    """Make the backend that `choice` stands for; return it, and notes for the log.

    `auto` takes the first backend of `AUTO_ORDER` that can serve `case`. Raises ConfigError for an unknown name, and
    for a backend that cannot serve `case`, with its reasons. Layers whose tokens see chosen or compressed keys are
    served beside the backend. Where tokens add numbers to scores, or attend to those after them, no keys are read for
    several requests at a time.
    """
    if chosen := tuple(spec for spec in case.specs if spec.is_beside_backends):
        check_sizes(case)
        others = tuple(spec for spec in case.specs if not spec.is_beside_backends)
        backend, notes = select_backend(choice, replace(case, specs=others, chosen=chosen))
        backend.chosen_keys = ChosenKeys(case, chosen)
        backend.reads_segments, backend.prefix_tile_tokens = False, 0
        return backend, notes
    prefill, _, decode = choice.partition(":")
    decode = decode or prefill
    notes = []
    shares_keys = all(spec.bias_extent is None and not spec.both_ways for spec in case.specs)
    if not shares_keys:
        case = replace(case, max_shared_rows=0)
    prefill_name = _choose(prefill, case, notes)
    decode_name = _choose(decode, case, notes)
    if case.batch_invariant and decode_name != prefill_name:
        raise ConfigError(
            f"`batch_invariant` needs one attention backend, as a token may be computed in a prompt or after it, and "
            f"`attention_backend` comes to {prefill_name} and {decode_name}; name one or leave it out"
        )
    backend = _load(prefill_name, case)(case)
    if decode_name != prefill_name:
        backend = HybridBackend(backend, _load(decode_name, case)(case))
    if not shares_keys:
        backend.reads_segments, backend.prefix_tile_tokens = False, 0
    if "auto" in (prefill, decode):
        notes.append(f"attention backend: {backend.name}")
    notes.extend(backend.notes)
    return backend, list(dict.fromkeys(notes))


def why_not(name: str, case: AttentionCase) -> list[str]:
    """Return the reasons why the backend of that name cannot serve `case`, none if it can."""
    return _load(name, case).unsupported(case)


def _choose(name: str, case: AttentionCase, notes: list[str]) -> str:
    """Return the name of the backend that `name` stands for; add the backends that were passed over to the notes."""
    if name != "auto":
        if reasons := _load(name, case).unsupported(case):
            raise ConfigError(f"attention_backend {name} cannot serve this run: {'; '.join(reasons)}; use `auto`")
        return name
    for candidate in AUTO_ORDER[case.device.type]:
        reasons = _load(candidate, case).unsupported(case)
        if not reasons:
            others = NOT_ASKED[case.device.type]
            notes.extend(f"attention backend {other} passed over: {reason}" for other, reason in others.items())
            return candidate
        notes.append(f"attention backend {candidate} passed over: {'; '.join(reasons)}")
    raise ConfigError(f"no attention backend can serve this run; {'; '.join(notes)}")


def _load(name: str, case: AttentionCase) -> type[AttentionBackend]:
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend {name!r} is unknown; known: auto, {', '.join(BACKENDS)}")
    place = BATCH_INVARIANT.get(name, BACKENDS[name]) if case.batch_invariant else BACKENDS[name]
    backend: type[AttentionBackend] = resolve_name(place)
    return backend
