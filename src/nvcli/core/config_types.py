"""Types of the configuration's values, and their upper limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

MAX_INT32 = (1 << 31) - 1
"""The largest count, size or token id, as they are sent in 32 bits."""
MAX_INT64 = (1 << 63) - 1
"""The largest integer that can be sent to an engine."""
PositiveInt = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]
MAX_PROCESSES = 1024
"""Maximum copies, stages, or ranks that share a layer; no machine has as many GPUs."""
NumProcesses = Annotated[int, Meta(ge=1, le=MAX_PROCESSES)]
ParallelSize = NumProcesses | Literal["auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ModelDtype = Literal["float32", "bfloat16", "float16"]
KVDtype = ModelDtype | Literal["fp8"]
KeptWeights = Literal["none", "fp8", "w4a16", "w4a8"]
FOUR_BITS: Sequence[KeptWeights] = ("w4a16", "w4a8")
"""Formats that keep a checkpoint's 4 bits."""
FP8_PRODUCTS: Sequence[KeptWeights] = ("fp8", "w4a8")
"""Formats whose products take activations in FP8."""
Quantization = Literal["auto"] | KeptWeights
Device = Literal["auto", "cpu", "cuda"]
KVCacheDtype = Literal["auto", "bf16", "fp8"]
LoadFormat = Literal["auto", "dummy"]
FP8Accumulation = Literal["exact", "fast"]
DraftPolicyName = Literal["auto", "always"]
Order = Literal["input", "completion"]
ChatChoice = Literal["auto", "always", "never"]
AttentionName = Literal["auto", "torch", "triton", "flash-attn", "flashinfer"]
OnTooLong = Literal["error", "truncate-left", "truncate-right"]
SpecialTokens = Literal["allow", "escape", "refuse"]
ReasoningParserName = Literal["auto", "none", "think", "harmony", "mistral", "seed_oss", "cohere", "gemma4"]
ToolParserName = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "glm",
    "seed_oss",
    "olmo3",
    "mistral",
    "granite",
    "cohere",
    "gemma4",
    "llama",
    "pythonic",
    "harmony",
]

MAX_DRAFT_TOKENS = 15
"""Maximum `speculation.max_draft_tokens`."""
MAX_NUM_SEQS = 65536
"""Maximum `max_num_seqs`."""
MAX_BLOCK_SIZE = 1024
"""Maximum `block_size`."""
