"""GraphShapes: the step shapes that a rank captures as CUDA graphs, and the memory of the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nvcli.attention.forward_batch import BatchShape
from nvcli.core.engine_config import EngineConfig
from nvcli.core.first_drafts import captured_first_from, first_draft_widths
from nvcli.models.config import ModelConfig
from nvcli.sizing.graph_sizes import (
    bound_tokens_of_home,
    draft_graph_sizes,
    may_absorb,
    may_share,
    may_share_prefixes,
    step_graph_sizes,
)
from nvcli.worker.runner.graph_runner import GraphRunner
from nvcli.worker.runner.memory import free_bytes
from nvcli.worker.runner.rank_attention import RankAttention

_LEAST_GRAPH_BYTES = 2 << 20
"""The granularity in which the driver allocates memory for graphs."""


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """The shapes to capture; none on a CPU."""

    at_start: list[BatchShape] = field(default_factory=list)
    """Shapes that are captured before the rank serves."""
    late: list[BatchShape] = field(default_factory=list)
    """Shapes that few jobs need. They are captured on first use, and their memory is set aside."""

    @classmethod
    def choose(
        cls, config: EngineConfig, model: ModelConfig, attention: RankAttention, device: torch.device
    ) -> GraphShapes:
        """Choose the shapes, by what `attention` can compute."""
        if device.type != "cuda" or config.enforce_eager:
            return cls()
        at_start, late = _shapes_without_drafts(config, model, attention)
        first, others = _shapes_with_drafts(config, attention)
        if attention.may_draft and config.draft_head is not None:
            # The head takes in steps with prompts while it is of use.
            with_prompts = [shape for shape in at_start if shape.prefill_rows]
            late += [replace(shape, extends_drafts=True) for shape in late if shape.prefill_rows]
            at_start = [replace(shape, extends_drafts=shape.prefill_rows > 0) for shape in at_start]
            late += with_prompts
        at_start = sorted(at_start + first, key=lambda shape: shape.num_tokens, reverse=True)
        late += others
        if config.placed_adapters:  # most steps of such a job have adapters, unless these are merged in turn
            with_adapters = [replace(shape, has_adapters=True) for shape in at_start]
            late += [replace(shape, has_adapters=True) for shape in late]
            if config.merged_adapters:  # tails of groups run with them, and are too short to capture graphs meanwhile
                at_start = with_adapters + at_start
            else:
                at_start, late = with_adapters, at_start + late
        return cls(at_start, late)

    def estimate_bytes(self, graphs: GraphRunner[Any], device: torch.device) -> int:
        """Estimate the memory of all graphs from the largest ones and the smallest one, which `graphs` captures."""
        before = free_bytes(device)
        decode_only = [shape for shape in graphs.shapes if shape.prefill_rows == 0]
        graphs.capture(list(dict.fromkeys([graphs.shapes[0], decode_only[0]])))
        largest = before - free_bytes(device)
        graphs.capture(decode_only[-1:])
        smallest = max(_LEAST_GRAPH_BYTES, before - largest - free_bytes(device))
        return largest + smallest * (len(self.at_start) + len(self.late) - 1)


def _shapes_without_drafts(
    config: EngineConfig, model: ModelConfig, attention: RankAttention
) -> tuple[list[BatchShape], list[BatchShape]]:
    """Return the shapes of steps whose decode rows have one token: those to capture at the start, and the late ones."""
    backend = attention.backend
    sizes = step_graph_sizes(config, model)
    shapes = [BatchShape(decode_rows=d, prefill_rows=p, prefill_tokens=t) for d, p, t in sizes]
    at_start = [shape for shape in shapes if backend.can_capture(shape)]
    late = _with_segments(at_start, attention)
    most_tokens = bound_tokens_of_home(config, model)
    absorbed: list[BatchShape] = []
    if backend.projected is not None:  # others are captured in runs that have them: of many chunks, or of long prompts
        stages = config.pipeline_parallel_size
        of_stage = at_start if stages == 1 else at_start + late
        absorbed = [shape for shape in of_stage if may_absorb(shape.prefill_tokens, stages, most_tokens)]
        late = [replace(shape, projects_latents=shape.prefill_rows > 0) for shape in late]
        at_start = [replace(shape, projects_latents=shape.prefill_rows > 0) for shape in at_start]
    # Chunks that share prefixes are short, so there may be many of them.
    most_shared = config.max_shared_rows if attention.shares_prefixes else 0
    late += [
        replace(
            shape,
            shares_prefixes=True,
            projects_latents=False,
            prefill_rows=min(config.max_num_seqs, shape.prefill_tokens),
        )
        for shape in at_start + late
        if may_share_prefixes((shape.decode_rows, shape.prefill_rows, shape.prefill_tokens), most_shared, most_tokens)
    ]
    return at_start, late + absorbed


def _shapes_with_drafts(config: EngineConfig, attention: RankAttention) -> tuple[list[BatchShape], list[BatchShape]]:
    """Return the shapes of steps whose decode rows have drafts: those to capture at the start, and the late ones."""
    has_head = attention.may_draft and config.draft_head is not None
    shapes = [
        BatchShape(
            decode_rows=rows,
            tokens_per_row=most,
            uneven_tokens=0 if tokens == rows * most else tokens,
            extends_drafts=has_head,
        )
        for rows, tokens, most in draft_graph_sizes(config, attention.draft_widths)
    ]
    shapes = [shape for shape in shapes if attention.backend.can_capture(shape)]
    widths, max_rows = attention.draft_widths, config.max_num_decodes
    first = [shape for shape in shapes if has_head and _is_captured_first(shape, widths, max_rows)]
    return first, [shape for shape in shapes if shape not in first] + _with_segments(shapes, attention)


def _with_segments(shapes: Sequence[BatchShape], attention: RankAttention) -> list[BatchShape]:
    """Return the shapes of steps that are like these, and whose decode rows read shared segments once."""
    may = [shape for shape in shapes if may_share(shape.decode_rows, attention.max_shared_rows)]
    return [replace(shape, shares_segments=True) for shape in may]


def _is_captured_first(shape: BatchShape, widths: Sequence[int], max_rows: int) -> bool:
    """Whether a shape with drafts is one with which a head begins, in a run of up to `max_rows` decode rows."""
    rows = captured_first_from(shape.decode_rows)
    is_first = shape.decode_rows in (rows, max_rows)
    return is_first and shape.tokens_per_row in first_draft_widths(widths, rows)
