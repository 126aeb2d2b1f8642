"""Errors for LoRA adapters and folders of models that are given as models: what was given, what to do."""

from __future__ import annotations

import re
from pathlib import Path

from nvcli.core.validation import list_some, show
from nvcli.errors import LoadError
from nvcli.models.json_file import JsonFile

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HARMLESS = re.compile(r"[\w./ ~+-]+")
"""Names that are safe in a command for users to copy; a name from a checkpoint may be malicious."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth")


def check_kind(folder: Path, name: str) -> None:
    """Raise LoadError if the folder of the model `name` holds only an adapter, or models."""
    has_weights = any(not file.name.startswith("adapter_") for file in folder.glob("*.safetensors"))
    if has_weights:
        return
    if (folder / ADAPTER_CONFIG).is_file():
        raise LoadError(_adapter(folder, name))
    models = sorted(file.parent.name for file in folder.glob("*/config.json"))  # such as a trainer's checkpoints
    if models and not (folder / "config.json").exists():
        raise LoadError(f"{name}: no model, but a folder with {list_some(models, 3)}; name one: {name}/{models[-1]}")


def other_weights(folder: Path) -> str | None:
    """Return a file of a folder that holds weights in a format other than safetensors; None if there is none."""
    return next(iter(sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))), None)


def _adapter(folder: Path, name: str) -> str:
    base = JsonFile.read(folder / ADAPTER_CONFIG).values.get("base_model_name_or_path")
    of_base = f" for {show(base)[1:-1]}" if isinstance(base, str) and base else ""
    adapter = name if _HARMLESS.fullmatch(name) else "ADAPTER"
    model = base if isinstance(base, str) and _HARMLESS.fullmatch(base) else "BASE"
    return (
        f"{name}: a LoRA adapter{of_base} ({ADAPTER_CONFIG}), not a whole model; give its base model as --model and "
        f"the adapter as --lora: -m {model} --lora {adapter}"
    )
