"""`nvcli bench`: from its options to an engine and a workload."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from nvcli.bench.bench import BenchResult, bench
from nvcli.bench.shapes import SHAPES, write_shape
from nvcli.bench.workload import Workload
from nvcli.config import RunConfig
from nvcli.errors import ConfigError
from nvcli.models.checkpoint import resolve_model
from nvcli.models.config import load_model_config
from nvcli.pipeline.resolve import resolve_engine_config


def parse_range(option: str, text: str) -> tuple[int, int]:
    """`100:1024`, or one number for both ends. Raises ConfigError."""
    low, _, high = text.partition(":")
    try:
        ends = int(low), int(high or low)
    except ValueError:
        ends = (0, 0)
    if not 1 <= ends[0] <= ends[1]:
        raise ConfigError(f"{option} is {text!r}; give a number, or two with the smaller first, such as 100:1024")
    return ends


def run_bench(
    run: RunConfig, workload: Workload, *, shape: str | None, repeat: int, say: Callable[[str], None]
) -> BenchResult:
    """Bench `run.model`, or made-up weights of a known `shape`. Raises ConfigError and what the engine raises."""
    if shape is not None and shape not in SHAPES:
        raise ConfigError(f"--shape {shape!r} is unknown; known: {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="nvcli-shape-") as folder:
        path = resolve_model(run.model) if shape is None else write_shape(shape, Path(folder))
        model = load_model_config(path)
        if run.max_model_len is None:
            longest = min(max(4096, workload.max_model_len), model.max_position_embeddings)
            run = msgspec.structs.replace(run, max_model_len=longest)
        config = resolve_engine_config(run, path, model)
        if workload.max_model_len > config.max_model_len:
            raise ConfigError(
                f"requests of up to {workload.max_model_len} tokens do not fit max_model_len {config.max_model_len}; "
                "lower --input-len or --output-len"
            )
        config = msgspec.structs.replace(
            config, record_steps=True, load_format="checkpoint" if shape is None else "random"
        )
        return bench(config, workload, model=shape or run.model, model_config=model, repeat=repeat, say=say)
