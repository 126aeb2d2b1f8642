"""Family: a line of models whose config.json is read in the same way, and its entry in `nvcli models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvcli.models.families.model_file import ModelFile
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.vision.vision_config import VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that share one reader of config.json."""

    name: str
    architectures: tuple[str, ...]
    """The names in `architectures` of config.json."""
    encoders: tuple[str, ...] = ()
    """The names there of models of this form whose tokens attend both ways, and which have no LM head that is read."""
    features: str
    """The family's features, in a few words."""
    examples: tuple[str, ...]
    """Ids on the Hugging Face hub."""
    read: Callable[[ModelFile], DecoderConfig]
    """Reads config.json, or its `text_config` where it describes more than text."""
    read_vision: Callable[[JsonFile, JsonFile, JsonFile], VisionConfig] | None = None
    """Reads the vision tower from config.json, its section of the tower and that of the decoder; None: the family has
    none that is computed."""
    part: str = ""
    """The part of the model that reads text and images, in files that hold a part for speech besides: its section of
    config.json ends in `_config`, and its tensors' names begin with it. Empty: files hold nothing besides."""
    ties_embeddings: bool = False
    """The default of `tie_word_embeddings`."""
    ties_as_text: bool = False
    """Whether `tie_word_embeddings` of the decoder's section counts beside the whole model's."""
    quantisations: tuple[str, ...] = ()
    """The `quant_method`s that belong to this family, which then supports no others; empty: it supports the common
    ones."""
    chat_template: str | None = None
    """The chat template of checkpoints that come without one; None: conversations then need one of the job's."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The family's own names of keys → those that are read."""
    whole_keys: Mapping[str, str] = field(default_factory=dict)
    """The same for keys outside `text_config`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that the family's published files leave out."""
