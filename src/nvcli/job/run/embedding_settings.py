"""How a run makes embeddings: what `embed` says over what the checkpoint's files say."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nvcli.core.config import RunConfig
from nvcli.core.task_config import POSITIONS, DenseModule, Position
from nvcli.errors import ConfigError
from nvcli.models.config import ModelConfig
from nvcli.models.embedding_files import PROMPTS_FILE, read_embedding_files, read_text_prompts


class EmbeddingSettings(NamedTuple):
    """The way from hidden states to an embedding."""

    position: Position
    """The tokens whose hidden states are pooled."""
    dense: tuple[DenseModule, ...]
    """The linear layers after that."""
    normalize: bool
    prefix: str
    """Text that goes before those of rows."""
    size: int
    """The numbers of an embedding before `embed.dimensions` cuts it."""

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether one step must see all of a prompt, because layers read the mean over it."""
        return self.position == "all" and self.dense != ()


def embedding_settings(run: RunConfig, model_path: Path, model: ModelConfig) -> EmbeddingSettings:
    """Return the settings of a run that makes embeddings. Raises ConfigError and LoadError."""
    embed, files = run.embed, read_embedding_files(model_path, run.hf_overrides)
    dense, size = files.dense, model.hidden_size
    if dense:
        if dense[0].in_size != size:
            raise ConfigError(
                f"{dense[0].folder}/config.json: `in_features` is {dense[0].in_size}, and hidden states of {run.model} "
                f"have {size} numbers; download the model again"
            )
        size = dense[-1].out_size
    if embed.dimensions is not None and embed.dimensions > size:
        raise ConfigError(
            f"`embed.dimensions` is {embed.dimensions}, and {run.model} gives vectors of {size} numbers; lower it or "
            "leave it out"
        )
    pooling = embed.pooling
    if pooling == "auto":
        pooling = files.pooling or ("mean" if model.both_ways else "last")
    normalize = files.normalizes is not False if embed.normalize == "auto" else embed.normalize
    prefix = _prefix(run, model_path)
    if prefix and pooling == "mean" and not files.pools_prompts:
        raise ConfigError(
            f"{run.model} asks for the mean over texts without the prompt before them (`include_prompt` of its Pooling "
            "is false), which is not supported; `embed.prompt_name` (--prompt-name) can name an empty prompt, and "
            "`embed.pooling` (--pooling) another pooling"
        )
    return EmbeddingSettings(POSITIONS[pooling], dense, normalize, prefix, size)


def _prefix(run: RunConfig, model_path: Path) -> str:
    """Return the prompt that goes before texts. Raises LoadError, and ConfigError for one that has no such name in the
    checkpoint."""
    prompts, name = read_text_prompts(model_path), run.embed.prompt_name
    if name is None:
        return "" if prompts.default is None else prompts.by_name[prompts.default]
    if name not in prompts.by_name:
        known = ", ".join(prompts.by_name) or "none"
        raise ConfigError(
            f"`embed.prompt_name` (--prompt-name) is {name}, and {PROMPTS_FILE} of {run.model} names these: {known}; "
            "`job.prompt_template` (--prompt-template) writes others"
        )
    return prompts.by_name[name]
