"""Resolves the task of a run from the configuration and the checkpoint's files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from nvcli.core.config import RunConfig
from nvcli.core.task_config import PoolingName
from nvcli.errors import ConfigError
from nvcli.job.job import EmbedTask
from nvcli.job.rows.task_rows import EmbedRows, ScoreRows, TaskRows
from nvcli.models.config import ModelConfig
from nvcli.models.embedding_files import read_embedding_files

_POSITIONS: dict[PoolingName, Literal["last", "first", "all"]] = {"last": "last", "mean": "all", "cls": "first"}


def task_rows(run: RunConfig, model: ModelConfig, model_path: Path) -> TaskRows | None:
    """Return the task that replaces answers; None: answers. Raises ConfigError and LoadError."""
    if run.task != "embed":
        if not model.has_head:
            raise ConfigError(
                f"{run.model} is a {model.architecture}, which has no LM head and gives no tokens or their "
                "probabilities; `nvcli embed` makes embeddings with it"
            )
        return None if run.task == "generate" else ScoreRows(run.score)
    embed, files = run.embed, read_embedding_files(model_path, run.hf_overrides)
    if embed.dimensions is not None and embed.dimensions > model.hidden_size:
        raise ConfigError(
            f"`embed.dimensions` is {embed.dimensions}, and {run.model} gives vectors of {model.hidden_size} numbers; "
            "lower it or leave it out"
        )
    pooling = (files.pooling or "last") if embed.pooling == "auto" else embed.pooling
    normalize = files.normalizes is not False if embed.normalize == "auto" else embed.normalize
    task = EmbedTask(
        position=_POSITIONS[pooling], normalize=normalize, dimensions=embed.dimensions, encoding=embed.encoding
    )
    return EmbedRows(task)
