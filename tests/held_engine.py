"""LLMs on engines without processes, which answer a prompt with its reverse and can be held back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import unpack
from nvcli.engine.request import Request, RequestOutput
from nvcli.llm.llm import LLM


class HeldEngine(FakeEngine):
    """A fake engine that does not go on with prompts that begin with `hold` before it is told to."""

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.may_go_on = threading.Event()

    def _advance(self, request: Request, left: list[int]) -> list[RequestOutput]:
        held = bytes(token - 2 for token in list(unpack(request.prompt_ids))[1:5])
        if held == bytes(FIRST_BYTES.index(letter) for letter in "hold") and not self.may_go_on.is_set():
            return []
        return super()._advance(request, left)


def _first_bytes() -> str:
    """The letters of byte-level tokenizers, in the order of their ids in the weightless model."""
    from tokenizers import pre_tokenizers

    return "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))


FIRST_BYTES = _first_bytes()


class MakeLLM:
    """Makes LLMs and keeps their engines."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.engines: list[HeldEngine] = []
        self.notes: list[str] = []
        self.made: list[LLM] = []

    def __call__(
        self, *, engine: dict[str, Any] | None = None, needs_chat_template: bool = False, **config: Any
    ) -> LLM:
        llm = self.unkept(engine=engine, needs_chat_template=needs_chat_template, **config)
        self.made.append(llm)
        return llm

    def unkept(self, *, engine: dict[str, Any] | None = None, needs_chat_template: bool = False, **config: Any) -> LLM:
        """Make an LLM that nothing else refers to."""

        def start(engine_config: EngineConfig) -> HeldEngine:
            made = HeldEngine(engine_config, **(engine or {}))
            self.engines.append(made)
            return made

        run = RunConfig(model=str(self.model), device="cpu", **{"max_num_seqs": 8, **config})
        return LLM.from_config(run, start=start, note=self.notes.append, needs_chat_template=needs_chat_template)
