"""Shell completion of values, for options without a fixed set. Imports happen when a value is completed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def models(incomplete: str) -> list[str]:
    """Complete a model: `demo`, the models of the local Hugging Face cache, and folders."""
    cache = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    cached = Path(os.path.expanduser(cache)).glob("models--*")
    names = ["demo", *sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in cached)]
    return [name for name in names if name.startswith(incomplete)] + _folders(incomplete)


def shapes(incomplete: str) -> list[str]:
    """Complete the name of a known shape."""
    from nvcli.tools.bench.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """Complete a kind of GPU, for estimates of jobs."""
    from nvcli.tools.check.machine import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Complete a key of the configuration, followed by the equals sign that `--set` needs."""
    from nvcli.core.config import all_keys

    return [f"{name}=" for name in all_keys() if name.startswith(incomplete)]


def words(*known: str) -> Callable[[str], list[str]]:
    """Return a function that completes one of a few words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


def _folders(incomplete: str) -> list[str]:
    """Complete a folder; the shell completes file names by itself only if nothing else matches."""
    head, slash, tail = incomplete.rpartition("/")
    parent = Path(os.path.expanduser(f"{head}{slash}" or "."))  # Path's own method raises for an unknown user
    try:
        found = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    except OSError:
        return []
    shown = [name for name in found if name.startswith(tail) and (tail.startswith(".") or not name.startswith("."))]
    return [f"{head}{slash}{name}/" for name in shown]
