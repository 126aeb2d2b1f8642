"""A fixture for tests of Triton kernels that round to 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from kernel_device import HAS_GPU


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to 8 bits wrongly (a mantissa that overflows, small numbers, NaN); torch does it."""
    if HAS_GPU:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        codes = tl.float8e4nv
        if codes not in (source, target):
            return convert(values, source, target, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(values))
        if source == codes:
            exact = numbers.view(torch.uint8).view(torch.float8_e4m3fn)
            if target == tl.float32:
                return exact.to(torch.float32).view(torch.int32).numpy().view(np.uint32)
            return exact.to(torch.float16).view(torch.int16).numpy().view(np.uint16)
        return numbers.view(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
