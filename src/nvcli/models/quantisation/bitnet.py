"""BitNet (https://arxiv.org/abs/2402.17764): weights -1, 0 and 1 with a scale for each matrix, and activations of 8
bits. Files hold four weights in a byte, or plain weights that become ternary when they are loaded."""

from __future__ import annotations

from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile, WeightParts
from nvcli.models.tensor_info import TERNARY

_HEAD = "lm_head"


def read_bitnet(config: QuantisationFile) -> Quantisation:
    """Read the layers of Microsoft's files. Raises LoadError for those that divide by their scales, for norms of their
    own before projections, and for layers that are left alone: all but the LM head round their input."""
    if others := [name for name in config.names("modules_to_not_convert") if name != _HEAD]:
        raise config.error("modules_to_not_convert", f"{others[0]} is not supported; supported: {_HEAD}")
    config.one_of("linear_class", "bitlinear", ("autobitlinear",))
    config.only(use_rms_norm=False)
    is_online = config.one_of("quantization_mode", "offline", ("offline", "online")) == "online"
    packed = WeightParts(codes="weight", stored_as=("U8",), scales=("weight_scale",), packing=TERNARY)
    return Quantisation(
        method="bitnet",
        numbers="integer",
        bits=TERNARY.bits,
        label="BitNet, plain weights made ternary" if is_online else "BitNet, ternary weights",
        parts=() if is_online else (packed,),
        makes_ternary=is_online,
        rounds_inputs=True,
    )
