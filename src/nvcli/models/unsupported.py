"""Explanations for unsupported architectures: which kind of model it is, or which family its config.json fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from nvcli.errors import ConfigError, LoadError
from nvcli.models.config_overrides import is_read
from nvcli.models.families.catalogue import CLASSIFIER, FAMILIES
from nvcli.models.families.family import Family
from nvcli.models.json_file import JsonFile

_INERT = frozenset(
    (
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "sep_token_id",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "use_sliding_window",
    )
)
"""Keys that say nothing about what a model computes, or do so only together with others."""
_MOST_UNREAD = 2
"""A family that reads all but at most this many keys may fit; the message names those keys."""
_DSA = "its tokens attend to a sparse choice of keys (DSA) in a form that nvcli does not compute"
_RECURRENT = "its recurrent layers are of a kind that nvcli does not compute"
_ATTENDED_BLOCKS = "its layers attend to the sums of earlier layers, in place of a stream, which nvcli does not compute"
_NO_TOWER = "its vision tower is not computed by nvcli"
_NO_REFERENCE = "transformers has no model of it whose numbers nvcli could be held to"
_USES = "CausalLM", "ConditionalGeneration"
_LACKING = {
    "BailingMoeForCausalLM": _NO_REFERENCE,
    "BailingMoeLinearForCausalLM": _NO_REFERENCE,
    "BailingMoeLinearV2ForCausalLM": _NO_REFERENCE,
    "BailingMoeV2ForCausalLM": _NO_REFERENCE,
    "BailingMoeV2_5ForCausalLM": _NO_REFERENCE,
    "DiffLlamaForCausalLM": "its attention subtracts one softmax from another, which nvcli does not compute",
    "DiffusionGemmaForBlockDiffusion": "it writes blocks of text by diffusion, and nvcli one token after another",
    "DogeForCausalLM": "its scores depend on a number that each value gives, which nvcli does not compute",
    "Ernie4_5_VLMoeForConditionalGeneration": "the tokens of its images have experts of their own, as nvcli's do not",
    "FastVlmForConditionalGeneration": "its tower is a network of convolutions, which nvcli does not compute",
    "HrmTextForCausalLM": "tokens of its prompts attend both ways, which nvcli computes for encoders and images alone",
    **{f"Inkling2{kind}For{use}": _ATTENDED_BLOCKS for kind in ("", "Loop") for use in _USES},
    "InternVLChatModel": "its files are those of its own code; OpenGVLab's checkpoints whose names end in -hf run",
    "JetMoeForCausalLM": "its attention has experts, which nvcli does not compute",
    "Molmo2ForConditionalGeneration": "its tower makes tokens across tiles that overlap, as nvcli's do not",
    "OLMoForCausalLM": "its files are those of its own code; allenai's checkpoints whose names end in -hf run",
    "PerceptionLMForConditionalGeneration": "its tower is one of timm's, which nvcli does not compute",
    "RwkvForCausalLM": _RECURRENT,
    "xLSTMForCausalLM": _RECURRENT,
    "ZayaForCausalLM": "its attention convolves queries and keys (CCA), which nvcli does not compute",
}
"""Well-known architectures that need more than is computed."""
_CLASSIFIERS = (CLASSIFIER, "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")


def describe_unsupported(name: str, config: JsonFile, read: Callable[[JsonFile], object]) -> str:
    """Return the explanation for an unsupported architecture.

    `read` makes a model from a config.json; it raises LoadError or ConfigError for one that does not fit.
    """
    kind = _LACKING.get(name) or _kind(name, config.values)
    if kind is not None:
        return kind
    found = _nearest(name, config, read)
    if found is None:
        parts = {"audio_config": "it reads audio, and nvcli reads text and images", "vision_config": _NO_TOWER}
        told = (problem for key, problem in parts.items() if isinstance(config.values.get(key), dict))
        return next(told, "its config.json fits no supported family")
    family, unread = found
    other = family.architectures[0]
    apart = f" but for {' and '.join(f'`{key}`' for key in unread)}" if unread else ""
    return (
        f"its config.json has the keys of {other} ({family.name}){apart}. If it computes the same, "
        f'--hf-overrides \'{{"architectures": ["{other}"]}}\' runs it as one'
    )


def _kind(name: str, values: Mapping[str, Any]) -> str | None:
    """Say which kind of model it is, if nvcli supports none of that kind; None if nothing says so."""
    if "ForReward" in name or "RewardModel" in name:
        return f"its head is that of its own code; `nvcli classify` runs reward models whose names end in {CLASSIFIER}"
    kind = None
    if values.get("is_encoder_decoder") is True:
        kind = "an encoder with a decoder"
    elif name.endswith(_CLASSIFIERS):
        kind = "a classifier"
    elif name.endswith("ForMaskedLM") or "type_vocab_size" in values:
        kind = "an encoder"
    if kind is not None:
        return f"it is {kind}, and nvcli serves decoders, ModernBERT, EuroBERT, and classifiers of texts made of these"
    if any(key.startswith(("mamba_", "ssm_", "state_size")) for key in values):
        return "it has Mamba layers of a kind that nvcli does not compute"
    text = values.get("text_config")
    if "index_topk" in values or (isinstance(text, dict) and "index_topk" in text):
        return _DSA
    if "kv_lora_rank" in values:
        return "it has multi-head latent attention in layers of a form that nvcli does not compute"
    return None


def _nearest(name: str, config: JsonFile, read: Callable[[JsonFile], object]) -> tuple[Family, list[str]] | None:
    """Return the family that reads most of a config.json's keys, and the keys that it does not read; None: no family
    fits.

    Among families that read equally many, the name decides.
    """
    fitting: list[tuple[Family, list[str]]] = []
    for family in FAMILIES:
        candidate = config.replacing(architectures=list(family.architectures[:1]))
        try:
            model = read(candidate)
        except (LoadError, ConfigError):
            continue
        told = {key: value for key, value in candidate.values.items() if not _is_inert(key, value)}
        unread = [key for key in told if not _is_read(key, candidate, read, model)]
        if len(unread) > _MOST_UNREAD or any(isinstance(told[key], dict) for key in unread):
            continue
        fitting.append((family, unread))
    own_word = _first_word(name)
    return min(
        fitting, key=lambda found: (len(found[1]), _first_word(found[0].architectures[0]) != own_word), default=None
    )


def _first_word(name: str) -> str:
    """Return the first word of an architecture's name: `Qwen3MoeForCausalLM` → `Qwen`."""
    return re.sub("(?<=[a-z])[^a-z].*", "", name)


def _is_inert(key: str, value: Any) -> bool:
    return value is None or key in _INERT or key.startswith("_")


def _is_read(key: str, config: JsonFile, read: Callable[[JsonFile], object], model: object) -> bool:
    """Whether `read`, which makes `model` from a config.json, looks at a key of it."""
    return is_read(lambda value: read(config.replacing(**{key: value})), model)
