"""The built-in model (`model: demo`): a checkpoint in Hugging Face layout beside this file; see MODEL.md."""

from importlib import resources
from pathlib import Path


def demo_path() -> Path:
    """The folder that holds the built-in checkpoint and `example.jsonl`."""
    return Path(str(resources.files(__name__)))
