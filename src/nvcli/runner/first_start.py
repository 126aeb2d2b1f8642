"""The first start of a model on a machine: the kernels that it compiles are found first, and compiled side by side.

Without this the warm-up compiles one kernel after another. The steps of the warm-up run here with launches left out
(`kernels/triton/compile_ahead.py`). What the kernels would write is zero meanwhile, so that torch's operations find no
index out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvcli.config import EngineConfig
from nvcli.errors import NvcliError, first_line
from nvcli.runner.device import own_cores
from nvcli.version import __version__

_MOST_THREADS = 16
"""More would wait for the interpreter lock, which a part of each compilation holds."""


def program_to_compile(config: EngineConfig, device: torch.device) -> str | None:
    """Describe all that the choice of kernels depends on. Return None where nothing is to be compiled ahead: it was
    already, there is no GPU, or several ranks would have to leave out the same launches at once."""
    if device.type != "cuda" or config.num_ranks > 1:
        return None
    from nvcli.kernels.triton.compile_ahead import can_compile_ahead, was_compiled

    if not can_compile_ahead():
        return None
    settings = msgspec.structs.replace(
        config,
        model_path=Path(),
        replica=0,
        gpus=(),
        kv_blocks_before=None,
        record_steps=False,
        measure_memory=False,
        prepare_grammars=False,
    )
    model = (config.model_path / "config.json").read_text()
    parts = (__version__, torch.__version__, torch.cuda.get_device_name(device), repr(settings), model)
    program = "\n".join(parts)
    return None if was_compiled(program) else program


def compile_kernels(program: str, device: torch.device, run: Callable[[], None]) -> str | None:
    """Compile the kernels that `run` launches, and note that those of the program are. Return a note for the user where
    `run` fails without its launches: then what is missing is compiled at its first launch.

    Raises what Triton raises where a kernel cannot be compiled, and NvcliError as `run` does.
    """
    from nvcli.kernels.triton.compile_ahead import compile_ahead, note_compiled

    note = None
    with compile_ahead(max(2, min(_MOST_THREADS, own_cores(device))), device):
        try:
            with _ZeroedMemory():  # type: ignore[no-untyped-call]
                run()
        except NvcliError:
            raise
        except Exception as error:  # whatever a step makes of zeros
            note = f"kernels are compiled one after another, as they were not all found ahead ({first_line(error)})"
    note_compiled(program)  # after a failure too, which would come again at the next start
    return note


class _ZeroedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills new memory with zeros where a tensor is made without values."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _EMPTY else made


_EMPTY = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)
