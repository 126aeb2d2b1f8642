"""Differences between the versions of Triton that nvcli runs with. No other file names versions.

Gluon, the layer of Triton that says which thread holds what, is experimental, and names change from one version to the
next: kernels take those from here. Where no kernel in Gluon has run with a version, the kernels in plain Triton are
taken.
"""

from __future__ import annotations

from typing import Any

import triton

try:
    from triton.experimental.gluon import language as _gl
    from triton.experimental.gluon.language.nvidia.hopper import tma as _tma
except ImportError:  # in a version to come: its kernels are left out
    _gl = _tma = None

GLUON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""Versions with which the kernels in Gluon ran on a GPU."""


def _version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def has_known_gluon() -> bool:
    """Tell whether kernels in Gluon may be used."""
    return _version() in GLUON_VERSIONS


def can_load_ahead(capability: tuple[int, int]) -> bool:
    """Tell whether a loop of products may load what only its next round uses: for Blackwell GPUs Triton 3.9 ends such a
    loop's compilation with "Op used before defined"."""
    return _version() != "3.9" or capability[0] != 10


def why_slower() -> str | None:
    """Say which kernels are left out with this Triton; None: none are."""
    if has_known_gluon():
        return None
    return (
        f"Triton {triton.__version__}: long prompts and FP8 are slower on Hopper GPUs than with "
        f"{', '.join(GLUON_VERSIONS)}, as the kernels for them have not been tried with it"
    )


def _named(place: object, *names: str) -> Any:
    """Return the attribute with the first name that exists, or None where this version of Triton has none of them."""
    return next((getattr(place, name) for name in names if hasattr(place, name)), None)


# Newer names come first. They came with 3.7 or 3.8, and the older ones went with 3.8 or 3.9.
tma_load = _named(_tma, "async_load", "async_copy_global_to_shared")
"""Copy a tile from global to shared memory; its bytes arrive at a barrier."""
tma_store = _named(_tma, "async_store", "async_copy_shared_to_global")
"""Copy a tile from shared to global memory."""
reinterpret = _named(_named(_gl, "shared_memory_descriptor"), "reinterpret", "_reinterpret")
"""Read shared memory as another type, shape or layout."""
barrier = _named(_gl, "barrier", "thread_barrier")
"""Wait for all threads of the program."""
