"""Compiles the prefill kernel for Hopper where there is no such GPU, and prints what the assembler says of it.

It runs in a process of its own, without Triton's interpreter: `python hopper_compile.py HEAD_DIM GROUP SOFT_CAP`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from nvcli.kernels.triton.hopper_prefill import hopper_prefill_kernel
from nvcli.kernels.triton.prefill_tiles import TILE_FIELDS


def compile_kernel(head_dim: int, group: int, soft_cap: float) -> str:
    """Return the PTX for bfloat16, 8 KV heads and blocks of 64 tokens, with sinks where there is a soft cap."""
    descriptor = f"tensordesc<bf16[64, 64],{NVMMASharedLayout(128, 16, 2)!r}>"
    types = {
        **dict.fromkeys(("q", "v_cache", "out"), "*bf16"),
        **dict.fromkeys(("k_desc", "v_desc"), descriptor),
        **dict.fromkeys(("block_tables", "tiles", "num_tiles"), "*i32"),
        "sinks": "*fp32",
        "scale_log2": "fp32",
        "q_stride": "i32",
        "block_table_stride": "i32",
    }
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 64,
        "BLOCK_ROWS": 64,
        "SOFT_CAP": soft_cap,
        "HAS_SINKS": soft_cap > 0,
        "TILE_FIELDS": TILE_FIELDS,
    }
    names = hopper_prefill_kernel.arg_names
    aligned = [name for name, kind in types.items() if kind.startswith("*")] + ["q_stride"]
    source = GluonASTSource(
        hopper_prefill_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return str(kernel.asm["ptx"])


def assemble(ptx: str) -> str:
    """Return ptxas's report."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas, "-v", "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    print(assemble(compile_kernel(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
