"""Reads the classes of a checkpoint whose head gives a number for each, as transformers'
`AutoModelForSequenceClassification` writes it. Reward models and rerankers have a single one. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nvcli.core.config_types import MAX_INT32
from nvcli.core.task_config import POSITIONS, Activation, Classifier, PoolingName
from nvcli.core.validation import describe_surrogate, is_integer
from nvcli.models.embedding_files import CONFIG_POOLINGS, POOLING
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig

MAX_CLASSES = 65_536
"""Maximum number of classes; messages from the ranks have room for them."""
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
)
"""The values of `problem_type`."""
_ENCODER_POOLINGS: Mapping[str, PoolingName] = MappingProxyType({"cls": "cls", "mean": "mean"})
"""The values of ModernBERT's `classifier_pooling`."""


def read_classifier(config: JsonFile, text: JsonFile, decoder: DecoderConfig) -> Classifier:
    """Read the classes from config.json, and padding from its settings of the text model (`text`). Raises LoadError."""
    prediction = decoder.prediction_head
    pooling = text.choice(POOLING, CONFIG_POOLINGS, "last")
    if prediction is not None and decoder.both_ways:
        pooling = text.choice("classifier_pooling", _ENCODER_POOLINGS, "cls")
    names = config.object("id2label")
    if len(names.values) > MAX_CLASSES:
        raise config.error("id2label", f"{len(names.values):,} names are too many; allowed: up to {MAX_CLASSES:,}")
    count = config.positive("num_labels", len(names.values) or 2, most=MAX_CLASSES)  # transformers writes no two
    labels = tuple(names.get(str(number), str, f"LABEL_{number}") for number in range(count))
    for number, label in enumerate(labels):
        if (surrogate := describe_surrogate(label)) is not None:
            raise names.error(str(number), surrogate)
    activation = config.choice("problem_type", _ACTIVATIONS, "single_label_classification")
    pad_id = text.get("pad_token_id", int, -1)
    return Classifier(
        labels=labels,
        position=POSITIONS[pooling],
        has_bias=prediction is not None and (decoder.both_ways or prediction.has_bias),
        temperature=text.positive_number("temperature", 1.0) if text.has(POOLING) else 1.0,
        activation="sigmoid" if count == 1 and activation == "softmax" else activation,
        pad_id=pad_id if is_integer(pad_id, 0, MAX_INT32) else None,
    )
