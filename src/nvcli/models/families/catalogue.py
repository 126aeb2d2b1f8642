"""FAMILIES: all supported families, and the lookup of an architecture's name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from nvcli.models.families.family import Family

MODULES = """
    llama llama4 qwen qwen_hybrid qwen4 mistral gemma recurrent_gemma gemma3n gemma4 phi3 olmo glm glm5_next
    vision_models granite mamba_hybrids pure_mamba zamba2 lfm2 gpt_oss minicpm deepseek deepseek_v4 kimi_linear
    longcat cohere2 minimax step ernie hunyuan exaone dbrx dots windowed_experts muse inkling lara dory aria bitnet
    plain_mlps nemotron_h modernbert_decoder gpt_neox gpt2 bloom opt
"""
"""The modules of families, of which the common ones come first."""


def _families() -> Iterator[Family]:
    for module in MODULES.split():
        path = f"{__package__}.{module}"
        yield from (value for value in vars(import_module(path)).values() if isinstance(value, Family))


FAMILIES: tuple[Family, ...] = tuple({family.name: family for family in _families()}.values())
"""The families that these modules define, in the order in which `nvcli models` lists them."""


CLASSIFIER = "ForSequenceClassification"
"""The end of the name of a classifier: a decoder whose head gives a number for each class."""
_HEADLESS, _WITH_HEAD = ("Model", CLASSIFIER), ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of decoders without an LM head, and with one."""


def find_family(architecture: str) -> Family | None:
    """Return the family of an architecture in config.json, also of its bare decoder or of a classifier made of it; None
    if it is not supported."""
    names = [architecture]
    if architecture.endswith(_HEADLESS):
        bare = architecture.removesuffix(CLASSIFIER).removesuffix("Model")
        names += [f"{each}{end}" for each in (bare, bare.removesuffix("Text")) for end in _WITH_HEAD]
    known = (family for name in names for family in FAMILIES if name in (*family.architectures, *family.encoders))
    return next(known, None)
