"""Options of `nvcli bench`, as given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from nvcli.core.config_types import MAX_INT32, MAX_INT64, PositiveInt
from nvcli.core.flags import MODEL, RESULT, WORKLOAD, Flag
from nvcli.core.lora_config import MAX_ROW_RANK, LoraMode
from nvcli.core.prompt_image import MAX_PROMPT_IMAGES

Shape = Annotated[
    str | None,
    Flag(
        *("--shape", MODEL, "Made-up weights of a known shape, such as qwen3-0.6b; no files.", "NAME"),
        completes="shapes",
    ),
]


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The workload and the measurement; None: not given."""

    shape: Shape = None
    input: Annotated[
        str | None,
        Flag("--input", WORKLOAD, "File of rows, as for `generate`, instead of made-up ones.", "FILE"),
    ] = None
    num_requests: Annotated[
        Annotated[int, Meta(ge=1, le=10_000_000)] | None,
        Flag(
            "--num-requests",
            WORKLOAD,
            "Number of requests; with --input the first N rows [default: 256; with --input all]",
        ),
    ] = None
    input_len: Annotated[
        str | None, Flag("--input-len", WORKLOAD, "Prompt tokens, uniform [default: 100:1024]", "A:B")
    ] = None
    output_len: Annotated[
        str | None,
        Flag(
            "--output-len",
            WORKLOAD,
            "Answer tokens, uniform; with --input, for rows without max_tokens [default: 100:1024]",
            "A:B",
        ),
    ] = None
    shared_prefix: Annotated[
        str | None,
        Flag(
            "--shared-prefix",
            WORKLOAD,
            "Tokens with which all prompts, or those of each group, begin; a comma adds a level.",
            "N[:GROUPS],...",
        ),
    ] = None
    images: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_PROMPT_IMAGES)] | None,
        Flag("--images", WORKLOAD, "Made-up images before each prompt."),
    ] = None
    image_size: Annotated[
        str | None, Flag("--image-size", WORKLOAD, "Their size in pixels [default: 1024x768]", "WxH")
    ] = None
    samples: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Flag("--samples", WORKLOAD, "Answers per prompt [default: 1]")
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None,
        Flag("--temperature", WORKLOAD, "Sampling temperature [default: 0.6]", "T"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT32)] | None,
        Flag("--top-k", WORKLOAD, "Sample among the K likeliest tokens; 0: off [default: 0]", "K"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Flag(
            "--top-p",
            WORKLOAD,
            "Sample among the likeliest tokens with this total probability; 1: off [default: 1]",
            "P",
        ),
    ] = None
    accept_rate: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Flag(
            "--accept-rate",
            WORKLOAD,
            "Take each draft of --speculate with this probability, right or not, and draft for every request.",
            "SHARE",
        ),
    ] = None
    lora_rank: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_ROW_RANK)] | None,
        Flag("--lora-rank", WORKLOAD, "Rank of made-up LoRA adapters, over which the requests are spread.", "R"),
    ] = None
    num_loras: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        Flag("--num-loras", WORKLOAD, "Number of these adapters [default: 1]"),
    ] = None
    lora_mode: Annotated[
        LoraMode | None,
        Flag(
            "--lora-mode",
            WORKLOAD,
            "merged: adapters with names are merged into the weights in turn, and requests run adapter by adapter; "
            "batched: requests of all run together; auto: by cost [default: lora.mode, where auto is batched]",
        ),
    ] = None
    seed: Annotated[
        int, Meta(ge=0, le=MAX_INT64), Flag("--seed", WORKLOAD, "Seed of the made-up lengths and tokens.")
    ] = 0
    repeat: Annotated[
        PositiveInt, Flag("--repeat", RESULT, "Passes over the workload, each with an empty prefix cache.")
    ] = 1
    ablate: Annotated[
        str | None,
        Flag(
            "--ablate",
            RESULT,
            "Run again without each of: overlap, graphs, prefix-cache, admission; or with backend=NAME.",
            "PART,...",
        ),
    ] = None
    plot: Annotated[
        Path | None, Flag("--plot", RESULT, "Draw step times and KV use over the run: an .svg or .png file.")
    ] = None
