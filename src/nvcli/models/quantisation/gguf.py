"""GGUF's blocks that ranks can keep: integers whose neighbours share a scale, and maybe a minimum, of which files have
several types beside each other, and MXFP4, in which experts are. config.json is made of the file
(`models/gguf/folder.py`), and the loader knows the blocks."""

from __future__ import annotations

from typing import Any

from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile
from nvcli.models.tensor_info import MXFP4_GROUP

AFFINE_METHOD, MXFP4_METHOD = METHODS = "gguf_affine", "gguf_mxfp4"
HEAD = "lm_head"
"""The key of config.json that says whether the LM head, or the embedding that it is tied to, is in such blocks too."""
WIDE, NARROW = "modules_in_8_bits", "modules_in_groups_of_16"
"""Keys of config.json that list modules."""


def read_gguf(config: QuantisationFile) -> Quantisation:
    """Read which layers are in other types."""
    method, label = config.get("quant_method", str), config.get("type", str)
    of_both: dict[str, Any] = {
        "method": method,
        "label": f"GGUF's {label}",
        "parts": (),
        "left_alone": config.names("modules_to_not_convert"),
        "names_decoder": True,
    }
    if method == MXFP4_METHOD:
        return Quantisation(**of_both, numbers="mxfp4", bits=4, group_size=MXFP4_GROUP)
    bits = config.bits("bits", (4, 8))
    return Quantisation(
        **of_both,
        numbers="affine",
        bits=bits,
        has_head=config.get(HEAD, bool, False),
        wide=config.names(WIDE),
        narrow_groups=config.names(NARROW),
    )
