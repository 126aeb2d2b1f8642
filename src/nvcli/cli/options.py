"""Options that several commands have, and the keys of the configuration that they set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from nvcli.cli import completion
from nvcli.cli.help import MODEL, OTHER, RESULT, ROWS
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
RevisionOption = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="NAME",
        help="Branch, tag or commit of a model on the Hugging Face hub [default: main]",
        rich_help_panel=MODEL,
    ),
]
HfOverridesOption = Annotated[
    str | None,
    typer.Option(
        "--hf-overrides",
        metavar="JSON",
        help="Keys that take the place of those in the model's config.json, such as "
        "'{\"max_position_embeddings\": 131072}'.",
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
        help="Maximum prompt + answer tokens [default: the model's limit]",
        rich_help_panel=MODEL,
    ),
]
MaxNumSeqsOption = Annotated[
    str | None,
    typer.Option("--max-num-seqs", metavar="N", help="Maximum requests at a time in each copy.", rich_help_panel=MODEL),
]
GpuMemoryUtilizationOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Share of each GPU's memory that the run may use.",
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
        help="Stages of layers in each copy, each on --tp GPUs of its own.",
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
        help="YAML file, or `none` [default: ./nvcli.yaml, if there is one]",
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


def model_or_shape(model: str | None, shape: str | None) -> str | None:
    """Return the name of what is measured. Raises ConfigError where `--model` and `--shape` are both given."""
    if model is not None and shape is not None:
        raise ConfigError(
            f"--shape {shape} and --model {model} exclude each other: --shape makes up weights, --model reads them; "
            "leave one out"
        )
    return model or shape
