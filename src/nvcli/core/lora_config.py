"""The key `lora`: PEFT LoRA adapters, either one for all rows or several with names that rows choose from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nvcli.core.validation import show
from nvcli.errors import ConfigError

LoraMode = Literal["auto", "merged", "batched"]
MAX_ROW_RANK = 256
"""Maximum rank of an adapter that only some rows use."""
PAGE_RANKS = 16
"""Ranks in a page, the unit of memory for adapters of single rows: the fewest that tensor cores multiply by."""
BASE_SHARE = 0.25
"""Share of a GPU's free memory after weights that the base of weights may take, into which adapters are merged in
turn."""
_NAMED = re.compile(r"([\w.:-]*)=(.*)", re.DOTALL)


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Named adapters, of which each row uses one or none."""

    adapters: dict[str, str]
    """Name → folder or Hugging Face id, which may end in @REVISION."""
    max_loaded: Annotated[int, Meta(ge=1)] | None = None
    """Maximum adapters on each GPU at a time. null: as many as fit into a small share of its memory."""
    mode: LoraMode = "auto"
    """merged: rows run adapter by adapter, and each adapter is merged into the weights in its turn; batched: rows of
    all adapters run in the same steps; auto: by cost, adapter by adapter."""


class AdapterSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the adapters that rows choose from, by which memory is planned."""

    ranks: tuple[int, ...] = ()
    """The largest rank of each adapter; 0: it has no low-rank matrices."""
    projections: tuple[str, ...] = ()
    """The last names of the linear layers that any of them changes by the batched way, such as `q_proj`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChoice:
    """The adapters that the key `lora` asks for."""

    merged: str | None = None
    """The adapter for all rows; None: there is none."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Name → the adapter of rows that name it."""
    max_loaded: int | None = None
    mode: LoraMode = "auto"


def adapter_choice(lora: str | Sequence[str] | LoraConfig | None) -> AdapterChoice:
    """Return the adapters that the key `lora` asks for. Raises ConfigError."""
    if isinstance(lora, LoraConfig):
        for name, path in lora.adapters.items():
            if not (name and path):
                raise ConfigError(f"`lora.adapters` has {show({name: path})}; give each adapter a name and a path")
        return AdapterChoice(named=lora.adapters, max_loaded=lora.max_loaded, mode=lora.mode)
    given = [lora] if isinstance(lora, str) else list(lora or ())
    named: dict[str, str] = {}
    unnamed: list[str] = []
    for one in given:
        if not one:
            raise ConfigError("`lora` is an empty text; give a folder or a Hugging Face id, or leave it out")
        match = None if os.path.lexists(os.path.expanduser(one)) else _NAMED.fullmatch(one)
        if match is None:
            unnamed.append(one)
        elif not (match[1] and match[2]):
            empty = "path" if match[1] else "name"
            raise ConfigError(f"`lora` has {one}, whose {empty} is empty; give both (--lora NAME=PATH), or only a path")
        elif match[1] in named:
            raise ConfigError(f"`lora` names {match[1]} twice; give each adapter (--lora NAME=PATH) a name of its own")
        else:
            named[match[1]] = match[2]
    if len(given) > 1 and unnamed:
        raise ConfigError(
            f"`lora` has {len(given)} adapters, and {unnamed[0]} has no name; name each (--lora NAME=PATH), so that "
            'rows can choose with "lora": "NAME", or give a single one without a name, for all rows'
        )
    return AdapterChoice(merged=unnamed[0] if unnamed else None, named=named)
