"""Draft heads by their names: mtp for the head of a checkpoint, or the folder of a head or of a small model.
Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nvcli.core.validation import show
from nvcli.errors import ConfigError, LoadError
from nvcli.models.checkpoint import find_model
from nvcli.models.config import CONFIG_FILE, ModelConfig
from nvcli.models.draft_heads.eagle3_files import is_eagle3, read_eagle3
from nvcli.models.draft_model_config import read_draft_model
from nvcli.models.json_file import JsonFile

MTP = "mtp"


def find_head(name: str) -> str:
    """Return how ranks find the head `name`: mtp as it is, otherwise the path of its folder.

    Raises ConfigError if there is no such folder on this machine.
    """
    if name == MTP:
        return name
    problem = f"`speculation.method` (--speculate) is {show(name)}, which is neither auto, none, lookup nor {MTP}"
    way_out = "give the folder of an EAGLE-3 head, or of a small model with the same tokens"
    try:
        found = find_model(name)
    except (ConfigError, LoadError) as error:
        raise ConfigError(f"{problem}, nor a folder ({error}): {way_out}") from None
    if found is None or not (found / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{problem}, nor a folder with a {CONFIG_FILE} or a model in the local Hugging Face cache: {way_out}"
        )
    return str(found.absolute())


def with_draft_head(config: ModelConfig, name: str, *, is_random: bool = False) -> ModelConfig:
    """Return the model with the head `name`, as `find_head` returns it. `is_random`: its weights are not read.

    Raises ConfigError and LoadError naming the file and the key.
    """
    if name == MTP:
        return config.with_mtp()
    folder = Path(name)
    if is_eagle3(JsonFile.read(folder / CONFIG_FILE)):
        return replace(config, draft_head=read_eagle3(folder, config, is_random=is_random))
    return replace(config, draft_head=read_draft_model(folder, config, is_random=is_random))
