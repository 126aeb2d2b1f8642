"""Options that several commands have, and the keys of the configuration that they set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta

from nvcli.cli import completion
from nvcli.cli.help import MODEL, OTHER, RESULT, ROWS
from nvcli.cli.values import plain_value
from nvcli.errors import ConfigError

NumRows = Annotated[int, Meta(ge=1)]
"""The values of `LimitOption`."""
LimitOption = Annotated[
    str | None, typer.Option("--limit", metavar="N", help="Only the first N rows.", rich_help_panel=ROWS)
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N|auto",
        help="Only every N-th row, from row I (0 to N-1) on; `nvcli merge` joins the outputs.",
        rich_help_panel=ROWS,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH|NAME",
        help="Folder, Hugging Face id, or `demo`.",
        autocompletion=completion.models,
        rich_help_panel=MODEL,
    ),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="Made-up weights of a known shape, such as qwen3-0.6b; no files.",
        autocompletion=completion.shapes,
        rich_help_panel=MODEL,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="bfloat16, float16 or float32; auto: the checkpoint's own, float32 on a CPU.",
        autocompletion=completion.words("auto", "bfloat16", "float16", "float32"),
        rich_help_panel=MODEL,
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="TYPE",
        help="How weights are kept: none: in --dtype; fp8: linear layers in 8 bits; w4a16: in a checkpoint's 4 bits; "
        "auto: what suits checkpoint and GPU.",
        autocompletion=completion.words("auto", "none", "fp8", "w4a16"),
        rich_help_panel=MODEL,
    ),
]
MaxModelLenOption = Annotated[
    str | None,
    typer.Option(
        "--max-model-len",
        metavar="N",
        help="Most tokens of a prompt and its answer; what the model was made for.",
        rich_help_panel=MODEL,
    ),
]
MaxNumSeqsOption = Annotated[
    str | None,
    typer.Option(
        "--max-num-seqs", metavar="N", help="Most requests at a time in each copy; 256.", rich_help_panel=MODEL
    ),
]
GpuMemoryUtilizationOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Share of each GPU's memory that the run may use; 0.9.",
        rich_help_panel=MODEL,
    ),
]
TpOption = Annotated[
    str | None,
    typer.Option(
        "--tp",
        metavar="N|auto",
        help="GPUs (processes) for each copy; auto: what is fastest here.",
        rich_help_panel=MODEL,
    ),
]
EpOption = Annotated[
    bool,
    typer.Option(
        "--ep",
        help="Whole experts on each of the --tp GPUs, not a part of every expert.",
        rich_help_panel=MODEL,
    ),
]
PpOption = Annotated[
    str | None,
    typer.Option(
        "--pp",
        metavar="N",
        help="Stages of layers in each copy, each on --tp GPUs of its own; 1.",
        rich_help_panel=MODEL,
    ),
]
DpOption = Annotated[
    str | None,
    typer.Option(
        "--dp", metavar="N|auto", help="Copies of the model; auto: what is fastest here.", rich_help_panel=MODEL
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML file, or `none`. Without it ./nvcli.yaml, if there is one.",
        rich_help_panel=OTHER,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of the configuration; may be repeated.",
        autocompletion=completion.keys,
        rich_help_panel=OTHER,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="The result as JSON, on standard output.", rich_help_panel=RESULT)
]


def flag_values(texts: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of flags that set keys (`config.FLAG_KEYS`); None: not given.

    Texts that spell numbers become numbers. The names of models, devices and types stay text.
    """
    names = ("--model", "--dtype", "--quantization", "--device", "--order")
    return {flag: text if flag in names else plain_value(text) for flag, text in texts.items()}


def model_or_shape(model: str | None, shape: str | None) -> str | None:
    """Return the name of what is measured. Raises ConfigError where `--model` and `--shape` are both given."""
    if model is not None and shape is not None:
        raise ConfigError(
            f"--shape {shape} and --model {model} exclude each other: --shape makes up weights, --model reads them; "
            "leave one out"
        )
    return model or shape
