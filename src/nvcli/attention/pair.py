"""Two backends in one run: one attends prompt slices, the other decode rows."""

from __future__ import annotations

from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionSpec
from nvcli.attention.forward_batch import ForwardBatch


class PairedBackend(AttentionBackend):
    """Named `prefill:decode`, after its two."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._prefill, self._decode = prefill, decode
        self.name = f"{prefill.name}:{decode.name}"
        self.captures_decode = decode.captures_decode

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        return []  # what it is made of was asked

    def prepare_capture(self, batch: ForwardBatch) -> None:
        self._decode.prepare_capture(batch)

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._decode.plan_decode(batch)

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._prefill.plan_extend(batch)

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        self._decode.plan_decode_on_device(batch)

    def decode(self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        return self._decode.decode(spec, layer, q, batch, out)

    def extend(
        self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, out: Tensor | None
    ) -> Tensor:
        return self._prefill.extend(spec, layer, q, k, v, batch, out)
