"""Small random LoRA adapters for tests, in PEFT's format, made without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
"""`target_parameters` for all experts."""
PREFIX = "base_model.model."


def low_rank(
    base: Path, modules: Sequence[str] = LINEAR, *, rank: int = 4, seed: int = 0, size: float = 0.2
) -> dict[str, Tensor]:
    """The matrices of an adapter for all linear layers of a checkpoint whose names end so, by their names in PEFT."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in _weights(base):
        if name.rpartition(".")[2] in modules:
            tensors[f"{PREFIX}{name}.lora_A.weight"] = size * torch.randn(rank, columns, generator=generator)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = size * torch.randn(rows, rank, generator=generator)
    return tensors


def low_rank_of_stacks(base: Path, *, rank: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """The matrices of an adapter for both stacks of experts in each layer of gpt-oss, which are [experts, in, out]. The
    first is the innermost of PEFT's wrappers."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_experts, num_in, num_out) in _stacks(base):
        wrapper = PREFIX + name.replace("gate_up_proj", "base_layer").removesuffix(".down_proj")
        tensors[f"{wrapper}.lora_A.weight"] = torch.randn(num_experts * rank, num_in, generator=generator)
        tensors[f"{wrapper}.lora_B.weight"] = torch.randn(num_out, rank * num_experts, generator=generator)
    return tensors


def magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return DoRA's magnitudes for low-rank tensors."""
    return {
        name.replace("lora_B.weight", "lora_magnitude_vector"): tensor.abs().sum(1) + 1
        for name, tensor in tensors.items()
        if "lora_B" in name
    }


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Write an adapter's folder; `config` are keys of adapter_config.json that differ from a plain one of rank 4."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(LINEAR), **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def merge(base: Path, tensors: Mapping[str, Tensor], folder: Path, *, scaling: float = 2.0) -> Path:
    """Write the checkpoint of one file that a plain adapter makes of another one."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = (weight.float() + scaling * (up @ down)).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(base: Path) -> list[tuple[str, list[int]]]:
    """The modules of a checkpoint with matrices, and the shapes of these."""
    matrices = {name: shape for name, shape in _shapes(base).items() if name.endswith(".weight") and len(shape) == 2}
    return [(name.removesuffix(".weight"), shape) for name, shape in matrices.items()]


def _stacks(base: Path) -> list[tuple[str, list[int]]]:
    return [(name, shape) for name, shape in _shapes(base).items() if name.endswith(tuple(STACKS))]


def _shapes(base: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(base / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
