"""GGUF's blocks of 32 neighbours of a row that ranks can keep: Q4_0, integers of 4 bits with a scale in float16, and
MXFP4, in which experts are. config.json is made of the file (`models/gguf/folder.py`), and the loader knows the
blocks."""

from __future__ import annotations

from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile
from nvcli.models.tensor_info import GGUF_GROUP, MXFP4, Q4_0

METHODS = {"gguf_q4_0": Q4_0, "gguf_mxfp4": MXFP4}
"""ggml's names of the blocks, by names of methods."""


def read_gguf(config: QuantisationFile) -> Quantisation:
    """Read which layers are in other types."""
    method = config.get("quant_method", str)
    return Quantisation(
        method=method,
        numbers="mxfp4" if METHODS[method] == MXFP4 else "integer",
        bits=4,
        label=f"GGUF's {METHODS[method]}",
        parts=(),
        group_size=GGUF_GROUP,
        left_alone=config.names("modules_to_not_convert"),
    )
