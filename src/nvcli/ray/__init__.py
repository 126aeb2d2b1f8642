"""nvcli as a stage of Ray Data: `from nvcli.ray import generate`. Needs the extra `ray`."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ImportError("nvcli.ray needs Ray Data; install it with: pip install 'nvcli[ray]'")

from nvcli.ray.stage import generate

__all__ = ["generate"]
