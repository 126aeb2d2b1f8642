"""The engines that can be compared, by name.

Each module has `opened(job)`: a context manager that loads the model and gives a function that answers rows, returns
when the last answer is there, and asserts that every answer has its length. It raises `LeftOut` for a job that the
engine cannot do. The module is imported in the engine's own process, after its package was found.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineEntry:
    """The place of an engine."""

    module: str
    package: str
    """The package that must be importable."""
    distribution: str
    """The name under which the package is installed."""
    about: str


ENGINES = {
    "nvcli": EngineEntry("comparison.engines.nvcli_engine", "nvcli", "nvcli", "the whole engine at its defaults"),
    "vllm": EngineEntry("comparison.engines.vllm_engine", "vllm", "vllm", "vLLM's LLM class"),
    "nano-vllm": EngineEntry("comparison.engines.nano_vllm", "nanovllm", "nano-vllm", "nano-vllm's LLM class"),
    "continuous": EngineEntry(
        "comparison.engines.transformers_continuous",
        "transformers",
        "transformers",
        "transformers' continuous batching, paged SDPA attention",
    ),
    "generate": EngineEntry(
        "comparison.engines.transformers_generate",
        "transformers",
        "transformers",
        "transformers' generate in batches sorted by prompt length; a batch runs until its longest answer",
    ),
}
