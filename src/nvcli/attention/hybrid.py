"""Two backends in one run: one attends prefill chunks, the other decode rows."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, NewKV
from nvcli.attention.forward_batch import AttentionLayer, BatchShape, ForwardBatch


class HybridBackend(AttentionBackend):
    """A backend made of two others, named `prefill:decode` after them."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._prefill, self._decode = prefill, decode
        self.name = f"{prefill.name}:{decode.name}"
        self.notes = (*prefill.notes, *decode.notes)
        self.reads_new_keys = prefill.reads_new_keys
        self.reads_behind_rows = prefill.reads_behind_rows or decode.reads_behind_rows
        self.needs_exact_lens = prefill.needs_exact_lens or decode.needs_exact_lens
        self.reads_segments = decode.reads_segments
        self.plans_on_device = decode.plans_on_device
        self.prefix_tile_tokens = prefill.prefix_tile_tokens

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        return []  # the two were asked

    def num_decoded_rows(self, shape: BatchShape) -> int:
        return self._decode.num_decoded_rows(shape)

    def can_capture(self, shape: BatchShape) -> bool:
        if self.num_decoded_rows(shape) == shape.num_rows:
            return self._decode.can_capture(shape)
        if self.num_decoded_rows(shape) == 0:
            return self._prefill.can_capture(shape)
        singles = replace(shape, prefill_rows=0, prefill_tokens=0, shares_prefixes=False)
        chunks = BatchShape(prefill_rows=shape.prefill_rows, prefill_tokens=shape.prefill_tokens)
        return self._decode.can_capture(singles) and self._prefill.can_capture(chunks)

    def prepare_capture(self, batch: ForwardBatch) -> None:
        if batch.num_decoded_rows:
            self._decode.prepare_capture(batch)
        if batch.shape.num_rows > batch.num_decoded_rows:
            self._prefill.prepare_capture(batch)

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._decode.plan_decode(batch)

    def plan_prefill(self, batch: ForwardBatch) -> None:
        self._prefill.plan_prefill(batch)

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        self._decode.plan_decode_on_device(batch)

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:
        self._prefill.plan_prefill_on_device(batch)

    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        return self._decode.decode(layer, q, batch, out)

    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        return self._prefill.prefill(layer, q, new, batch, out)
