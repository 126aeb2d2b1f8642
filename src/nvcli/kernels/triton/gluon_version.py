"""Whether this Triton's Gluon is one that nvcli's kernels in it have run with.

Gluon, the layer of Triton that says which thread has what, is experimental: it may change with every version. With
another one the kernels in plain Triton are taken.
"""

from __future__ import annotations

import triton

_VERSION = "3.6"
"""The version with which the kernels in Gluon ran on a GPU."""


def has_known_gluon() -> bool:
    """Whether kernels in Gluon may be used."""
    return str(triton.__version__).startswith(f"{_VERSION}.")
