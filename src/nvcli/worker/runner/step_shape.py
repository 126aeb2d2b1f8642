"""The shape of a step as the engine's message describes it."""

from __future__ import annotations

import numpy as np

from nvcli.attention.forward_batch import BatchShape
from nvcli.core.messages import StepInput
from nvcli.worker.runner.slot_table import unpack_ids

OfRows = np.ndarray | None
"""A number for each decode row of a step; None: the usual."""


def exact_shape(step: StepInput) -> BatchShape:
    """Return the shape of a step without padding."""
    num_tokens = unpack_ids(step.num_tokens)
    num_decodes = step.num_decodes
    widths = num_tokens[:num_decodes]
    most = int(widths.max(initial=1))
    return BatchShape(
        decode_rows=num_decodes,
        tokens_per_row=most,
        uneven_tokens=step.draft_tokens or (0 if (widths == most).all() else int(widths.sum())),
        prefill_rows=len(num_tokens) - num_decodes,
        prefill_tokens=int(num_tokens[num_decodes:].sum()),
        shares_segments=step.shares_segments,
        shares_prefixes=bool(step.shared_prefixes),
        has_adapters=step.has_adapters,
        extends_drafts=step.extends_drafts,
    )
