"""`nvcli bench`: turns its options into a workload and the replicas that answer it."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from nvcli.core.config import RunConfig
from nvcli.core.lora_config import LoraConfig
from nvcli.core.messages import unpack
from nvcli.core.system.host_memory import available_ram
from nvcli.engine.request import Request
from nvcli.errors import ConfigError
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.row_images import RowImages
from nvcli.job.planning.layout import resolve_layout
from nvcli.job.run.engine_settings import ResolvedEngines, load_checkpoint, resolve_engine_config, resolve_engines
from nvcli.job.run.image_settings import why_no_images
from nvcli.job.run.resolve import model_of_rows
from nvcli.job.run.row_settings import read_row_settings, task_rows
from nvcli.models.adapters.adapter import Adapter, read_adapter
from nvcli.models.config import ModelConfig
from nvcli.models.vision.image_processor import read_processor
from nvcli.sizing.ram import check_ram
from nvcli.tools.bench.ablation import parse_ablations
from nvcli.tools.bench.adapters import in_mode, in_turns, merge_by_cost, spread_over_adapters, write_adapters
from nvcli.tools.bench.bench import BenchAdapters, BenchResult, bench
from nvcli.tools.bench.file_workload import FileWorkload
from nvcli.tools.bench.made_up_images import MadeUpImages
from nvcli.tools.bench.options import BenchOptions
from nvcli.tools.bench.plot import check_plot, draw_run
from nvcli.tools.bench.shapes import model_folder
from nvcli.tools.bench.workload import PrefixLevel, Workload

_USUAL_MODEL_LEN = 4096
_USUAL_IMAGE_SIZE = "1024x768"
_OF_MADE_UP_PROMPTS = ("input_len", "shared_prefix", "images", "samples", "temperature", "top_k", "top_p")


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Parse a range such as `100:1024`, or one number for both ends. Raises ConfigError."""
    low, _, high = text.partition(":")
    try:
        ends = int(low), int(high or low)
    except ValueError:
        ends = (0, 0)
    if not 1 <= ends[0] <= ends[1]:
        raise ConfigError(f"{option} {text}: allowed: a number, or two with the smaller first, such as 100:1024")
    return ends


def parse_size(text: str) -> tuple[int, int]:
    """Parse a size such as `1024x768`, width first. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    size = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(size):
        raise ConfigError(f"--image-size {text}: allowed: a width and a height in pixels, such as 1024x768")
    return size


def parse_shared_prefix(text: str) -> tuple[PrefixLevel, ...]:
    """Parse prefixes such as `2048`, `2048:16` (16 groups) or `1024,1024:8` (two levels). Raises ConfigError."""
    levels = []
    try:
        for level in text.split(","):
            num_tokens, _, num_groups = level.partition(":")
            levels.append(PrefixLevel(num_tokens=int(num_tokens), num_groups=int(num_groups or 1)))
    except ValueError:
        levels = []
    if not levels or any(level.num_tokens < 0 or level.num_groups < 1 for level in levels):
        raise ConfigError(
            f"--shared-prefix {text}: allowed: a number of tokens such as 2048, with groups 2048:16, with a second "
            "level 1024,1024:8"
        )
    return tuple(levels)


def make_workload(options: BenchOptions) -> Workload | FileWorkload:
    """Make the workload. Raises ConfigError for options that are invalid or contradict each other."""
    lengths = {name: parse_range(_option(name), text) for name, text in _given(options, "input_len", "output_len")}
    if options.input is None:
        prefixes = () if options.shared_prefix is None else parse_shared_prefix(options.shared_prefix)
        numbers: Any = _given(options, "num_requests", "samples", "temperature", "top_k", "top_p")
        workload = Workload(**dict(numbers, **lengths), shared_prefix=prefixes, seed=options.seed)
        num_groups = math.prod(level.num_groups for level in prefixes)
        if num_groups > workload.num_requests:
            raise ConfigError(
                f"--shared-prefix {options.shared_prefix}: {num_groups} groups leave some empty with only "
                f"{workload.num_requests} requests; raise --num-requests, or lower the number of groups"
            )
        return workload
    for name, _ in _given(options, *_OF_MADE_UP_PROMPTS):
        raise ConfigError(
            f"{_option(name)} is for made-up prompts, but the rows of --input bring their own; leave it out"
        )
    if options.shape is not None:
        raise ConfigError("--input needs a tokenizer, which --shape does not have; name a model with --model")
    return FileWorkload(input=options.input, num_rows=options.num_requests, seed=options.seed, **lengths)


def _given(options: BenchOptions, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield those of some options that are given, with their values."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            yield name, value


def _option(name: str) -> str:
    """Return an option of the command by its name in `BenchOptions`."""
    return f"--{name.replace('_', '-')}"


def run_bench(run: RunConfig, options: BenchOptions, *, say: Callable[[str], None]) -> BenchResult:
    """Bench `run.model`, or made-up weights of a known shape. Raises ConfigError and what the engines raise."""
    workload = make_workload(options)
    if options.plot is not None:
        check_plot(options.plot)
    if options.accept_rate is not None and run.speculation.method == "none":
        raise ConfigError(f"--accept-rate {options.accept_rate} is of drafts, and there are none; add --speculate auto")
    _check_adapters(run, options)
    if options.image_size is not None and options.images is None:
        raise ConfigError(f"--image-size {options.image_size} is the size of made-up images; add --images 1")
    size = parse_size(options.image_size or _USUAL_IMAGE_SIZE)
    run = in_mode(run, options.lora_mode)
    run = msgspec.structs.replace(run, task="generate", images="never" if options.images is None else "always")
    if options.shape is not None:
        run = msgspec.structs.replace(run, load_format="dummy")
    with ExitStack() as stack:
        folder = model_folder(run.model, options.shape, revision=run.revision, quantization=run.quantization)
        path = stack.enter_context(folder)
        checkpoint = load_checkpoint(run, path)
        task_rows(run, checkpoint, path)  # which refuses a model without tokens
        why_not = None if options.images is None else why_no_images(run, path, checkpoint)
        if why_not is not None:
            raise ConfigError(f"--images {options.images}: {why_not}; or leave --images out")
        engines = resolve_engines(run, path, checkpoint)
        model, row_adapters = engines.model, engines.row_adapters
        images = None if options.images is None else _make_images(path, model, options.images, size, options.seed)
        requests, run = _draw_requests(run, path, engines, workload, images, say=say)
        adapters = None
        if options.lora_rank is not None:
            made_up = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nvcli-adapters-")))
            lora, row_adapters = _make_adapters(run, path, options, made_up)
            run = in_mode(msgspec.structs.replace(run, lora=lora), options.lora_mode)
        config = resolve_engine_config(run, path, model, row_adapters=row_adapters)
        if config.lora_paths:
            if isinstance(workload, Workload) or options.lora_rank is not None:
                requests = spread_over_adapters(requests, len(config.lora_paths), seed=options.seed)
            if options.lora_mode == "auto":
                config = merge_by_cost(config, requests, run, row_adapters, model)
            requests = in_turns(requests, config.merged_adapters)
            adapters = BenchAdapters(
                num_adapters=len(config.lora_paths),
                made_up_rank=options.lora_rank,
                num_merged=len(config.merged_adapters),
            )
        layout = resolve_layout(run, config, model, num_requests=sum(request.n for request in requests))
        check_ram(config, model, num_replicas=layout.data_parallel_size, available=available_ram())
        if layout.why:
            say(layout.why)
        config = msgspec.structs.replace(layout.apply(config), record_steps=True, draft_accept_rate=options.accept_rate)
        return bench(
            config,
            requests,
            model=options.shape or run.model,
            model_config=model,
            workload=workload,
            adapters=adapters,
            images=None if images is None else images.figures,
            data_parallel_size=layout.data_parallel_size,
            repeat=options.repeat,
            ablations=parse_ablations(options.ablate, config) if options.ablate is not None else [],
            say=say,
        )


def plot_result(result: BenchResult, path: Path) -> None:
    """Draw the steps of the median run. Raises ConfigError if `path` cannot be written."""
    title = f"{result.model}: {result.median.num_requests} requests, {result.median.output_rate:,.0f} tokens/s"
    draw_run(path, title, result.timelines[result.median_number], result.ready.num_blocks)


def _draw_requests(
    run: RunConfig,
    path: Path,
    engines: ResolvedEngines,
    workload: Workload | FileWorkload,
    images: MadeUpImages | None,
    *,
    say: Callable[[str], None],
) -> tuple[list[Request], RunConfig]:
    """Return the requests of a workload, and the run with a `max_model_len` that they fit. Raises ConfigError."""
    model = engines.model
    requests: list[Request] = []
    if isinstance(workload, Workload):
        longest = workload.max_model_len + (0 if images is None else images.num_tokens)
    else:
        requests = workload.requests(model_of_rows(read_row_settings(run, path, model), engines), say=say)
        longest = max(len(unpack(request.prompt_ids)) + request.max_tokens for request in requests)
    max_model_len = run.max_model_len or min(max(_USUAL_MODEL_LEN, longest), model.max_position_embeddings)
    if longest > max_model_len:
        raise ConfigError(
            f"requests of up to {longest} tokens do not fit max_model_len {max_model_len}; "
            "lower --input-len, --output-len, --shared-prefix or --images"
        )
    if isinstance(workload, Workload):  # drawn once they are known to fit, because it takes a while
        requests = workload.requests(model.vocab_size)
    run = msgspec.structs.replace(run, max_model_len=max_model_len)
    return requests if images is None else images.add_to(requests), run


def _make_images(path: Path, model: ModelConfig, per_prompt: int, size: tuple[int, int], seed: int) -> MadeUpImages:
    assert model.vision is not None  # as `images` is `always`
    token_id, text = model.vision.image_token_id, model.vision.text
    text = None if text is None else replace(text, between="")  # made-up prompts have nothing between rows
    reader = RowImages(read_processor(path, model.vision), token_id, ImageFolders.of((), ()), text)
    return MadeUpImages(reader, token_id=token_id, per_prompt=per_prompt, size=size, seed=seed)


def _check_adapters(run: RunConfig, options: BenchOptions) -> None:
    """Raise ConfigError for options about adapters that contradict others, or lack them."""
    if options.lora_rank is None and options.num_loras is not None:
        raise ConfigError(f"--num-loras {options.num_loras} is the number of made-up adapters; add their --lora-rank")
    if options.lora_rank is not None and run.lora is not None:
        raise ConfigError(
            f"--lora-rank {options.lora_rank} makes up adapters, and `lora` names others; leave one of the two out"
        )
    if options.lora_mode is not None and options.lora_rank is None and run.lora is None:
        raise ConfigError(f"--lora-mode {options.lora_mode} is for adapters, and there are none; add --lora-rank")


def _make_adapters(
    run: RunConfig, path: Path, options: BenchOptions, folder: Path
) -> tuple[LoraConfig, dict[str, Adapter]]:
    """Write the made-up adapters into `folder`. Return the key `lora`, and the adapters by name."""
    assert options.lora_rank is not None
    model = load_checkpoint(run, path)
    num_adapters = options.num_loras or 1
    lora = write_adapters(model, folder, rank=options.lora_rank, num_adapters=num_adapters, seed=options.seed)
    first = read_adapter(Path(next(iter(lora.adapters.values()))), model)
    return lora, dict.fromkeys(lora.adapters, first)  # they are alike
