"""Checkpoints of gpt-oss as they were published: with the experts' weights in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCKS_FILE, SCALES_FILE = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest MXFP4 numbers: [..., n] → blocks [..., n / 32, 16] and scales [..., n / 32] uint8."""
    groups = values.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(largest)) - 2
    scaled = groups / torch.exp2(exponents)
    nearest = (scaled.abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), (exponents.squeeze(-1) + 127).to(torch.uint8)


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
