"""nvcli: offline LLM generation on one machine, from JSONL to JSONL.

`LLM` is the entry point for Python programs. It is imported on first use: `import nvcli` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.version import __version__

if TYPE_CHECKING:
    from nvcli.llm.answer import Answer
    from nvcli.llm.llm import LLM
    from nvcli.llm.sampling import SamplingParams

__all__ = ["LLM", "Answer", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nvcli.llm.llm import LLM

        return LLM
    if name == "Answer":
        from nvcli.llm.answer import Answer

        return Answer
    if name == "SamplingParams":
        from nvcli.llm.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
