"""Quantised checkpoints are loaded as the numbers that they stand for, whatever the format, cut over ranks and stages
too; what cannot be read is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rank_weights import load_model, load_parameters
from safetensors.torch import load_file, save_file
from torch import Tensor

from batches import RequestState
from checkpoints import edit_json, edit_weights, reference_logits, reference_model, write_tiny_model
from family_shapes import SHAPES
from model_driver import ModelDriver
from nvcli.errors import ConfigError, LoadError
from nvcli.models.config import load_model_config
from nvcli.worker.distributed.stage import WHOLE, Stage
from quantised_checkpoints import FORMATS, compressed, unstack_experts, write_quantised

Checkpoints = tuple[Path, Path]
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("original") / "model", **SIZES)


@pytest.fixture(scope="module", params=FORMATS)
def checkpoints(
    original: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoints:
    """(quantised, plain) checkpoints of the same weights."""
    return write_quantised(original, tmp_path_factory.mktemp("model"), FORMATS[request.param])


@pytest.mark.parametrize(
    ("rank", "size", "stage"), [(0, 1, WHOLE), (0, 2, WHOLE), (1, 2, WHOLE), (0, 1, Stage(1, 2))], ids=str
)
def test_weights_are_those_that_the_codes_stand_for(
    rank: int, size: int, stage: Stage, checkpoints: Checkpoints
) -> None:
    quantised, plain = checkpoints
    found, expected = load_parameters(quantised, rank, size, stage), load_parameters(plain, rank, size, stage)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-7, rtol=1e-6, msg=name)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_layers_do_not_have_are_zeros(value: float, original: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes them."""
    quantised, plain = write_quantised(original, tmp_path, FORMATS["gptq"])
    name = "model.layers.0.mlp.down_proj.bias"
    edit_weights(quantised, lambda weights: weights.update({name: torch.tensor([0.0] * 63 + [value]).half()}))
    if value:
        with pytest.raises(LoadError, match=f"unknown to the model that config.json describes: {name}"):
            load_parameters(quantised, 0, 1)
    else:
        assert load_parameters(quantised, 0, 1).keys() == load_parameters(plain, 0, 1).keys()


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_gpu_makes_the_same_weights(quantization: Literal["none", "fp8"], checkpoints: Checkpoints) -> None:
    if quantization == "fp8" and load_model_config(checkpoints[0]).fp8_scaling == "block":
        pytest.skip("this model's features are no multiple of 128")
    on_gpu, on_cpu = (
        dict(load_model(checkpoints[0], 1, 2, device=torch.device(name), quantization=quantization).named_parameters())
        for name in ("cuda", "cpu")
    )
    for name, parameter in on_cpu.items():
        found = on_gpu[name].cpu()
        if parameter.dtype == torch.float8_e4m3fn:
            # A scale may differ in its last bit, which moves the few numbers that lie between two codes.
            steps = (found.view(torch.int8).int() - parameter.view(torch.int8).int()).abs()
            assert steps.max() <= 1
            assert (steps > 0).float().mean() < 0.01, name
        else:
            torch.testing.assert_close(found, parameter, atol=1e-7, rtol=1e-6, msg=name)


def test_logits_in_chunks(checkpoints: Checkpoints) -> None:
    quantised, plain = checkpoints
    ids = list(range(2, 40))
    driver, request = ModelDriver(quantised), RequestState()
    found = torch.cat([driver.step((request, ids[i : i + 19]))[0] for i in (0, 19)])
    torch.testing.assert_close(found, reference_logits(plain, ids), atol=2e-4, rtol=1e-4)


def test_experts_and_fused_projections(tmp_path: Path) -> None:
    """Each expert's weights are quantised by themselves; Phi-3's files fuse projections, and Pythia's head by head."""
    arguments = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64}
    for family, more in (("Qwen3Moe", arguments), ("Phi3", SIZES), SHAPES["pythia"]):
        plain = write_tiny_model(tmp_path / family, family, **more)
        unstack_experts(plain)
        for name in (
            "fp8, small blocks",
            "awq",
            "gptq, act-order",
            "modelopt, nvfp4",
            "compressed, mxfp4",
            "bitsandbytes, nf4",
        ):
            folder = tmp_path / f"{family}, {name}"
            found, expected = (load_parameters(path) for path in write_quantised(plain, folder, FORMATS[name], skip=()))
            for parameter, values in expected.items():
                torch.testing.assert_close(found[parameter], values, atol=1e-7, rtol=1e-6, msg=parameter)


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
def test_modelopts_own_file(algorithm: str | None, original: Path, tmp_path: Path) -> None:
    """Older checkpoints of ModelOpt say nothing in config.json. One with a KV cache in FP8 alone is not quantised."""
    quantised, plain = write_quantised(original, tmp_path, FORMATS["modelopt, nvfp4"])
    path = plain if algorithm is None else quantised
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["*layers.1.mlp*", "lm_head"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    found, expected = load_parameters(path), load_parameters(plain)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-7, rtol=1e-6, msg=name)
    quantisation = load_model_config(path).quantisation
    assert (quantisation and quantisation.name) == algorithm
    for section in ({"quantization": own}, {"ignore": own["exclude_modules"], "quant_algo": algorithm}):
        edit_json(path / "config.json", quantization_config={"quant_method": "modelopt", **section})
        assert load_model_config(path).quantisation == quantisation


def edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda path: edit_weights(path, change)


def configure(**values: Any) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "config.json", quantization_config=values)


Q = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "no scales": (
        "awq",
        edit(lambda t: t.pop(f"{Q}.scales")),
        [f"{Q}.qweight has no scales, which config.json asks for"],
    ),
    "no zeros": ("awq", edit(lambda t: t.pop(f"{Q}.qzeros")), [f"{Q}.qweight has no qzeros", "config.json asks"]),
    "no zeros of GPTQ": ("gptq, zeros, version 2", edit(lambda t: t.pop(f"{Q}.qzeros")), ["has no qzeros"]),
    "no groups of columns": ("gptq, act-order", edit(lambda t: t.pop(f"{Q}.g_idx")), [f"{Q}.qweight has no g_idx"]),
    "no zeros of words": (
        "compressed, w4a16, zeros",
        edit(lambda t: t.pop(f"{Q}.weight_zero_point")),
        [f"{Q}.weight_packed has no weight_zero_point"],
    ),
    "no FP8 scale": (
        "fp8, small blocks",
        edit(lambda t: t.pop(f"{Q}.weight_scale_inv")),
        [f"{Q}.weight has no weight_scale or weight_scale_inv"],
    ),
    "scales of another shape": (
        "fp8, small blocks",
        edit(lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 3)})),
        [f"{Q}.weight_scale_inv", "[3, 3]", "16 × 32"],
    ),
    "groups of another size": (
        "gptq",
        lambda path: (
            edit(lambda t: t.pop(f"{Q}.g_idx"))(path),
            configure(quant_method="gptq", bits=4, group_size=64)(path),
        ),
        [f"{Q}.scales", "[2, 64]", "[1, 64]"],
    ),
    "a column of no group": (
        "gptq, act-order",
        edit(lambda t: t.update({f"{Q}.g_idx": torch.full((64,), 9, dtype=torch.int32)})),
        [f"{Q}.g_idx", "groups from 9 to 9", "4 groups"],
    ),
    "words of another type": (
        "gptq",
        edit(lambda t: t.update({f"{Q}.qweight": torch.ones(8, 64)})),
        [f"{Q}.qweight", "F32", "I32"],
    ),
    "zeros of another shape": (
        "awq",
        edit(lambda t: t.update({f"{Q}.qzeros": torch.ones(2, 7, dtype=torch.int32)})),
        [f"{Q}.qzeros", "[2, 7]", "[2, 8]"],
    ),
    "twice": (
        "gptq",
        edit(lambda t: t.update({f"{Q}.weight": torch.ones(64, 64)})),
        ["appears twice", f"{Q}.qweight"],
    ),
    "fewer rows": (
        "gptq",
        edit(
            lambda t: t.update(
                {
                    f"{Q}.qweight": t[f"{Q}.qweight"][:, :32].clone(),
                    f"{Q}.scales": t[f"{Q}.scales"][:, :32].clone(),
                    f"{Q}.qzeros": t[f"{Q}.qzeros"][:, :4].clone(),
                }
            )
        ),
        [f"{Q}.qweight has shape [32, 64]", "[64, 64]"],
    ),
    "bitsandbytes of no size": ("awq", configure(quant_method="bitsandbytes"), ["`quantization_config.load_in_4bit`"]),
    "no table": (
        "bitsandbytes, nf4",
        edit(lambda t: t.pop(f"{Q}.weight.quant_map")),
        [f"{Q}.weight has no weight.quant_map"],
    ),
    "no scales of scales": (
        "bitsandbytes, nf4",
        edit(lambda t: t.pop(f"{Q}.weight.nested_absmax")),
        [f"{Q}.weight has no weight.nested_absmax"],
    ),
    "scales of scales in another type": (
        "bitsandbytes, nf4",
        edit(lambda t: t.update({f"{Q}.weight.nested_absmax": t[f"{Q}.weight.nested_absmax"].int()})),
        [f"{Q}.weight.nested_absmax is stored as I32; supported here: F32"],
    ),
    "fewer bytes": (
        "bitsandbytes, fp4",
        edit(lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:8].clone()})),
        [f"{Q}.weight has 16 numbers", "[64, 64]"],
    ),
    "fewer blocks": (
        "bitsandbytes, fp4",
        edit(lambda t: t.update({f"{Q}.weight.absmax": t[f"{Q}.weight.absmax"][:8].clone()})),
        [f"{Q}.weight.absmax has shape [8]", "[64]"],
    ),
    "a description that is none": (
        "bitsandbytes, fp4",
        edit(lambda t: t[f"{Q}.weight.quant_state.bitsandbytes__fp4"].fill_(ord("{"))),
        [f"{Q}.weight.quant_state.bitsandbytes__fp4 is not valid JSON", "download it again"],
    ),
    "a description of no bytes": (
        "bitsandbytes, fp4",
        edit(lambda t: t.update({f"{Q}.weight.quant_state.bitsandbytes__fp4": torch.ones(0, dtype=torch.uint8)})),
        ["quant_state.bitsandbytes__fp4 has 0 bytes"],
    ),
    "a description in two dimensions": (
        "bitsandbytes, fp4",
        edit(lambda t: t.update({f"{Q}.weight.quant_state.bitsandbytes__fp4": torch.ones(1, 9, dtype=torch.uint8)})),
        ["quant_state.bitsandbytes__fp4 has shape [1, 9]", "one dimension"],
    ),
    "smoothing of another size": (
        "modelopt, nvfp4 behind smoothed activations",
        edit(lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(3)})),
        [f"{Q}.pre_quant_scale has shape [3]", "[64]"],
    ),
    "another method": ("awq", configure(quant_method="aqlm"), ['"aqlm"', "not supported", "or bitsandbytes"]),
    "another AWQ": ("awq", configure(quant_method="awq", bits=4, version="gemv"), ["version", '"gemv"', "only gemm"]),
    "layers of several kinds": (
        "awq",
        configure(quant_method="auto-round", bits=4, group_size=32, extra_config={"lm_head": {"bits": 8}}),
        ["extra_config.bits", '8 of "lm_head" differs from 4'],
    ),
    "another way of packing": (
        "awq",
        configure(quant_method="auto-round", packing_format="auto_round:fp8", bits=4),
        ["packing_format", '"auto_round:fp8" is not supported, only auto_round:auto_gptq'],
    ),
    "3 bits": ("gptq", configure(quant_method="gptq", bits=3), ["bits", "3 bits", "2, 4, 8"]),
    "4 bits float": ("awq", configure(**compressed({"type": "float", "num_bits": 4})), ["group_size", "16 and 32"]),
    "no factor": (
        "modelopt, nvfp4",
        edit(lambda t: t.pop(f"{Q}.weight_scale_2")),
        [f"{Q}.weight has no weight_scale_2, which config.json asks for"],
    ),
    "no divisor": (
        "compressed, nvfp4",
        edit(lambda t: t.pop(f"{Q}.weight_global_scale")),
        [f"{Q}.weight_packed has no weight_global_scale"],
    ),
    "two factors": (
        "modelopt, nvfp4",
        edit(lambda t: t.update({f"{Q}.weight_scale_2": torch.ones(2)})),
        [f"{Q}.weight_scale_2 has shape [2]", "a single number"],
    ),
    "scales of FP4 in another type": (
        "modelopt, nvfp4",
        edit(lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 4)})),
        [f"{Q}.weight_scale is stored as F32", "F8_E4M3"],
    ),
    "fewer scales of FP4": (
        "modelopt, nvfp4",
        edit(lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :3].contiguous()})),
        [f"{Q}.weight_scale has shape [64, 3]", "1 × 16", "[64, 4]"],
    ),
    "one scale for a weight of FP4": (
        "modelopt, nvfp4",
        edit(lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][0, 0].clone()})),
        [f"{Q}.weight_scale has shape []", "1 × 16", "[64, 4]"],
    ),
    "one scale for a weight of integers": (
        "awq, rows, no zeros",
        edit(lambda t: t.update({f"{Q}.scales": torch.ones((), dtype=torch.float16)})),
        [f"{Q}.scales has shape []", "[1, 64]"],
    ),
    "fewer exponents": (
        "modelopt, mxfp8",
        edit(lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :1].repeat(1, 3)})),
        [f"{Q}.weight_scale has shape [64, 3]", "1 × 32", "[64, 2]"],
    ),
    "GGUF": ("awq", configure(quant_method="gguf"), ['"gguf"', "llama.cpp", "not supported", "quantization: fp8"]),
    "EXL2": ("awq", configure(quant_method="exl2", bits=4.0), ['"exl2"', "ExLlamaV2", "or bitsandbytes"]),
    "HQQ": ("awq", configure(quant_method="hqq"), ['"hqq"', "HQQ", "or bitsandbytes"]),
    "mixed with another": (
        "awq",
        configure(
            quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT4_AWQ"}}
        ),
        ["quant_algo", '"INT4_AWQ"', "NVFP4"],
    ),
    "mixed of nothing": (
        "awq",
        configure(quant_method="modelopt", quant_algo="MIXED_PRECISION"),
        ["quantized_layers", "does not say"],
    ),
    "two kinds of groups": (
        "awq",
        configure(
            quant_method="compressed-tensors",
            config_groups={
                "a": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}},
                "b": {"weights": {"type": "float", "num_bits": 8}},
            },
        ),
        ["config_groups", "2 kinds of weights", "one, or FP4 beside FP8"],
    ),
    "no description": (
        "modelopt, nvfp4",
        lambda path: edit_json(path / "config.json", quantization_config=None),
        ["belongs to a quantised weight", "neither config.json", "nor hf_quant_config.json says how"],
    ),
    "no method": ("awq", configure(bits=4), ["`quantization_config.quant_method`: missing", "or bitsandbytes"]),
    "no groups": (
        "awq",
        configure(quant_method="compressed-tensors", config_groups={"group_0": 3}),
        ["config_groups", '{"group_0": 3} describes no weights'],
    ),
    "E5M2": ("awq", configure(quant_method="fp8", fmt="e5m2"), ["fmt", '"e5m2"', "only e4m3"]),
    "blocks": ("awq", configure(quant_method="fp8", weight_block_size=[128]), ["weight_block_size", "[128, 128]"]),
    "modelopt": ("awq", configure(quant_method="modelopt", quant_algo="W4A8_AWQ"), ["quant_algo", '"W4A8_AWQ"', "FP8"]),
    "names": ("awq", configure(quant_method="fp8", modules_to_not_convert="x"), ["modules_to_not_convert", "list"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case: str, original: Path, tmp_path: Path) -> None:
    name, change, parts = REFUSED[case]
    path, _ = write_quantised(original, tmp_path, FORMATS[name])
    change(path)
    with pytest.raises(LoadError) as caught:
        load_parameters(path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_bitnet_rounds_what_its_layers_read(mode: str, tmp_path: Path) -> None:
    """Weights are packed, or plain ones that become ternary; transformers' model has them as they then are."""
    path, ids = write_tiny_model(tmp_path / "model", "BitNet", hidden_size=64), list(range(2, 60))
    model = copy.deepcopy(reference_model(path))
    stored = load_file(path / "model.safetensors")
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight, scale = module.weight.data, module.weight.data.abs().mean()
            ternary = (weight / scale).round().clamp(-1, 1)
            module.weight.data = ternary * scale
            module.register_forward_pre_hook(lambda _, inputs: _rounded(inputs[0]))
            if mode == "offline":
                quarters = (ternary + 1).to(torch.uint8).chunk(4)
                packed = sum(quarter << 2 * number for number, quarter in enumerate(quarters))
                stored |= {f"model.{name}.weight": packed, f"model.{name}.weight_scale": scale.view(1)}
    save_file(stored, path / "model.safetensors")
    edit_json(
        path / "config.json",
        quantization_config={"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": mode},
    )
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    (found,) = ModelDriver(path, max_positions=len(ids)).step((RequestState(), ids))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    config = load_model_config(path)
    with pytest.raises(ConfigError, match="round rows to 8 bits"):
        config.check_tensor_parallel(2)
    with pytest.raises(ConfigError, match="use quantization: none"):
        config.with_quantization("fp8")
    section = {"quant_method": "bitnet", "linear_class": "autobitlinear", "modules_to_not_convert": ["model.layers.1"]}
    edit_json(path / "config.json", quantization_config=section)
    with pytest.raises(LoadError, match=r"modules_to_not_convert`: model.layers.1 is not supported"):
        load_model_config(path)


def _rounded(x: Tensor) -> Tensor:
    scale = 127 / x.abs().amax(-1, keepdim=True)
    return (x * scale).round() / scale
