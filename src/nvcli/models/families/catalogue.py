"""FAMILIES: all families that are served, and the look-up of an architecture's name."""

from __future__ import annotations

import difflib

from nvcli.models.families.family import Family
from nvcli.models.families.llama import LLAMA
from nvcli.models.families.mistral import MISTRAL
from nvcli.models.families.qwen import QWEN2, QWEN3
from nvcli.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE)
"""In the order in which `nvcli models` lists them."""


def find_family(architecture: str) -> Family | None:
    """Return the family of an architecture of config.json; None where it is not served."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)


def nearest_architecture(architecture: str) -> str:
    """Return the architecture that is served and whose name is most like this one."""
    names = [name for family in FAMILIES for name in family.architectures]
    return difflib.get_close_matches(architecture, names, n=1, cutoff=0.0)[0]
