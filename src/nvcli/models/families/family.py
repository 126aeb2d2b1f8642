"""Family: a line of models that are read alike, and what `nvcli models` says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that one function reads."""

    name: str
    architectures: tuple[str, ...]
    """The names in `architectures` of config.json."""
    features: str
    """The family's features, in a few words."""
    examples: tuple[str, ...]
    """Ids on the Hugging Face hub."""
    read: Callable[[ModelFile], DecoderConfig]
    """Reads config.json, or its `text_config` where it describes more than text."""
    ties_embeddings: bool = False
    """The default of `tie_word_embeddings`."""
    quantisations: tuple[str, ...] = ()
    """The `quant_method` of quantised checkpoints that the family decodes by itself, and the only ones that it has."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that the family's published files leave out."""
