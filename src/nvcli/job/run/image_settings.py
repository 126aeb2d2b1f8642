"""Decides whether a run reads the images of its rows, and what its engines must know about them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from nvcli.core.config import RunConfig
from nvcli.core.prompt_image import MAX_PROMPT_IMAGES
from nvcli.errors import ConfigError, RowError
from nvcli.job.file_formats import is_pdf
from nvcli.job.images.row_images import with_limits
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.config import ModelConfig
from nvcli.models.gguf.files import SUFFIX
from nvcli.models.vision.image_processor import PROCESSOR_FILES, ImageProcessor, has_processor, read_processor
from nvcli.models.vision.vision_config import TOWER, VisionConfig
from nvcli.worker.distributed.stage import Stage


def with_tower(run: RunConfig, model_path: Path, model: ModelConfig) -> ModelConfig:
    """Return the model with its vision tower where the run can use it. Raises ConfigError if it is asked for."""
    reason = why_no_images(run, model_path, model)
    if reason is None:
        return model.with_tower()
    if run.images == "always":
        raise ConfigError(f"`images` is always, and {reason}; or leave `images` out")
    return model


def why_no_images(run: RunConfig, model_path: Path, model: ModelConfig) -> str | None:
    """Return why a run reads no images, as the second half of a sentence; None: it reads them."""
    if model.vision is None and any(model_path.glob(f"*{SUFFIX}")):
        return "a model in GGUF is read without its tower for images (mmproj); give its *.safetensors in place of it"
    if model.vision is None:
        return f"this model ({model.architecture}) is read as one of text alone; take one that reads images"
    if run.images == "never":
        return "`images` is never; leave it out"
    stages, deep = run.pipeline_parallel_size, max((each.target for each in model.vision.deepstack), default=0)
    if stages > 1 and len(Stage(0, stages).layers(model.num_layers)) < deep:
        return (
            f"`pipeline_parallel_size` (--pp) is {stages}, and this model's first {deep} layers, after "
            "which images enter too, must all be in the first stage; lower it, or use --tp"
        )
    if run.attends_by_rows:
        return "`enable_attention_dp` (--attention-dp) is true, with which images are not read; leave it out"
    if model.both_ways or (run.task != "generate" and model.vision.has_whole_prompts):
        return f"`task` is {run.task}, which is not computed where all tokens of a prompt attend to each other"
    if run.batch_invariant and model.vision.attends_both_ways:
        return "`batch_invariant` is true, under which the tokens of an image cannot attend to all of it; leave it out"
    if find_spec("PIL") is None:
        return "Pillow is not installed: pip install 'nvcli[images]'"
    if not has_processor(model_path, model.vision):
        return f"{model_path} has no {PROCESSOR_FILES[1]}; copy it from the model's files"
    return None


def check_reads_pdfs(run: RunConfig, model_path: Path, model: ModelConfig, inputs: Sequence[str]) -> None:
    """Raise ConfigError if one of the inputs is a PDF file, and the run reads no images."""
    name = next(filter(is_pdf, inputs), None)
    if name is not None and (why_not := why_no_images(run, model_path, model)) is not None:
        raise ConfigError(f"the input {name} is a PDF file, whose pages are images, and {why_not}")


def image_processor(run: RunConfig, model_path: Path, vision: VisionConfig) -> ImageProcessor:
    """Read the image processor of a checkpoint, with the limits that the job sets. Raises LoadError and ConfigError."""
    given = {"min_pixels": run.job.min_pixels, "max_pixels": run.job.max_pixels}
    limits = {key: value for key, value in given.items() if value is not None}
    try:
        return with_limits(read_processor(model_path, vision), limits)
    except RowError as error:
        raise ConfigError(f"{', '.join(f'`job.{key}`' for key in limits)}: {error.message}") from None


def check_of_text(name: str, adapter: Adapter) -> None:
    """Raise ConfigError if an adapter that rows choose changes the tower, whose results all rows share."""
    changed = next((tensor for tensor in (*adapter.changes, *adapter.replaced) if tensor.startswith(f"{TOWER}.")), None)
    if changed is not None:
        raise ConfigError(
            f"the adapter {name} (`lora.adapters`) changes {changed} of the vision tower, which rows of all adapters "
            "share: merge it for all rows with --lora PATH, or set `images` to never"
        )


def image_limits(run: RunConfig, model_path: Path, model: ModelConfig, max_model_len: int) -> tuple[int, int]:
    """Return the most tokens of an image, 0 if the run reads none, and the most images of a prompt, where tiles with
    text between them count as images of their own."""
    vision = model.vision if model.has_tower else None
    if vision is None:
        return 0, MAX_PROMPT_IMAGES
    rule = image_processor(run, model_path, vision).rule
    pictures = rule.most_pictures if vision.text is not None and vision.text.parts_tiles else 1
    return min(rule.max_tokens, max_model_len), MAX_PROMPT_IMAGES * pictures


def reads_whole_prompts(model: ModelConfig) -> bool:
    """Whether the tokens of prompts with images attend to each other."""
    return model.vision is not None and model.has_tower and model.vision.has_whole_prompts


def whole_tokens(model: ModelConfig, max_image_tokens: int, max_prompt_tokens: int, max_num_batched_tokens: int) -> int:
    """Return `EngineConfig.whole_tokens`. Raises ConfigError if they do not fit into a step. `max_prompt_tokens`: those
    of a prompt, if prompts, or those with images, are computed in one step; else 0."""
    has_images = model.vision is not None and model.has_tower and model.vision.attends_both_ways != ""
    most = max_prompt_tokens or (max_image_tokens if has_images else 0)
    if max_num_batched_tokens < most:
        what, ways_out = "an image of", ["raise it"]
        if max_prompt_tokens:
            what = f"a prompt{' with images' if has_images else ''} of up to"
            ways_out.append("lower `max_model_len`")
        if has_images:
            ways_out.append("set `images` to never")
        raise ConfigError(
            f"`max_num_batched_tokens` is {max_num_batched_tokens}, and this model computes {what} {most} tokens in "
            f"one step: {' or '.join(ways_out)}"
        )
    return most
