"""What `quantization: auto` comes to: weights of 4 bits stay in 4 bits where 16 would take too much memory."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from checkpoints import edit_json
from nvcli.core.config import RunConfig
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.errors import ConfigError
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engine_config, resolve_engines
from nvcli.job.run.kept_weights import explain_choice, keep_weights
from nvcli.kernels.weight_formats import W4Format
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.geometry import model_tensors
from nvcli.models.tensor_spec import Sharding
from nvcli.sizing.costs import model_costs
from nvcli.sizing.memory import estimate
from nvcli.sizing.weights import weight_bytes
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.profile.advice import advise

GIB = 2**30


def gpus_of(num_bytes: int) -> list[SmiGpu]:
    """A GPU of which only the memory is known."""
    return [SmiGpu(index=0, uuid="", name="", total_bytes=num_bytes)]


def shape(name: str, folder: Path, quantization: Any = "w4a16") -> ModelConfig:
    return load_model_config(write_shape(name, folder, quantization=quantization))


@pytest.mark.parametrize(
    ("name", "gib", "keys", "kept"),
    [
        ("qwen3-8b", 141, {}, "none"),
        ("qwen3-8b", 24, {}, "w4a16"),
        ("qwen3-32b", 141, {}, "none"),
        ("qwen3-32b", 80, {}, "w4a16"),
        ("qwen3-32b", 80, {"tensor_parallel_size": 4}, "none"),
        ("qwen3-32b", 80, {"pipeline_parallel_size": 2}, "none"),
        ("qwen3-32b", 80, {"quantization": "none"}, "none"),
        ("gpt-oss-20b", 141, {}, "fp8"),
        ("gpt-oss-20b", 80, {}, "fp8"),
        ("gpt-oss-20b", 80, {"quantization": "none"}, "none"),
        ("gpt-oss-20b", 40, {}, "w4a8"),
        ("gpt-oss-20b", 80, {"batch_invariant": True}, "none"),
        ("gpt-oss-120b", 141, {}, "w4a8"),
        ("gpt-oss-120b", 141, {"tensor_parallel_size": 2}, "w4a8"),
        ("gpt-oss-120b", 141, {"tensor_parallel_size": 4}, "fp8"),  # groups of 4 bits would be cut
        ("gpt-oss-120b", 141, {"tensor_parallel_size": 8}, "none"),  # and parts in FP8 would be too narrow
    ],
)
def test_auto_goes_by_memory(name: str, gib: int, keys: dict[str, Any], kept: str, tmp_path: Path) -> None:
    run = RunConfig(model="m", **keys)
    assert keep_weights(run, shape(name, tmp_path), "cuda", gpus=gpus_of(gib * GIB)).quantization == kept


def test_experts_in_mxfp4_become_fp8_only_where_gpus_multiply_in_fp8(tmp_path: Path) -> None:
    run, model = RunConfig(model="m"), shape("gpt-oss-20b", tmp_path)
    card = SmiGpu(index=0, uuid="a", name="a", driver="580", total_bytes=141 * GIB, used_bytes=0, mig=False)
    for capability, kept in (((8, 0), "none"), ((8, 9), "fp8"), ((9, 0), "fp8")):
        gpus = [dataclasses.replace(card, capability=capability)]
        assert keep_weights(run, model, "cuda", gpus=gpus).quantization == kept
    large, old_card = shape("gpt-oss-120b", tmp_path), dataclasses.replace(card, capability=(8, 0))
    assert keep_weights(run, large, "cuda", gpus=[old_card]).quantization == "w4a16"
    asked = RunConfig(model="m", quantization="w4a8")
    assert keep_weights(asked, model, "cuda", gpus=[card]).quantization == "w4a8"
    with pytest.raises(ConfigError, match=r"w4a8, and a has no units for FP8 products: use quantization: w4a16"):
        keep_weights(asked, model, "cuda", gpus=[old_card])
    with pytest.raises(ConfigError, match=r"w4a8, which .* MXFP4, .*, but this checkpoint is awq, 4 bits: use"):
        keep_weights(asked, shape("qwen3-8b", tmp_path), "cuda", gpus=[card])
    model = shape("gpt-oss-20b", tmp_path)
    cut = RunConfig(model="m", device="cuda", tensor_parallel_size=4)  # 720 features of each rank are no whole groups
    old = keep_weights(cut, model, "cuda", gpus=[dataclasses.replace(card, capability=(8, 0))])
    assert old.quantization == "none"
    line = "become bfloat16, as they cannot be cut over 4 GPUs .*; --quantization fp8 takes half the memory"
    assert re.search(line, explain_choice(cut, old, resolve_engine_config(cut, tmp_path, old)))


def test_auto_leaves_the_rest_alone(tmp_path: Path) -> None:
    """Nobody is asked for GPUs on a CPU and for checkpoints that are not in 4 bits; unknown GPUs change nothing."""
    run, four_bits = RunConfig(model="m"), shape("qwen3-32b", tmp_path)
    assert keep_weights(run, four_bits, "cpu", gpus=gpus_of(GIB)).quantization == "none"
    assert keep_weights(run, shape("qwen3-32b", tmp_path, "none"), "cuda", gpus=gpus_of(GIB)).quantization == "none"
    assert keep_weights(run, four_bits, "cuda", gpus=()).quantization == "none"
    untold = SmiGpu(index=0, uuid="a", name="a slice", driver="580", total_bytes=0, used_bytes=0, mig=True)
    assert keep_weights(run, four_bits, "cuda", gpus=[untold]).quantization == "none"
    assert four_bits.quantisation is not None
    small = dataclasses.replace(four_bits, quantisation=dataclasses.replace(four_bits.quantisation, group_size=16))
    assert keep_weights(run, small, "cuda", gpus=gpus_of(GIB)).quantization == "none"


def test_what_is_kept_is_what_the_engine_gets(tmp_path: Path) -> None:
    write_shape("qwen3-32b", tmp_path, quantization="w4a16")
    run = RunConfig(model="m", device="cuda")
    model, config, *_ = resolve_engines(run, tmp_path, load_checkpoint(run, tmp_path), gpus=gpus_of(48 * GIB))
    assert model.quantization == config.quantization == "w4a16"
    assert config.weights_type == "bfloat16, linear layers in the checkpoint's bits"
    with pytest.raises(ConfigError, match=r"is w4a16.* this one is not quantised: use quantization: none"):
        keep_weights(RunConfig(model="m", quantization="w4a16"), shape("qwen3-8b", tmp_path, "none"), "cpu")


@pytest.mark.parametrize(
    ("name", "gib", "device", "keys", "line"),
    [
        ("gpt-oss-20b", 40, "cuda", {}, "experts stay in 4 bits, .*--quantization none"),
        ("qwen3-32b", 80, "cuda", {}, "weights stay in 4 bits, as bfloat16 would take more than 50%"),
        ("qwen3-8b", 141, "cuda", {}, "weights in 4 bits become bfloat16, .*--quantization w4a16 keeps them"),
        ("qwen3-8b", 141, "cuda", {"quantization": "w4a16"}, "^$"),
        ("qwen3-8b", 141, "cpu", {}, "^$"),
        (
            "gpt-oss-20b",
            141,
            "cuda",
            {},
            "^experts become FP8, as large batches and prompts are fastest so, and it fits",
        ),
        ("gpt-oss-20b", 80, "cuda", {"batch_invariant": True}, "become bfloat16, as batch_invariant asks for it"),
        ("gpt-oss-120b", 141, "cuda", {"tensor_parallel_size": 8}, r"as they .* over 8 GPUs \(--ep "),
    ],
)
def test_the_choice_is_said(
    name: str, gib: int, device: Literal["cpu", "cuda"], keys: dict[str, Any], line: str, tmp_path: Path
) -> None:
    run = RunConfig(model="m", device=device, **keys)
    model = keep_weights(run, shape(name, tmp_path), device, gpus=gpus_of(gib * GIB))
    config = resolve_engine_config(run, tmp_path, model)
    assert re.search(line, explain_choice(run, model, config))


@pytest.mark.parametrize(
    ("gib", "keys", "kept", "line"),
    [
        (141, {}, "none", "^NVFP4 weights become bfloat16, as that loses nothing and fits; --quantization fp8 "),
        (24, {}, "fp8", "^NVFP4 weights become FP8, as bfloat16 would take more than 50% of a GPU's memory; "),
        (12, {}, "w4a16", "^NVFP4 weights stay in 4 bits, as more bits would take more than 50% of a GPU's memory; "),
        (24, {"batch_invariant": True}, "none", "^NVFP4 weights become bfloat16, as batch_invariant asks for it"),
        (141, {"quantization": "w4a16"}, "w4a16", "^$"),
        (141, {"quantization": "fp8"}, "fp8", "^$"),
    ],
)
def test_how_nvfp4_is_kept(gib: int, keys: dict[str, Any], kept: str, line: str, tmp_path: Path) -> None:
    write_shape("qwen3-8b", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    run, shape = RunConfig(model="m", device="cuda", **keys), load_model_config(tmp_path)
    model = keep_weights(run, shape, "cuda", gpus=gpus_of(gib * GIB))
    config = resolve_engine_config(run, tmp_path, model)
    assert model.quantization == kept
    assert re.search(line, explain_choice(run, model, config))
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    with pytest.raises(ConfigError, match=r"is w4a16.* this one is NVFP4: use quantization: none, or fp8"):
        load_model_config(tmp_path).with_quantization("w4a16")


@pytest.mark.parametrize(
    ("gib", "bits", "kept", "line"),
    [
        (
            24,
            4,
            "w4a16",
            "^GGUF's Q4_K weights stay in 4 bits, as bfloat16 would take more than 50% of a GPU's ",
        ),
        (141, 4, "none", "^GGUF's Q4_K weights in 4 bits become bfloat16, as large .* --quantization w4a16 keeps them"),
        (
            24,
            8,
            "w4a16",
            "^GGUF's Q8_0 weights stay in 8 bits, as bfloat16 would take more than 50% of a GPU's ",
        ),
    ],
)
def test_how_gguf_is_kept(gib: int, bits: int, kept: str, line: str, tmp_path: Path) -> None:
    """Its layers may have codes and groups of other sizes, of which those that are multiplied together have one."""
    write_shape("qwen3-8b", tmp_path)
    found = {"quant_method": "gguf_affine", "bits": bits, "type": "Q4_K" if bits == 4 else "Q8_0"}
    found |= {"modules_in_8_bits": ["model.layers.0.self_attn.v_proj", "lm_head"], "lm_head": True}
    found |= {"modules_in_groups_of_16": ["mlp.down_proj", "lm_head"]}
    edit_json(tmp_path / "config.json", quantization_config=found)
    run, shape = RunConfig(model="m", device="cuda"), load_model_config(tmp_path)
    model = keep_weights(run, shape, "cuda", gpus=gpus_of(gib * GIB))
    assert model.quantization == kept
    assert re.search(line, explain_choice(run, model, resolve_engine_config(run, tmp_path, model)))
    kept_model = shape.with_quantization("w4a16")
    formats = {tensor.name: tensor.w4_format(1) for tensor in model_tensors(kept_model, "bfloat16")}
    for name, kind, group in (
        ("0.self_attn.q_proj", "affine in 8 bits", 32),
        ("1.self_attn.q_proj", "affine", 32),
        ("1.mlp.down_proj", "affine", 16),
    ):
        assert formats[f"model.layers.{name}.weight"] == W4Format(kind, group)
    assert formats["lm_head.weight"] == W4Format("affine in 8 bits", 16)
    assert formats["model.embed_tokens.weight"] is None
    for plain in (shape.with_quantization("fp8"), kept_model.headless()):
        assert not any(one.w4 for one in model_tensors(plain, "bfloat16") if one.sharding is Sharding.VOCAB)
    costs = [model_costs(one, "bfloat16", tensor_parallel_size=2).lm_head for one in (kept_model, shape)]
    assert costs[0].num_bytes * 8 == costs[1].num_bytes * 5, "10 bits a weight in place of 16"


@pytest.mark.parametrize(("gib", "capability", "kept"), [(24, (8, 9), "fp8"), (24, (8, 0), "w4a16")])
def test_nvfp4_stays_in_4_bits_without_fp8_units(
    gib: int, capability: tuple[int, int], kept: str, tmp_path: Path
) -> None:
    write_shape("qwen3-8b", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    model, size = load_model_config(tmp_path), gib * GIB
    card = SmiGpu(
        index=0, uuid="a", name="a", driver="580", total_bytes=size, used_bytes=0, mig=False, capability=capability
    )
    assert keep_weights(RunConfig(model="m"), model, "cuda", gpus=[card]).quantization == kept


def test_plans_know_what_4_bits_take(tmp_path: Path) -> None:
    """6.95 G weights of linear layers take 4.25 bits each in groups of 128; activations get room for the largest
    layer's weight in 16 bits."""
    plain = shape("qwen3-8b", tmp_path)
    kept = plain.with_quantization("w4a16")
    found = sum(weight_bytes(kept, "bfloat16").values())
    linear = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert found == sum(weight_bytes(plain, "bfloat16").values()) - linear * 2 + linear * 17 // 32
    run = RunConfig(model="m", device="cuda", max_model_len=4096, speculation=SpeculationConfig(method="none"))
    config = resolve_engine_config(run, tmp_path, plain)
    plans = [estimate(config, model, 80 * GIB).planned["activations"] for model in (plain, kept)]
    assert plans[1] - plans[0] >= 2 * 24576 * 4096


def test_advice_offers_the_bits_of_the_checkpoint(tmp_path: Path) -> None:
    run = RunConfig(model="m", device="cuda", max_model_len=4096, quantization="none")
    offers = []
    for stored in ("w4a16", "none"):
        model = shape("qwen3-8b", tmp_path, stored).with_quantization("none")
        config = resolve_engine_config(run, tmp_path, model)
        use = estimate(config, model, 24 * GIB)
        offers.append([one.change for one in advise(config, model, use, request_len=4096, longest=None)])
    assert ["--set quantization=w4a16" in found for found in offers] == [True, False]
