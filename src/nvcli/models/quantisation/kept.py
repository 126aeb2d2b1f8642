"""Weights that ranks keep in a checkpoint's 4 bits: whether they can be kept so, and where they may be cut.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nvcli.core.config_types import KeptWeights
from nvcli.errors import ConfigError
from nvcli.kernels.weight_formats import MXFP4_KINDS, NVFP4_BLOCK, W4_GROUPS, StoredGroups
from nvcli.models.mixers.mixer import Piece
from nvcli.models.quantisation.quantisation import Quantisation

_LEAST_GROUP = W4_GROUPS[-1]
_WAY_OUT = "use quantization: none, or fp8"


def stored_groups(quantisation: Quantisation | None, kept_as: KeptWeights, *, has_experts: bool) -> StoredGroups:
    """Return how a checkpoint groups its 4-bit weights, which ranks keep as `kept_as` says. Raises ConfigError if it
    has none, or ranks cannot keep them."""
    if kept_as == "w4a8":
        if quantisation is None or quantisation.numbers != "mxfp4":
            found = "not quantised" if quantisation is None else quantisation.name
            raise ConfigError(
                "`quantization` is w4a8, which multiplies experts in MXFP4, such as gpt-oss's, by activations in FP8, "
                f"but this checkpoint is {found}: use quantization: auto, or fp8"
            )
        return StoredGroups(kind="mxfp4 for fp8", size=None)
    if quantisation is not None and quantisation.has_nvfp4_alone:
        return StoredGroups(kind="nvfp4", size=NVFP4_BLOCK)
    if quantisation is not None and quantisation.numbers == "affine":
        return StoredGroups(kind="affine", size=None)
    if quantisation is None or quantisation.bits != 4 or quantisation.numbers in ("fp4", "table"):
        found = "not quantised" if quantisation is None else quantisation.name
        raise ConfigError(
            f"`quantization` is w4a16, which keeps the 4 bits of a checkpoint (AWQ, GPTQ, W4A16, NVFP4, GGUF, "
            f"experts in MXFP4 such as gpt-oss's), but this one is {found}: {_WAY_OUT}"
        )
    if quantisation.numbers == "mxfp4":
        return StoredGroups(kind="mxfp4", size=None)
    size, has_order = quantisation.group_size, quantisation.has_column_order
    if size is not None and size % _LEAST_GROUP:
        raise ConfigError(
            f"`quantization` is w4a16, which needs groups of {_LEAST_GROUP} columns or a multiple of it, but this "
            f"checkpoint has groups of {size}: {_WAY_OUT}"
        )
    if has_order and has_experts:
        raise ConfigError(
            f"`quantization` is w4a16, but this checkpoint has experts with reordered columns (desc_act), which cannot "
            f"be kept in 4 bits: {_WAY_OUT}"
        )
    return StoredGroups(kind="integer", size=size, has_order=has_order)


def problems_of_cut_groups(groups: StoredGroups, hidden_size: int, pieces: Iterable[Piece], size: int) -> Iterator[str]:
    """Yield the 4-bit weights that cannot be cut over `size` ranks, by the number of input features per rank."""
    lengths = {"the hidden size": hidden_size}
    for piece in pieces:
        if piece.cut_by_inputs is not None and (piece.is_of_experts or groups.kind not in MXFP4_KINDS):
            lengths[piece.cut_by_inputs] = piece.length
    for name, length in lengths.items():
        if groups.kept(length) is None:
            what = f"whole groups of {groups.sizes[-1]} in 4 bits"
            yield f"each rank's {length:,} input features of {name} are not {what}"
    if groups.has_order and size > 1:
        yield "weights with reordered columns (desc_act) cannot be split in 4 bits"
