"""Quantised checkpoints as the tools of the field write them, beside the same weights in plain numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LINEAR = ("qkv_proj", "gate_up_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR += ("query_key_value", "dense")


Encode = Callable[[Tensor, torch.Generator], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to store a weight [out, in]."""

    config: Mapping[str, Any]
    """The `quantization_config`."""
    encode: Encode
    """Returns the tensors by their last names, and the weight that they stand for."""


def write_quantised(
    plain: Path, folder: Path, chosen: Format, *, skip: tuple[str, ...] = ("layers.1.mlp",), has_head: bool = False
) -> tuple[Path, Path]:
    """Write a checkpoint of one file twice into `folder`: with its linear layers quantised, and with the plain weights
    that these stand for. Layers whose names contain one of `skip` stay as they are, and so does the LM head unless
    `has_head`."""
    tensors = load_file(plain / "model.safetensors")
    stored, generator = dict(tensors), torch.Generator().manual_seed(1)
    for name, weight in tensors.items():
        parent = name.removesuffix(".weight")
        is_chosen = parent.rpartition(".")[2] in LINEAR or (has_head and parent == "lm_head")
        if is_chosen and not any(part in name for part in skip):
            parts, tensors[name] = chosen.encode(weight.float(), generator)
            del stored[name]
            stored |= {f"{parent}.{part}": values for part, values in parts.items()}
    quantised, decoded = folder / "quantised", folder / "decoded"
    for path, weights in ((quantised, stored), (decoded, tensors)):
        shutil.copytree(plain, path)
        save_file({name: value.contiguous() for name, value in weights.items()}, path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": dict(chosen.config)}))
    return quantised, decoded


def unstack_experts(path: Path) -> Path:
    """Give each expert of a checkpoint of one file tensors of its own, as published files do."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".mlp.experts." in name and tensors[name].dim() == 3]:
        parent, _, last = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensors.pop(name)):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                tensors[f"{parent}.{expert}.{part}.weight"] = rows.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def _fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales [blocks, blocks], and the weight that they stand for."""
    rows, columns = weight.shape
    high, wide = (min(size, length) for size, length in zip(block, weight.shape, strict=True))
    grid = torch.zeros(-(-rows // high), -(-columns // wide))
    codes, decoded = torch.zeros(rows, columns, dtype=FP8), torch.zeros(rows, columns)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            grid[i, j] = weight[part].abs().max() / FP8_MAX
            codes[part] = (weight[part] / grid[i, j]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            decoded[part] = codes[part].float() * grid[i, j]
    return codes, grid, decoded


def fp8_blocks(block: tuple[int, int]) -> Format:
    """Qwen's and DeepSeek's."""

    def encode(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, grid, decoded = _fp8(weight, block)
        return {"weight": codes, "weight_scale_inv": grid}, decoded

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Format(config={**config, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}, encode=encode)


def fp8_tensor(scale_name: str, config: Mapping[str, Any]) -> Format:
    """One scale for a tensor, and a static one for its input (Mistral's, NVIDIA's, AutoFP8's)."""

    def encode(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, grid, decoded = _fp8(weight, (1 << 20, 1 << 20))
        static = {"activation_scale" if "inv" in scale_name else "input_scale": torch.tensor(0.01)}
        return {"weight": codes, scale_name: grid.view(()), **static}, decoded

    return Format(config=config, encode=encode)


def compressed(weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, **more}
    ignore = ["lm_head", "re:.*layers\\.1\\.mlp.*"]
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore}


def _fp8_channels(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, grid, _ = _fp8(weight, (1, 1 << 20))
    return {"weight": codes, "weight_scale": grid.bfloat16()}, codes.float() * grid.bfloat16().float()


def _int8_channels(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def _groups(weight: Tensor, bits: int, size: int, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in] from 0 on, scales and zeros [out, groups], and the weight that they stand for."""
    parts = weight.unflatten(1, (-1, size))
    most = (1 << bits) - 1
    if is_symmetric:
        scales = (parts.abs().amax(-1) / (most // 2)).half().float()
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(1, most)
    codes = (parts / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, most)
    decoded = (codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    return codes.flatten(1).long(), scales, zeros.long(), decoded.flatten(1)


def pack(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes into int32 words along a dimension; with `order`, place i of a word holds code order[i]."""
    count = 32 // bits
    codes = codes.movedim(dim, -1)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    words = torch.zeros(codes.shape[:-1], dtype=torch.long)
    for place, index in enumerate(order or range(count)):
        words |= codes[..., index] << (place * bits)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.movedim(-1, dim).to(torch.int32).contiguous()


def awq(size: int, *, zero_point: bool = True) -> Format:
    def encode(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        width = weight.shape[1] if size == -1 else size
        codes, scales, zeros, decoded = _groups(weight, 4, width, is_symmetric=not zero_point)
        parts = {"qweight": pack(codes.t(), 4, 1, AWQ_ORDER), "scales": scales.t().half()}
        return {**parts, "qzeros": pack(zeros.t(), 4, 1, AWQ_ORDER)}, decoded

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": zero_point, "version": "gemm"}
    return Format(config={**config, "modules_to_not_convert": ["model.layers.1.mlp"]}, encode=encode)


def gptq(
    size: int,
    *,
    bits: int = 4,
    sym: bool = True,
    act_order: bool = False,
    version: str = "gptq",
    order_seed: int | None = None,
) -> Format:
    """With an `order_seed`, weights of as many columns have the same order, as those of the same inputs do."""

    def encode(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight.shape[1]
        width = columns if size == -1 else size
        generator = generator if order_seed is None else torch.Generator().manual_seed(order_seed)
        order = torch.randperm(columns, generator=generator) if act_order else torch.arange(columns)
        codes, scales, zeros, decoded = _groups(weight[:, order], bits, width, is_symmetric=sym)
        back = order.argsort()
        stored = zeros - (1 if version == "gptq" else 0)
        parts = {"qweight": pack(codes[:, back].t(), bits, 0), "qzeros": pack(stored.t(), bits, 1)}
        index = (torch.arange(columns) // width)[back].to(torch.int32)
        return {**parts, "scales": scales.t().half(), "g_idx": index}, decoded[:, back]

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": act_order}
    return Format(config={**config, "checkpoint_format": version}, encode=encode)


def auto_round(stored: Format, packing: str, *, sym: bool = True) -> Format:
    """AutoRound's, of the layers that are `stored` so; it writes no order of columns."""

    def encode(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        parts, decoded = stored.encode(weight, generator)
        return {name: values for name, values in parts.items() if name != "g_idx"}, decoded

    config = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": 4, "sym": sym}
    left = {".*layers\\.1\\.mlp.*": {"bits": 16, "data_type": "fp"}}
    return Format(
        config={**config, "data_type": "int", "group_size": stored.config["group_size"], "extra_config": left},
        encode=encode,
    )


def packed(size: int, *, bits: int = 4, sym: bool = True, act_order: bool = False) -> Format:
    """compressed-tensors' W4A16 and W8A16."""

    def encode(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight.shape[1]
        width = columns if size == -1 else size
        order = torch.randperm(columns, generator=generator) if act_order else torch.arange(columns)
        codes, scales, zeros, decoded = _groups(weight[:, order], bits, width, is_symmetric=sym)
        back = order.argsort()
        parts = {"weight_packed": pack(codes[:, back], bits, 1), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor(weight.shape)
        if not sym:
            parts["weight_zero_point"] = pack(zeros, bits, 0)
        if act_order:
            parts["weight_g_idx"] = (torch.arange(columns) // width)[back].to(torch.int32)
        return parts, decoded[:, back]

    strategy = "channel" if size == -1 else "group"
    weights = {"type": "int", "num_bits": bits, "symmetric": sym, "strategy": strategy}
    weights["actorder"] = "group" if act_order else None
    return Format(config=compressed({**weights, "group_size": None if size == -1 else size}), encode=encode)


FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp4(weight: Tensor, scales: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Bytes [..., in / 2] of the nearest numbers of FP4, and the values that they stand for with `scales` [...,
    groups]."""
    scaled = weight.unflatten(-1, (-1, size)) / scales.unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - FP4_VALUES).abs().argmin(-1)
    values = FP4_VALUES[nearest] * scaled.sign() * scales.unsqueeze(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8).flatten(-2)
    return codes[..., ::2] | (codes[..., 1::2] << 4), values.flatten(-2)


def _nvfp4_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A scale in e4m3 for each 16 numbers of a row, and the number by which all of them are multiplied."""
    factor = weight.abs().max() / (6 * FP8_MAX)
    return (weight.unflatten(1, (-1, 16)).abs().amax(-1) / (6 * factor)).clamp(2.0**-9, FP8_MAX).to(FP8), factor


def _modelopt_fp4(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    scales, factor = _nvfp4_scales(weight)
    packed, decoded = fp4(weight, scales.float() * factor, 16)
    return {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }, decoded


def _compressed_fp4(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    scales, factor = _nvfp4_scales(weight)
    divisor = (1 / factor).view(1)
    packed, decoded = fp4(weight, scales.float() / divisor, 16)
    return {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": divisor,
        "input_global_scale": torch.ones(1),
    }, decoded


def _exponents(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The powers of 2 [out, in / 32] with which no number is above `largest`, and their exponents as stored."""
    most = weight.unflatten(1, (-1, 32)).abs().amax(-1).clamp(min=2.0**-100)
    exponents = torch.ceil(torch.log2(most / largest))
    return torch.exp2(exponents), (exponents + 127).to(torch.uint8)


def _mxfp4(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    scales, stored = _exponents(weight, 6.0)
    packed, decoded = fp4(weight, scales, 32)
    return {"weight_packed": packed, "weight_scale": stored}, decoded


def _mxfp8(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    scales, stored = _exponents(weight, FP8_MAX)
    scales = scales.repeat_interleave(32, 1)
    codes = (weight / scales).to(FP8)
    return {"weight": codes, "weight_scale": stored}, codes.float() * scales


def _mixed(fp4: Encode, fp8: Encode) -> Encode:
    """Square weights in FP8, as some of attention are, and the others in FP4."""

    def encode(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        return (fp8 if weight.shape[0] == weight.shape[1] else fp4)(weight, generator)

    return encode


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """A `quantization_config` of ModelOpt."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["*layers.1.mlp*", "lm_head"], **more}


def _two_groups() -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with NVFP4 and FP8 with scales for rows."""
    config = compressed({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16})
    fp8 = compressed({"type": "float", "num_bits": 8, "strategy": "channel"})["config_groups"]["group_0"]
    return {**config, "format": "mixed-precision", "config_groups": {**config["config_groups"], "group_1": fp8}}


def _modelopt_awq(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """NVFP4 of a weight whose columns were divided by what activations are multiplied by."""
    smoothing = 0.5 + torch.rand(weight.shape[1], generator=generator)
    parts, decoded = _modelopt_fp4(weight / smoothing, generator)
    return {**parts, "pre_quant_scale": smoothing}, decoded * smoothing


def _modelopt_blocks(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, decoded = _fp8(weight, (128, 128))
    return {"weight": codes, "weight_scale": scales[:, None, :, None]}, decoded


NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626)
NF4 = (*NF4, 0.723, 1.0)
BNB_FP4 = tuple(sign * number / 192 for sign in (1, -1) for number in (0, 1, 128, 192, 64, 96, 32, 48))


def bitsandbytes(kind: str, block: int, *, nested: bool) -> Format:
    """Codes of 4 bits: the first of two in the upper half of a byte. `nested`: scales are places in a table, too, with
    a scale for each 16 of them."""
    table = torch.tensor(NF4 if kind == "nf4" else BNB_FP4)

    def encode(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.reshape(-1, block)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "shape": list(weight.shape)}
        parts: dict[str, Tensor] = {"weight.absmax": scales}
        if nested:
            nested_table, offset = torch.linspace(-1, 1, 256), float(scales.mean())
            padded = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 16)).view(-1, 16)
            outer = padded.abs().amax(1).clamp(min=1e-6)
            places = (padded / outer[:, None]).unsqueeze(-1).sub(nested_table).abs().argmin(-1)
            scales = (nested_table[places] * outer[:, None] + offset).flatten()[: len(scales)]
            parts = {
                "weight.absmax": places.flatten()[: len(scales)].to(torch.uint8),
                "weight.nested_quant_map": nested_table,
                "weight.nested_absmax": outer,
            }
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
        codes = (blocks / scales[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1)
        flat = codes.flatten().to(torch.uint8)
        described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {
            "weight": ((flat[::2] << 4) | flat[1::2]).view(-1, 1),
            "weight.quant_map": table.clone(),
            f"weight.quant_state.bitsandbytes__{kind}": described,
            **parts,
        }, (table[codes] * scales[:, None]).view(weight.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Format(config={**config, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None}, encode=encode)


def _bitsandbytes_int8(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    return {
        "weight": codes,
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, codes.float() * largest[:, None] / 127


FORMATS = {
    "fp8, blocks of 128": fp8_blocks((128, 128)),
    "fp8, small blocks": fp8_blocks((16, 32)),
    "fp8, static": fp8_tensor(
        "weight_scale_inv", {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    ),
    "modelopt": fp8_tensor("weight_scale", modelopt("FP8")),
    "modelopt, nvfp4": Format(config=modelopt("NVFP4"), encode=_modelopt_fp4),
    "modelopt, nvfp4 and fp8": Format(
        config=modelopt(
            "MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4"}}
        ),
        encode=_mixed(_modelopt_fp4, fp8_tensor("weight_scale", {}).encode),
    ),
    "modelopt, nvfp4 behind smoothed activations": Format(config=modelopt("NVFP4_AWQ"), encode=_modelopt_awq),
    "modelopt, blocks": Format(config=modelopt("FP8_PB_WO"), encode=_modelopt_blocks),
    "bitsandbytes, nf4": bitsandbytes("nf4", 128, nested=True),
    "bitsandbytes, fp4": bitsandbytes("fp4", 64, nested=False),
    "bitsandbytes, int8": Format(
        config={"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        encode=_bitsandbytes_int8,
    ),
    "modelopt, mxfp8": Format(config=modelopt("MXFP8"), encode=_mxfp8),
    "compressed, nvfp4": Format(
        config=compressed({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}),
        encode=_compressed_fp4,
    ),
    "compressed, nvfp4 and fp8": Format(config=_two_groups(), encode=_mixed(_compressed_fp4, _fp8_channels)),
    "compressed, mxfp4": Format(
        config=compressed({"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}), encode=_mxfp4
    ),
    "compressed, mxfp8": Format(
        config=compressed({"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}), encode=_mxfp8
    ),
    "fbgemm": Format(config={"quant_method": "fbgemm_fp8"}, encode=_fp8_channels),
    "compressed, fp8": Format(
        config=compressed({"type": "float", "num_bits": 8, "strategy": "channel"}), encode=_fp8_channels
    ),
    "compressed, int8": Format(
        config=compressed({"type": "int", "num_bits": 8, "strategy": "channel"}), encode=_int8_channels
    ),
    "compressed, w4a16": packed(32),
    "compressed, w4a16, zeros": packed(32, sym=False),
    "compressed, w4a16, act-order": packed(16, act_order=True),
    "compressed, w8a16, rows": packed(-1, bits=8),
    "auto-round": auto_round(gptq(32), "auto_gptq"),
    "auto-round, zeros": auto_round(gptq(32, sym=False, version="gptq_v2"), "gptqmodel", sym=False),
    "auto-round, awq": auto_round(awq(32), "auto_awq", sym=False),
    "awq": awq(32),
    "awq, rows, no zeros": awq(-1, zero_point=False),
    "gptq": gptq(32),
    "gptq, act-order": gptq(16, act_order=True),
    "gptq, zeros, version 2": gptq(32, sym=False, version="gptq_v2"),
    "gptq, zeros, 8 bits, rows": gptq(-1, bits=8, sym=False),
}
