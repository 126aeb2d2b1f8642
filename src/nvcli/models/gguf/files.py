"""The choice of the GGUF files that are a model: one, or the parts that llama.cpp's gguf-split makes of one, among
those of other quantisations. Torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from nvcli.core.validation import list_some
from nvcli.errors import LoadError

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANTISATION = re.compile(
    r"(?:^|[-._])(?P<name>(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32|FP16|FP32))$", re.IGNORECASE
)
_NO_MODEL = re.compile(r"(?:^|[-.])(?:mmproj|imatrix|mtp)", re.IGNORECASE)
"""Beginnings of names, or of what follows a dash or dot, of files that hold towers for images, statistics or heads."""
_SHOWN = 12


def is_gguf(name: str) -> bool:
    """Whether a file's name is that of a GGUF file."""
    return name.lower().endswith(SUFFIX)


def models_among(files: Iterable[str]) -> Mapping[str, list[str]]:
    """Group the GGUF files among some by the models that they hold: names without the number of a part → files, in
    order. Other files are left out."""
    models: dict[str, list[str]] = {}
    for file in sorted(filter(is_gguf, files)):
        stem = _stem(file)
        if _NO_MODEL.search(PurePath(stem).name) is None:
            models.setdefault(stem, []).append(file)
    return models


def choose_model(name: str, files: Iterable[str], quantisation: str | None = None) -> list[str]:
    """Return the files, of those in the repository `name`, that are the model in a quantisation, as in `NAME:Q4_K_M`;
    None: the only one. Raises LoadError that lists what there is."""
    models = models_among(files)
    known = Counter(map(_quantisation_of, models))
    found = [one if known[one := _quantisation_of(stem)] == 1 else PurePath(stem).name for stem in models]
    listed = list_some(found, _SHOWN) or "none"
    if not models:
        raise LoadError(f"{name}: no GGUF file that holds a model")
    if quantisation is None and len(models) == 1:
        return next(iter(models.values()))
    if quantisation is None:
        raise LoadError(f"{name}: several GGUF models: {listed}; name one: {name}:{found[0]}")
    wanted = quantisation.lower()
    fitting = [stem for stem in models if wanted in (_quantisation_of(stem).lower(), PurePath(stem).name.lower())]
    if len(fitting) != 1:
        raise LoadError(f"{name}: {len(fitting) or 'no'} GGUF models {quantisation}; there are: {listed}")
    return models[fitting[0]]


def check_parts(files: list[str]) -> None:
    """Raise LoadError if parts of a model are missing."""
    found = [match for file in files if (match := _PART.fullmatch(file)) is not None]
    if not found:
        return
    count = int(found[0]["count"])
    there = {int(match["number"]) for match in found}
    if missing := [number for number in range(1, count + 1) if number not in there]:
        raise LoadError(
            f"{files[0]}: parts {list_some(list(map(str, missing)), 5)} of {count} are missing; download them"
        )


def part_names(file: str) -> list[str]:
    """Return the names of all parts of the model that a file is a part of; of others, its own."""
    match = _PART.fullmatch(file)
    if match is None:
        return [file]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}{file[-len(SUFFIX) :]}" for number in range(1, count + 1)]


def _stem(file: str) -> str:
    match = _PART.fullmatch(file)
    return file[: -len(SUFFIX)] if match is None else match["stem"]


def _quantisation_of(stem: str) -> str:
    """Return the quantisation that a name ends in, or the whole name."""
    name = PurePath(stem).name
    match = _QUANTISATION.search(name)
    return name if match is None else match["name"]
