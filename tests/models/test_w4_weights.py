"""Weights that ranks keep in the 4 bits of a checkpoint: products are those of the numbers that the codes stand for,
whatever the checkpoint's layout, cut over ranks and stages too; what cannot be kept is refused with a way out."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from rank_weights import load_model
from safetensors.torch import load_file
from test_gguf import TOKENIZER
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import edit_json, reference_logits, write_tiny_model
from expert_shapes import GPT_OSS
from gguf_files import write_gguf
from model_driver import CPU, ModelDriver
from mxfp4 import quantise as quantise_experts
from nvcli.errors import ConfigError, LoadError
from nvcli.kernels.w4 import dequantise
from nvcli.models.checkpoint import resolve_model
from nvcli.models.config import load_model_config
from nvcli.models.linear_methods import W4LinearMethod
from nvcli.models.loader import init_random_weights
from nvcli.models.registry import build_model
from nvcli.sizing.weights import weight_bytes
from nvcli.worker.distributed.stage import Stage
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from quantised_checkpoints import FORMATS, awq, gptq, packed, unstack_experts, write_quantised
from tensor_parallel_ranks import run_ranks

SIZES = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 64}
IDS = list(range(2, 40))
KEPT = {
    "awq": awq(64),
    "awq, rows, no zeros": awq(-1, zero_point=False),
    "gptq": gptq(32),
    "gptq, zeros, version 2": gptq(96, sym=False, version="gptq_v2"),
    "gptq, act-order": gptq(32, act_order=True, order_seed=1),
    "w4a16": packed(64),
    "w4a16, zeros": packed(32, sym=False),
    "nvfp4": FORMATS["modelopt, nvfp4"],
    "nvfp4 by compressed-tensors": FORMATS["compressed, nvfp4"],
}
CASES = (
    ("awq", 1, 64),
    ("awq", 2, 32),
    ("gptq, zeros, version 2", 2, 32),
    ("w4a16", 2, 32),
    ("nvfp4", 1, 16),
    ("nvfp4 by compressed-tensors", 2, 16),
)
"""Name, ranks, and the group of the weight."""
load_w4 = partial(load_model, quantization="w4a16")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("original") / "model", head_dim=48, vocab_size=104, **SIZES)


@pytest.fixture(scope="module")
def checkpoints(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(quantised, plain) by format, with an LM head that is quantised."""
    folder = tmp_path_factory.mktemp("formats")
    return {
        name: write_quantised(
            original, folder / name, one, skip=() if "gptq" in name else ("layers.1.mlp",), has_head=True
        )
        for name, one in KEPT.items()
    }


def logits(path: Path, group: TensorParallelGroup | None = None, **options: Any) -> Tensor:
    """Of a prompt in two chunks; nothing on ranks other than 0."""
    driver, request = ModelDriver(path, group=group, quantization="w4a16", **options), RequestState()
    parts = [part for ids in (IDS[:20], IDS[20:]) for part in driver.step((request, ids))]
    return torch.cat(parts) if driver.group.rank == 0 else torch.empty(0)


@pytest.mark.parametrize("name", KEPT)
def test_logits_and_bytes(name: str, checkpoints: dict[str, tuple[Path, Path]]) -> None:
    quantised, plain = checkpoints[name]
    model = load_w4(quantised)
    layers = [module for module in model.modules() if isinstance(getattr(module, "method", None), W4LinearMethod)]
    # GPTQ has no list of layers that are left alone.
    assert len(layers) == (8 if "gptq" in name else 6)
    assert model.lm_head is not None
    assert (model.lm_head.format is None) == ("act-order" in name)
    assert model.weight_bytes() == weight_bytes(model.config, "float32")
    torch.testing.assert_close(logits(quantised), reference_logits(plain, IDS), atol=2e-4, rtol=1e-4)


def test_values_are_those_of_the_checkpoint(checkpoints: dict[str, tuple[Path, Path]]) -> None:
    """Not one number is rounded once more, as these scales have 16 bits. A rank's 96 or 192 columns take groups of 32
    where those of the checkpoint, of 64 or 96, are cut or do not divide 128."""
    for name, size, group in CASES:
        quantised, plain = checkpoints[name]
        stored = load_file(plain / "model.safetensors")
        for rank in range(size):
            layer: Any = load_w4(quantised, rank, size).get_submodule("model.layers.0.mixer.o_proj")
            columns = slice(rank * 192 // size, (rank + 1) * 192 // size)
            assert layer.method.format.group == group
            values = dequantise(layer.weight, layer.weight_scale, 192 // size, layer.method.format)
            torch.testing.assert_close(
                values, stored["model.layers.0.self_attn.o_proj.weight"][:, columns], rtol=1e-6, atol=1e-8
            )


def test_weights_of_one_shape_in_parameters_of_several(tmp_path: Path) -> None:
    """Scales of a query projection are a part of those of all heads, and an output projection's are a whole parameter;
    both are read together, and memory is such that they might be taken for a stack."""
    original = write_tiny_model(tmp_path / "original", hidden_size=64, intermediate_size=128, vocab_size=258)
    quantised, plain = write_quantised(original, tmp_path, FORMATS["modelopt, nvfp4"])
    torch.testing.assert_close(logits(quantised), reference_logits(plain, IDS), atol=2e-4, rtol=1e-4)


def test_stages_give_the_logits_of_one(checkpoints: dict[str, tuple[Path, Path]]) -> None:
    quantised, _ = checkpoints["awq"]
    (expected,) = ModelDriver(quantised, quantization="w4a16").step((RequestState(), IDS))
    stages = [ModelDriver(quantised, stage=Stage(index, 2), quantization="w4a16") for index in range(2)]
    state: Any = None
    with torch.inference_mode():
        for stage in stages:
            state = stage.model(make_batch([(RequestState(), IDS)], stage.kv_cache, stage.backend, stage.blocks), state)
        found = stages[1].model.compute_logits(state)
    torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Mixtures of experts in integers and NVFP4, and one in MXFP4."""
    folder = tmp_path_factory.mktemp("experts")
    plain = unstack_experts(write_tiny_model(folder / "plain", "Qwen3Moe", **MOE))
    quantised, decoded = write_quantised(plain, folder / "awq", awq(32), skip=())
    nvfp4, nvfp4_decoded = write_quantised(plain, folder / "nvfp4", FORMATS["modelopt, nvfp4"], skip=())
    sizes = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 128}
    published = quantise_experts(write_tiny_model(folder / "gpt-oss", "GptOss", **sizes))
    found = {"awq": quantised, "awq, decoded": decoded, "mxfp4": published}
    return {**found, "nvfp4": nvfp4, "nvfp4, decoded": nvfp4_decoded}


def test_experts(experts: dict[str, Path]) -> None:
    """MXFP4 keeps experts alone in 4 bits; biases, sinks and the rest are as they are."""
    for name in ("awq", "nvfp4"):
        expected = reference_logits(experts[f"{name}, decoded"], IDS)
        torch.testing.assert_close(logits(experts[name]), expected, atol=2e-4, rtol=1e-4)
    (expected,) = ModelDriver(experts["mxfp4"]).step((RequestState(), IDS))
    torch.testing.assert_close(logits(experts["mxfp4"]), expected, atol=2e-4, rtol=1e-4)
    for name in ("awq", "mxfp4", "nvfp4"):
        for size, is_whole in ((1, False), (2, False), (2, True)):
            model = load_w4(experts[name], size - 1, size, expert_parallel=is_whole)
            assert model.weight_bytes() == weight_bytes(model.config, "float32", tensor_parallel_size=size)
            assert {one.gate_up_proj.dtype for one in model.modules() if hasattr(one, "gate_up_scale")} == {torch.int16}


def run_rank(group: TensorParallelGroup, paths: list[Path]) -> list[Tensor]:
    return [logits(path, group) for path in paths]


def test_two_ranks_give_the_logits_of_one(
    checkpoints: dict[str, tuple[Path, Path]],
    experts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with an embedding in 8 bits, which is the LM head, too."""
    tied = write_tiny_model(tmp_path / "tied", "Qwen2", hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    in_gguf = write_gguf(tied, tmp_path / "tied.gguf", choose=lambda name: Type.Q8_0, **TOKENIZER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [checkpoints["awq"][0], experts["awq"], experts["mxfp4"], experts["nvfp4"], resolve_model(str(in_gguf))]
    for path, found in zip(paths, run_ranks(2, run_rank, tmp_path, paths)[0], strict=True):
        torch.testing.assert_close(found, logits(path), atol=2e-4, rtol=1e-4)


def test_random_weights_are_of_a_usual_size(
    original: Path, checkpoints: dict[str, tuple[Path, Path]], experts: dict[str, Path], tmp_path: Path
) -> None:
    found = {"quant_method": "gguf_affine", "bits": 4, "type": "Q4_K", "modules_in_8_bits": ["layers.0.mlp"]}
    in_gguf = shutil.copytree(original, tmp_path / "gguf")
    edit_json(in_gguf / "config.json", quantization_config=found)
    dense = (*(checkpoints[name][0] for name in ("awq", "nvfp4")), in_gguf)
    for path, name in (*((one, "mlp.gate_up_proj") for one in dense), (experts["mxfp4"], "mlp.experts")):
        model = build_model(
            load_model_config(path).with_quantization("w4a16"), TensorParallelGroup.single(), torch.float32
        )
        init_random_weights(model, CPU)
        layer: Any = model.get_submodule(f"model.layers.0.{name}")
        if name == "mlp.experts":
            values = dequantise(layer.down_proj[0], layer.down_scale[0], 128, layer.formats[1])
        else:
            values = dequantise(layer.weight, layer.weight_scale, 192, layer.method.format)
        assert 0.015 < float(values.std()) < 0.025


def test_what_cannot_be_kept(
    original: Path, checkpoints: dict[str, tuple[Path, Path]], experts: dict[str, Path], tmp_path: Path
) -> None:
    small, _ = write_quantised(original, tmp_path / "small", FORMATS["gptq, act-order"])
    orders, _ = write_quantised(original, tmp_path / "orders", gptq(32, act_order=True), skip=())
    fp8, _ = write_quantised(original, tmp_path / "fp8", FORMATS["fbgemm"], skip=())
    way_out = "quantization: none"
    for path, problem in ((small, "groups of 32"), (fp8, "this one is FP8"), (original, "this one is not quantised")):
        with pytest.raises(ConfigError, match=f"{problem}.*{way_out}"):
            load_model_config(path).with_quantization("w4a16")
    with pytest.raises(LoadError, match=f"q_proj.weight, .*k_proj.weight.* group their columns differently.*{way_out}"):
        load_w4(orders)
    with pytest.raises(ConfigError, match=f"desc_act.* cannot be split in 4 bits.*Possible: 1; or {way_out}"):
        load_w4(checkpoints["gptq, act-order"][0], 0, 2)
    edit_json(experts["mxfp4"] / "config.json", intermediate_size=96)
    with pytest.raises(ConfigError, match=f"each rank's 48 input features of the experts' down_proj.*{way_out}"):
        load_model_config(experts["mxfp4"]).with_quantization("w4a16").check_tensor_parallel(2)
    edit_json(fp8 / "config.json", quantization_config=dict(awq(32).config))
    with pytest.raises(LoadError, match=f"is stored as F8_E4M3.*{way_out}"):
        load_w4(fp8)
