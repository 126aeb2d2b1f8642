"""NVIDIA's ModelOpt: FP8 with one scale for each tensor."""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.models.quantisation.quantisation import Quantisation, QuantisationFile


def read_modelopt(config: QuantisationFile) -> Quantisation:
    """Read the algorithm and the layers that are left alone, which versions of ModelOpt list under two keys."""
    algorithm = config.get("quant_algo", str)
    if algorithm != "FP8":
        raise config.error(
            "quant_algo",
            f"{show(algorithm)} is not supported, only FP8; use the model's bfloat16 or float16 checkpoint, or one in "
            "another format that `nvcli models` lists",
        )
    return Quantisation(method="modelopt", numbers="fp8", bits=8, left_alone=config.names("ignore", "exclude_modules"))
