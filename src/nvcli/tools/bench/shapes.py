"""Known model shapes, so that anyone can measure without a download. The weights are made up.

`shapes.json` holds the models' published config.json files; of most models that read images, only the text part. Of
the others preprocessor_config.json is in it too.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from nvcli.core.config_types import Quantization
from nvcli.core.validation import suggest
from nvcli.errors import ConfigError
from nvcli.models.checkpoint import resolve_model

SHAPES: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("shapes.json").read_text(encoding="utf-8"))
"""Name → config.json."""

_PREPROCESSOR = "preprocessor_config"
"""The key of preprocessor_config.json."""
_QUANTISATION = "quantization_config"
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
"""The quantisation of a shape that is to be a checkpoint in 4 bits."""


@contextlib.contextmanager
def model_folder(
    name: str, shape: str | None, *, revision: str | None = None, quantization: Quantization = "auto"
) -> Iterator[Path]:
    """Yield the folder of a model, or one with a known shape's config.json. Raises ConfigError and LoadError.

    `revision` is the model's, as in RunConfig; with `quantization` w4a16 the shape becomes a checkpoint in 4 bits.
    """
    if shape is None:
        yield resolve_model(name, revision=revision)
        return
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: unknown; {suggest(shape, SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="nvcli-shape-") as folder:
        yield write_shape(shape, Path(folder), quantization=quantization)


def write_shape(name: str, folder: Path, *, quantization: Quantization = "auto") -> Path:
    """Write the files of a shape's settings into a folder, and return the folder."""
    config = {key: value for key, value in SHAPES[name].items() if key != _PREPROCESSOR}
    if _PREPROCESSOR in SHAPES[name]:
        (folder / f"{_PREPROCESSOR}.json").write_text(json.dumps(SHAPES[name][_PREPROCESSOR]), encoding="utf-8")
    if quantization == "w4a16" and _QUANTISATION not in config:
        config = {**config, _QUANTISATION: _AWQ}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
