"""Checkpoints of gpt-oss as they were published: with the experts' weights in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantised_checkpoints import fp4

BLOCKS_FILE, SCALES_FILE = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest MXFP4 numbers: [..., n] → blocks [..., n / 32, 16] and scales [..., n / 32] uint8."""
    values = values.float()
    largest = values.unflatten(-1, (-1, 32)).abs().amax(-1).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(largest)) - 2
    blocks, _ = fp4(values, torch.exp2(exponents), 32)
    return blocks.unflatten(-1, (-1, 16)), (exponents + 127).to(torch.uint8)


def quantise(path: Path) -> Path:
    """Rewrite a checkpoint of gpt-oss, of one file, with its experts in MXFP4: their blocks and scales in two files."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    scales = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], scales[f"{name}_scales"] = encode(tensors.pop(name).transpose(1, 2))
    file.unlink()
    weight_map = {}
    for name, part in ((BLOCKS_FILE, tensors), (SCALES_FILE, scales)):
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))
    return path
