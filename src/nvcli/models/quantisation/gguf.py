"""GGUF's Q4_0: 4-bit codes in blocks of 32 neighbours of a row, with a scale in float16. config.json is made of the
file (`models/gguf/folder.py`), and the loader knows the blocks."""

from __future__ import annotations

from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile
from nvcli.models.tensor_info import Q4_0_GROUP

METHOD = "gguf_q4_0"


def read_gguf(config: QuantisationFile) -> Quantisation:
    """Read which layers are in other types."""
    return Quantisation(
        method=METHOD,
        numbers="integer",
        bits=4,
        label="GGUF's Q4_0",
        parts=(),
        group_size=Q4_0_GROUP,
        left_alone=config.names("modules_to_not_convert"),
    )
