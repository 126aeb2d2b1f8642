"""The format in which the ranks of a run keep weights: what `quantization: auto` means for a checkpoint and the GPUs at
hand.

A checkpoint in FP8 stays in FP8 on GPUs with units for FP8 products: they are faster, and take half the memory. So does
MXFP8, whose scales are folded into the scales of rows. The experts of an MXFP4 checkpoint become FP8, which loses next
to nothing, if that leaves enough memory and each expert gets many rows; otherwise they stay in 4 bits, and activations
become FP8. Any other checkpoint in 4 bits runs large batches faster in 16 bits. It stays in 4 bits only if 16 bits
would leave so little memory for the KV cache that batches would be small. GGUF's integers of more than 4 bits are then
kept in 8: in FP8 they would lose 2.6 % of a weight's norm, and Q8_0 itself loses 0.5 %, Q6_K 1.9 %. FP4 then becomes
FP8, if GPUs have units for it and 8 bits leave enough memory, or if ranks cannot keep its format. Parts of FP4 or MXFP4
weights that are not whole groups may still be kept in FP8. On a CPU all weights are plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from nvcli.core.config import RunConfig
from nvcli.core.config_types import KeptWeights
from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.nvidia_smi import SmiGpu, smallest_memory, visible_gpus
from nvcli.errors import ConfigError
from nvcli.job.planning.layout import layout_as_given
from nvcli.kernels.weight_formats import FP8_CAPABILITY
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.config import ModelConfig
from nvcli.sizing.weights import largest_stage, weight_bytes

_LARGE_SHARE = 0.5
"""Weights that would take more than this share of a GPU's memory stay in 4 bits."""
_MANY_EXPERTS = 16
"""With at least this many experts for each one that a token chooses, experts in MXFP4 are faster in 4 bits than in 8,
because each gets few rows: gpt-oss-120b has 32 and makes 15,677 output tokens/s on two H200s instead of 12,552;
gpt-oss-20b has 8, and its prompts and large batches are faster in 8 bits."""


def keep_weights(
    run: RunConfig,
    model: ModelConfig,
    device: Literal["cpu", "cuda"],
    *,
    gpus: Sequence[SmiGpu] | None = None,
    adapter: Adapter | None = None,
) -> ModelConfig:
    """Return the model with its weights in the format that a run's ranks keep. Raises ConfigError, also if an `adapter`
    changes weights that would stay in 4 bits.

    `gpus` are the run's GPUs, as far as known; None: those that nvidia-smi shows.
    """
    if run.quantization != "auto":
        kept = model.with_quantization(run.quantization)
        if run.quantization == "w4a8":
            _check_fp8_units(gpus or () if device == "cpu" else _known_gpus(gpus))
        if adapter is not None:
            adapter.check_kept(kept)
        return kept
    format_kept = _format_kept(run, model, adapter)
    if device == "cpu" or format_kept is None or _obstacle(run, model, format_kept):
        return model.with_quantization("none")
    gpus = _known_gpus(gpus)
    assert model.quantisation is not None
    has_fp8_units = all(map(_has_fp8_units, gpus))
    if model.quantisation.numbers == "fp8":
        return model.with_quantization("fp8" if has_fp8_units else "none")
    smallest = smallest_memory(gpus)
    if smallest is None:
        return model.with_quantization("none")
    plain, numbers = model.with_quantization("none"), model.quantisation.numbers
    fits_plain = not _is_large(run, plain, smallest)
    if fits_plain and numbers != "mxfp4":
        return plain
    if numbers == "mxfp4" and format_kept == "w4a16" and has_fp8_units:
        format_kept = "w4a8"
        if _has_many_experts(model):
            return model.with_quantization(format_kept)
    if numbers in ("mxfp4", "fp4") and has_fp8_units and not _obstacle(run, model, "fp8"):
        in_fp8 = model.with_quantization("fp8")
        if not _is_large(run, in_fp8, smallest):
            return in_fp8
    return plain if fits_plain else model.with_quantization(format_kept)


def _known_gpus(gpus: Sequence[SmiGpu] | None) -> Sequence[SmiGpu]:
    """Return the GPUs as far as they are known; None: those that nvidia-smi shows."""
    if gpus is not None:
        return gpus
    found = visible_gpus()
    return () if isinstance(found, str) else found


def _has_fp8_units(gpu: SmiGpu) -> bool:
    """Whether a GPU has units for FP8 products, as far as is known."""
    return gpu.capability is None or gpu.capability >= FP8_CAPABILITY


def _check_fp8_units(gpus: Sequence[SmiGpu]) -> None:
    """Raise ConfigError if a GPU has no units for FP8 products."""
    for gpu in gpus:
        if not _has_fp8_units(gpu):
            raise ConfigError(
                f"`quantization` is w4a8, and {gpu.name} has no units for FP8 products: use quantization: w4a16"
            )


def explain_choice(run: RunConfig, model: ModelConfig, config: EngineConfig, *, adapter: Adapter | None = None) -> str:
    """Explain the choice of `quantization: auto` for a checkpoint in FP8 or 4 bits; empty if there was no choice."""
    format_kept = _format_kept(run, model, adapter)
    if run.quantization != "auto" or config.device == "cpu" or format_kept is None:
        return ""
    assert model.quantisation is not None
    obstacle, numbers = _obstacle(run, model, format_kept), model.quantisation.numbers
    named, bits = f"{model.quantisation.name} weights", f"{model.quantisation.bits} bits"
    what = {"fp4": named, "affine": named, "mxfp4": "experts"}.get(numbers, "weights")
    if model.quantization != "none":
        more = "more bits" if numbers == "fp4" and model.quantization == "w4a16" else config.dtype
        why = f"{more} would take more than {_LARGE_SHARE:.0%} of a GPU's memory"
        if numbers == "fp8":
            why = "the checkpoint has them"
        elif numbers == "mxfp4" and model.quantization == "fp8":
            why = "large batches and prompts are fastest so, and it fits"
        elif numbers == "mxfp4" and _has_many_experts(model):
            why = "so many experts are fastest so"
        how = "stay in FP8" if numbers == "fp8" else "become FP8" if model.quantization == "fp8" else f"stay in {bits}"
        return f"{what} {how}, as {why}; --quantization none: in {config.dtype}"
    if numbers == "fp8":
        no_units = "the GPUs have no units for FP8 products; --quantization fp8 keeps them, in half the memory"
        return f"FP8 weights become {config.dtype}, as {obstacle or no_units}"
    if numbers == "fp4":
        exact = "that loses nothing and fits; --quantization fp8 takes half the memory, and rounds some of them"
        return f"{what} become {config.dtype}, as {obstacle or exact}"
    faster = "large batches are faster so; --quantization w4a16 keeps them"
    if format_kept == "fp8":
        why = "the adapter changes them" if adapter is not None else _obstacle(run, model, "w4a16")
        faster = f"{why}; --quantization fp8 takes half the memory"
    return f"{what} in {bits} become {config.dtype}, as {obstacle or faster}"


def check_fast_accumulation(run: RunConfig, model: ModelConfig, device: Literal["cpu", "cuda"]) -> None:
    """Raise ConfigError if `fp8_accumulation: fast` cannot make anything faster. `model` has its weights as the run's
    ranks keep them."""
    way_out = "leave it out"
    if device == "cpu":
        problem = "a CPU adds up in float32 whatever is asked for"
    elif run.batch_invariant:
        problem = "`batch_invariant` is true, with which nothing is multiplied in FP8"
    elif model.fp8_scaling == "block":
        problem = "the checkpoint's FP8 weights have scales by blocks, by which each 128 numbers of a sum are scaled"
    elif model.quantization != "fp8":
        came_to = " (auto came to it)" if run.quantization == "auto" else ""
        problem = f"`quantization` is {model.quantization}{came_to}, with which nothing is multiplied in FP8"
        way_out += ", or set `quantization` to fp8, on GPUs with FP8 units"
    else:
        return
    raise ConfigError(f"`fp8_accumulation` is fast, but {problem}: {way_out}")


def _format_kept(run: RunConfig, model: ModelConfig, adapter: Adapter | None) -> KeptWeights | None:
    """Return how ranks could keep the checkpoint's quantised weights; None: it has none that they can keep. Weights
    that an adapter changes cannot stay in 4 bits, and FP4 that cannot be cut in 4 bits may be cut in 8."""
    kept = "none" if model.quantisation is None else model.quantisation.kept_as
    if kept == "w4a16" and adapter is not None:
        try:
            adapter.check_kept(model.with_quantization(kept))
        except ConfigError:
            return "fp8"
    if kept == "w4a16" and model.quantisation is not None and model.quantisation.numbers in ("fp4", "mxfp4"):
        kept = "fp8" if _obstacle(run, model, kept) else kept
    return None if kept == "none" else kept


def _obstacle(run: RunConfig, model: ModelConfig, format_kept: KeptWeights) -> str:
    """Explain why weights cannot be kept so on any GPU; empty if they can."""
    if run.batch_invariant:
        return "batch_invariant asks for it"
    try:
        kept = model.with_quantization(format_kept)
    except ConfigError:  # as where groups are too small, or layers that are left alone cannot be told
        return f"ranks cannot keep them; --quantization {format_kept} says why"
    tp = layout_as_given(run).tensor_parallel_size
    if kept.divides_by(tp):
        return ""
    may_be_whole = model.has_experts and replace(kept, expert_parallel=True).divides_by(tp)
    return f"they cannot be cut over {tp} GPUs" + (" (--ep keeps experts whole)" if may_be_whole else "")


def _has_many_experts(model: ModelConfig) -> bool:
    routings = [layer.routing for layer in model.decoder.layer_kinds if layer.routing is not None]
    return any(one.num_experts >= _MANY_EXPERTS * one.experts_per_token for one in routings)


def _is_large(run: RunConfig, model: ModelConfig, gpu_bytes: int) -> bool:
    """Tell whether weights, kept as `model` says, would take too much of a GPU's memory."""
    dtype = model.dtype if run.dtype == "auto" else run.dtype
    tp = layout_as_given(run).tensor_parallel_size
    stage = largest_stage(model, run.pipeline_parallel_size)
    num_bytes = sum(weight_bytes(model, dtype, tensor_parallel_size=tp, stage=stage).values())
    return num_bytes > _LARGE_SHARE * run.gpu_memory_utilization * gpu_bytes
