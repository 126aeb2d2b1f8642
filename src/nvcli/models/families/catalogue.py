"""FAMILIES: all supported families, and the lookup of an architecture's name."""

from __future__ import annotations

from nvcli.models.families.bloom import BLOOM, MPT
from nvcli.models.families.cohere2 import AYA_VISION, COHERE, COHERE2, COHERE2_MOE, COMMAND_A_VISION
from nvcli.models.families.dbrx import DBRX
from nvcli.models.families.deepseek import AXK1, AXK2, DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, YOUTU
from nvcli.models.families.deepseek_v4 import DEEPSEEK_V4
from nvcli.models.families.dots import DOTS1, SOLAR_OPEN
from nvcli.models.families.ernie import ERNIE, ERNIE_MOE, PADDLEOCR_VL
from nvcli.models.families.exaone import EXAONE4, EXAONE4_5, EXAONE_MOE
from nvcli.models.families.family import Family
from nvcli.models.families.gemma import GEMMA, GEMMA2, GEMMA3, PALIGEMMA, VAULT_GEMMA
from nvcli.models.families.gemma3n import GEMMA3N
from nvcli.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from nvcli.models.families.glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, GLM4V, GLM4V_MOE, GLM_MOE_DSA, GLM_OCR
from nvcli.models.families.glm5_next import GLM5_NEXT
from nvcli.models.families.gpt2 import BIGCODE, CODEGEN, GPT2, GPT_NEO, GPTJ
from nvcli.models.families.gpt_neox import FALCON, GPT_NEOX, PERSIMMON, STABLELM
from nvcli.models.families.gpt_oss import GPT_OSS
from nvcli.models.families.granite import GRANITE, GRANITE4, GRANITE_SWA, HYPERCLOVAX, HYPERCLOVAX_VISION
from nvcli.models.families.hunyuan import HUNYUAN_OCR, HUNYUAN_V1, HUNYUAN_V1_MOE, HUNYUAN_V3, HUNYUAN_V4
from nvcli.models.families.kimi_linear import KIMI_LINEAR, LING
from nvcli.models.families.lara import LARA
from nvcli.models.families.lfm2 import LFM2, LFM2_MOE, LFM2_VL, LFM3, LFM3_VL
from nvcli.models.families.llama import CWM, HELIUM, INTERNLM3, LLAMA, SEED_OSS, SMOLLM3
from nvcli.models.families.llama4 import LLAMA4
from nvcli.models.families.longcat import LONGCAT_FLASH
from nvcli.models.families.mamba_hybrids import BAMBA, FALCON_H1, JAMBA
from nvcli.models.families.minicpm import MINICPM3, MINICPM_OCR, MINICPM_V4_6, MINICPM_V4_7
from nvcli.models.families.minimax import MINIMAX_M2, MINIMAX_M3, MINIMAX_TEXT_01
from nvcli.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3, MISTRAL4, MISTRAL_LARGE4, MIXTRAL
from nvcli.models.families.muse import MUSE_GLIMMER, MUSE_SPARK
from nvcli.models.families.nemotron_h import NEMOTRON_H, NEMOTRON_OMNI
from nvcli.models.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMO_HYBRID, OLMOE
from nvcli.models.families.opt import BIOGPT, OPT, XGLM
from nvcli.models.families.phi3 import PHI, PHI3, PHI_MOE
from nvcli.models.families.plain_mlps import APERTUS, APERTUS1P5, ARCEE, JAIS2, NANOCHAT, NEMOTRON, STARCODER2
from nvcli.models.families.pure_mamba import FALCON_MAMBA, MAMBA1, MAMBA2
from nvcli.models.families.qwen import (
    LIGHTON_OCR,
    QWEN2,
    QWEN2_5_OMNI,
    QWEN2_5_VL,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3,
    QWEN3_MOE,
    QWEN3_OMNI,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from nvcli.models.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from nvcli.models.families.recurrent_gemma import RECURRENT_GEMMA
from nvcli.models.families.step import STEP
from nvcli.models.families.vision_models import (
    GRANITE_DOCLING,
    IDEFICS3,
    INTERNVL,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    QIANFAN_OCR,
)
from nvcli.models.families.windowed_experts import AFMOE, BEAM, FLINT, KOLIBRI, LAGUNA, MELLUM, MIMO_V2_FLASH

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    LLAMA4,
    INTERNLM3,
    SMOLLM3,
    HELIUM,
    CWM,
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN2_VL,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN2_5_OMNI,
    QWEN3_OMNI,
    LIGHTON_OCR,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    MISTRAL,
    MIXTRAL,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL3,
    MISTRAL4,
    MISTRAL_LARGE4,
    GEMMA,
    GEMMA2,
    VAULT_GEMMA,
    RECURRENT_GEMMA,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    GEMMA4_UNIFIED,
    PALIGEMMA,
    PHI3,
    PHI_MOE,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    FLEX_OLMO,
    OLMO_HYBRID,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GLM5_NEXT,
    GLM4V,
    GLM4V_MOE,
    GLM_OCR,
    INTERNVL,
    QIANFAN_OCR,
    IDEFICS3,
    GRANITE_DOCLING,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    GRANITE,
    GRANITE_SWA,
    GRANITE4,
    HYPERCLOVAX,
    HYPERCLOVAX_VISION,
    BAMBA,
    FALCON_H1,
    MAMBA2,
    JAMBA,
    FALCON_MAMBA,
    MAMBA1,
    LFM2,
    LFM2_VL,
    LFM2_MOE,
    LFM3,
    LFM3_VL,
    GPT_OSS,
    SEED_OSS,
    MINICPM3,
    MINICPM_V4_6,
    MINICPM_V4_7,
    MINICPM_OCR,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    AXK1,
    AXK2,
    YOUTU,
    KIMI_LINEAR,
    LING,
    LONGCAT_FLASH,
    COHERE,
    COHERE2,
    AYA_VISION,
    COMMAND_A_VISION,
    COHERE2_MOE,
    MINIMAX_TEXT_01,
    MINIMAX_M2,
    MINIMAX_M3,
    MIMO_V2_FLASH,
    STEP,
    ERNIE,
    ERNIE_MOE,
    PADDLEOCR_VL,
    HUNYUAN_V1,
    HUNYUAN_OCR,
    HUNYUAN_V1_MOE,
    HUNYUAN_V3,
    HUNYUAN_V4,
    EXAONE4,
    EXAONE4_5,
    EXAONE_MOE,
    DBRX,
    DOTS1,
    SOLAR_OPEN,
    ARCEE,
    JAIS2,
    NANOCHAT,
    AFMOE,
    LAGUNA,
    BEAM,
    MUSE_GLIMMER,
    MUSE_SPARK,
    MELLUM,
    FLINT,
    KOLIBRI,
    LARA,
    APERTUS,
    APERTUS1P5,
    NEMOTRON,
    NEMOTRON_H,
    NEMOTRON_OMNI,
    STARCODER2,
    STABLELM,
    GPT_NEOX,
    PERSIMMON,
    GPT2,
    BIGCODE,
    GPT_NEO,
    GPTJ,
    CODEGEN,
    BLOOM,
    MPT,
    OPT,
    BIOGPT,
    XGLM,
    PHI,
    FALCON,
)
"""Families in the order in which `nvcli models` lists them."""


def find_family(architecture: str) -> Family | None:
    """Return the family of an architecture in config.json; None if it is not supported."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)
