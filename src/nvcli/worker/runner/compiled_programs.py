"""Notes which programs have all of their kernels in Triton's cache on disk.

A rank checks before it imports torch, because starting the compile processes takes as long as that import.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import AdapterSizes
from nvcli.core.system.kernel_cache import kernel_cache_folder
from nvcli.core.system.versions import torch_build, triton_version
from nvcli.kernels.triton.launch.compile_processes import CompileProcesses
from nvcli.version import __version__

_NOTES_FOLDER = "nvcli_programs"


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that the choice of kernels depends on, except the GPU. A wrong note only costs time."""

    words: str

    @classmethod
    def of(cls, config: EngineConfig) -> Program | None:
        """Return a rank's program, or None if nothing is to be compiled ahead: there is no GPU, or only one core to
        compile on."""
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if config.device != "cuda" or is_interpreted or find_spec("triton") is None:
            return None
        if len(os.sched_getaffinity(0)) == 1:
            return None
        settings = msgspec.structs.replace(
            config,
            model_path=Path(),
            lora_path=None,
            lora_paths=(Path(),) * bool(config.placed_adapters),
            merged_adapters=(1,) * bool(config.merged_adapters),
            merged_only_adapters=(),
            lora_sizes=AdapterSizes(),
            replica=0,
            num_replicas=1,
            gpus=(),
            kv_blocks_before=None,
            record_steps=False,
            measure_memory=False,
            prepare_grammars=False,
        )
        try:
            model = (config.model_path / "config.json").read_text()
        except OSError:
            return None  # the code that loads the model reports it
        return cls("\n".join((__version__, repr(torch_build()), str(triton_version()), repr(settings), model)))

    def has_notes(self) -> bool:
        """Whether notes say that all kernels were compiled for some GPU; see `was_compiled`."""
        return self._folder.is_dir()

    def was_compiled(self, gpu: str) -> bool:
        """Whether the cache notes that all kernels were compiled for GPUs of this name."""
        return self._note(gpu).exists()

    def takes_notes(self) -> bool:
        """Whether the cache is writable."""
        folder = self._folder.parent
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)

    def note_compiled(self, gpu: str) -> None:
        """Note that all kernels are compiled, if the cache is writable."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._note(gpu).write_text(f"{gpu}\n{self.words}")

    @property
    def _folder(self) -> Path:
        return kernel_cache_folder() / _NOTES_FOLDER / _hash(self.words)

    def _note(self, gpu: str) -> Path:
        return self._folder / f"{_hash(gpu)}.txt"


def start_compilers(config: EngineConfig) -> CompileProcesses | None:
    """Begin to start the compile processes of a rank, unless notes say that its kernels were compiled for some GPU."""
    program = Program.of(config)
    return CompileProcesses() if program is not None and not program.has_notes() else None


def _hash(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:32]
