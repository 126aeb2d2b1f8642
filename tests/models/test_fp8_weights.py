"""Weights that ranks keep in FP8: those of a checkpoint with the same scales as they are, all others quantised when
they are loaded; a step's activations are quantised as they come."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from rank_weights import load_model
from safetensors.torch import load_file
from torch import Tensor, nn

from batches import RequestState, make_batch
from checkpoints import edit_weights, reference_logits, reference_model, write_tiny_model
from family_shapes import SHAPES
from model_driver import CPU, ModelDriver
from nvcli.core.config_types import FP8Accumulation, KeptWeights
from nvcli.errors import ConfigError
from nvcli.kernels import fp8
from nvcli.kernels.fp8 import dequantise_weight, quantise, quantise_weight
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models import kept_values, stacked_values, stored_values, weight_reader
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.geometry import model_tensors
from nvcli.models.linear_methods import Fp8LinearMethod
from nvcli.models.loader import init_random_weights
from nvcli.models.parallel import ShardedLinear
from nvcli.models.pinned_upload import PinnedUpload
from nvcli.models.registry import build_model
from nvcli.sizing.weights import weight_bytes
from nvcli.worker.distributed.stage import WHOLE, Stage
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from quantised_checkpoints import FORMATS, fp8_blocks, unstack_experts, write_quantised

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
IDS = list(range(2, 40))
load_fp8 = partial(load_model, quantization="fp8")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("original") / "model", **SIZES)


@pytest.fixture(scope="module")
def blocks(original: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with blocks of 128, whose second layer's MLP is plain, and the same weights in plain numbers."""
    return write_quantised(original, tmp_path_factory.mktemp("blocks"), fp8_blocks((128, 128)))


def test_blocks_of_a_checkpoint_are_kept_as_they_are(blocks: tuple[Path, Path]) -> None:
    stored = load_file(blocks[0] / "model.safetensors")
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        parameters = dict(load_fp8(blocks[0], rank, size).named_parameters())
        rows = slice(rank * 256 // size, (rank + 1) * 256 // size)
        codes = torch.cat([stored[f"model.layers.0.self_attn.{name}_proj.weight"][rows].float() for name in "qkv"])
        found = parameters["model.layers.0.mixer.qkv_proj.weight"]
        assert found.dtype == FP8
        assert torch.equal(found.float(), codes)
        grid = slice(rank * 2 // size, (rank + 1) * 2 // size)
        scales = torch.cat([stored[f"model.layers.0.self_attn.{name}_proj.weight_scale_inv"][grid] for name in "qkv"])
        assert torch.equal(parameters["model.layers.0.mixer.qkv_proj.weight_scale"], scales)
        columns = slice(rank * 512 // size, (rank + 1) * 512 // size)
        down = parameters["model.layers.0.mlp.down_proj.weight"]
        assert torch.equal(down.float(), stored["model.layers.0.mlp.down_proj.weight"][:, columns].float())
        assert "model.layers.1.mlp.down_proj.weight_scale" not in parameters, "config.json leaves it alone"
        assert parameters["model.layers.1.mlp.down_proj.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", ["modelopt", "fbgemm", "fp8, small blocks", "awq", "plain"])
def test_other_weights_get_a_scale_for_each_row(name: str, original: Path, tmp_path: Path) -> None:
    """FP8 codes with a scale for a row or a tensor are kept as they are; the rest is quantised."""
    quantised, decoded = original, original
    if name != "plain":
        quantised, decoded = write_quantised(original, tmp_path, FORMATS[name])
    stored, plain = load_file(quantised / "model.safetensors"), load_file(decoded / "model.safetensors")
    for rank in (0, 1):
        parameters = dict(load_fp8(quantised, rank, 2).named_parameters())
        rows = slice(rank * 256, rank * 256 + 256)
        for prefix, projections in (("mlp.gate_up_proj", ("gate_proj", "up_proj")),):
            codes = parameters[f"model.layers.0.{prefix}.weight"]
            scales = parameters[f"model.layers.0.{prefix}.weight_scale"]
            paths = [f"model.layers.0.mlp.{one}.weight" for one in projections]
            expected_codes, expected_scales = quantise_weight(
                torch.cat([plain[path][rows] for path in paths]), "channel"
            )
            if name in ("modelopt", "fbgemm"):
                expected_codes = torch.cat([stored[path][rows] for path in paths])
                factors = [stored[f"{path}_scale"].float() for path in paths]
                factors = [one.expand(256) if one.dim() == 0 else one[rows].flatten() for one in factors]
                expected_scales = torch.cat(factors)
            assert torch.equal(codes.float(), expected_codes.float())
            torch.testing.assert_close(scales.data, expected_scales)


@pytest.mark.parametrize(
    ("name", "share"),
    [("modelopt, nvfp4", 0.7), ("compressed, nvfp4", 0.7), ("compressed, mxfp4", 0.999), ("modelopt, mxfp8", 0.999)],
)
def test_small_blocks_become_rows(name: str, share: float, original: Path, tmp_path: Path) -> None:
    """Exponents of blocks go into those of the codes: all but the smallest numbers of MXFP4 and MXFP8 are exact. Those
    of NVFP4 are exact where their scale times 1, or 1.5, has four bits; the others are rounded to four."""
    quantised, decoded = write_quantised(original, tmp_path, FORMATS[name])
    plain = load_file(decoded / "model.safetensors")
    for rank in (0, 1):
        parameters = dict(load_fp8(quantised, rank, 2).named_parameters())
        codes, scales = (parameters[f"model.layers.0.mlp.down_proj.{kind}"] for kind in ("weight", "weight_scale"))
        expected = plain["model.layers.0.mlp.down_proj.weight"][:, rank * 256 : rank * 256 + 256]
        assert codes.dtype == FP8
        errors = (codes.float() * scales.unsqueeze(1) - expected).abs()
        assert (errors <= torch.maximum(expected.abs() / 16, scales.unsqueeze(1) * 2.0**-10)).all()
        assert (errors <= 1e-6 * expected.abs()).float().mean() >= share
        assert errors.norm() < 0.025 * expected.norm()


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_factor_of_zero_is_that_of_a_weight_of_zeros(quantization: Any, original: Path, tmp_path: Path) -> None:
    path, _ = write_quantised(original, tmp_path, FORMATS["modelopt, nvfp4"])
    factor = {"model.layers.0.mlp.down_proj.weight_scale_2": torch.zeros(())}
    edit_weights(path, lambda tensors: tensors.update(factor))
    parameters = dict(load_model(path, quantization=quantization).named_parameters())
    weight, scales = (parameters.get(f"model.layers.0.mlp.down_proj.weight{part}") for part in ("", "_scale"))
    assert weight is not None
    assert (weight.float() * (1 if scales is None else scales.unsqueeze(1)) == 0).all()


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize(
    "name",
    [
        "fp8, blocks of 128",
        "fp8, small blocks",
        "fbgemm",
        "compressed, int8",
        "modelopt, nvfp4",
        "plain",
        "reordered",
    ],
)
def test_weights_are_computed_piece_by_piece(
    name: str, quantization: Any, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are whole blocks of rows and whole heads, the last one may be shorter; together they are the whole, and no
    more numbers than a piece has are ever in float32."""
    path = original
    if name == "reordered":
        path = write_tiny_model(tmp_path / "model", "Cohere2", **{**SIZES, "intermediate_size": 416})
    elif name != "plain":
        path = write_quantised(original, tmp_path, FORMATS[name])[0]
    whole = dict(load_model(path, 1, 2, quantization=quantization).named_parameters())
    monkeypatch.setattr(weight_reader, "_PIECE_NUMBERS", {"cpu": 128 * 256})
    sizes = []
    computing = (
        (kept_values, "quantise_weight"),
        (kept_values, "fp4_to_fp8"),
        (stored_values, "scale_codes"),
        (stacked_values, "scale_codes"),
    )
    for module, function in computing:
        compute = getattr(module, function)

        def watched(values: Tensor, *others: Any, compute: Any = compute) -> Any:
            sizes.append(values.numel())
            return compute(values, *others)

        monkeypatch.setattr(module, function, watched)
    pieces = load_model(path, 1, 2, quantization=quantization).named_parameters()
    for parameter, values in pieces:
        assert torch.equal(values.float(), whole[parameter].float()), parameter
    assert max(sizes, default=0) <= 128 * 256
    is_kept = quantization == "fp8" and name == "fp8, blocks of 128"
    is_computed = not is_kept and (quantization == "fp8" or name not in ("plain", "reordered"))
    assert bool(sizes) == is_computed


def test_bytes_are_counted_with_scales(blocks: tuple[Path, Path], original: Path) -> None:
    for path in (blocks[0], original):
        for size, stage in ((1, WHOLE), (2, WHOLE), (1, Stage(1, 2))):
            model = load_fp8(path, size - 1, size, stage)
            expected = weight_bytes(model.config, "float32", tensor_parallel_size=size, stage=stage)
            assert model.weight_bytes() == expected
    plain = weight_bytes(load_model_config(original), "bfloat16")
    kept = weight_bytes(load_model_config(original).with_quantization("fp8"), "bfloat16")
    assert kept["MLP"] == plain["MLP"] // 2 + 2 * 4 * (2 * 512 + 256)


def quantised_reference(path: Path, kept: ModelConfig) -> nn.Module:
    """transformers' model of a plain checkpoint, whose linear layers quantise their weights and inputs."""
    model = reference_model(path)
    tensors = {tensor.name: tensor.scaling for tensor in model_tensors(kept, "float32")}
    for name, module in model.named_modules():
        scaling = tensors.get(f"{name}.weight")
        if scaling is not None:
            module.forward = _fp8_forward(module, scaling)
    return model  # type: ignore[no-any-return]


def _fp8_forward(module: nn.Linear, scaling: FP8Scaling) -> Callable[[Tensor], Tensor]:
    weight = dequantise_weight(*quantise_weight(module.weight.data, scaling))

    def forward(x: Tensor) -> Tensor:
        rows = quantise(x.flatten(0, -2), scaling)
        factors = rows.scales.unsqueeze(-1) if scaling == "channel" else rows.scales.repeat_interleave(128, 1)
        values = rows.codes.float() * factors[:, : x.shape[-1]]
        return F.linear(values, weight, module.bias).view(*x.shape[:-1], -1)

    return forward


@pytest.mark.parametrize("name", ["plain", "blocks"])
def test_logits(name: str, original: Path, blocks: tuple[Path, Path]) -> None:
    path, plain = (original, original) if name == "plain" else blocks
    driver, request = ModelDriver(path, quantization="fp8"), RequestState()
    found = torch.cat([driver.step((request, IDS[first : first + 19]))[0] for first in (0, 19)])
    with torch.inference_mode():
        expected = quantised_reference(plain, driver.model.config)(torch.tensor([IDS])).logits[0]
        exact = reference_model(plain)(torch.tensor([IDS])).logits[0]
    # A sum that ends a little differently may fall on the other side of a rounding to 8 bits.
    assert (found - expected).abs().mean() < 0.1 * (exact - expected).abs().mean()
    assert (found - expected).abs().max() < 0.1
    assert F.cosine_similarity(found, exact, dim=-1).min() > 0.97


@pytest.mark.parametrize(
    "name",
    [
        "qwen 3-next",
        "gemma 3",
        "gemma 4 with vision, experts beside an mlp",
        "glm 4",
        "cohere 2",
        "pythia",
        "gpt 2",
        "seed-oss",
        "longcat-flash",
        "gpt-oss",
        "minimax text 01",
        "jamba",
        "dbrx",
    ],
)
def test_nothing_is_lost_but_by_rounding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations that are scaled and not rounded, and without FP8 units, where they are not quantised, the logits
    are those of a plain model of the same weights: mixtures of experts, hybrids, norms behind blocks, reordered rows,
    parallel blocks and biases."""
    family, sizes = SHAPES[name]
    path = write_tiny_model(tmp_path / "model", family, **sizes)
    plain, kept = ModelDriver(path), ModelDriver(path, quantization="fp8")
    without_units = ModelDriver(path, quantization="fp8", has_fp8_units=False)
    parameters = dict(kept.model.named_parameters())
    for parameter, values in plain.model.named_parameters():
        if parameters[parameter].dtype == FP8:
            is_of_experts = ".experts." in parameter
            scales = parameters[parameter.replace("_proj", "_scale") if is_of_experts else f"{parameter}_scale"]
            values.data.copy_(parameters[parameter].float() * scales.unsqueeze(-1))

    def scaled(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        scales = largest.clamp(min=1e-6)
        return values.float() / scales, scales

    (expected,), (exact,) = (driver.step((RequestState(), IDS)) for driver in (plain, without_units))
    monkeypatch.setattr(fp8, "_encode", scaled)
    monkeypatch.setattr(fp8, "numbers", lambda codes: codes.float().clone())
    (found,) = kept.step((RequestState(), IDS))
    for one in (found, exact):
        torch.testing.assert_close(one, expected, atol=2e-4, rtol=1e-4)


def test_stages_give_the_logits_of_one(blocks: tuple[Path, Path]) -> None:
    (expected,) = ModelDriver(blocks[0], quantization="fp8").step((RequestState(), IDS))
    stages = [ModelDriver(blocks[0], stage=Stage(index, 2), quantization="fp8") for index in range(2)]
    state: Any = None
    with torch.inference_mode():
        for stage in stages:
            state = stage.model(make_batch([(RequestState(), IDS)], stage.kv_cache, stage.backend, stage.blocks), state)
        found = stages[1].model.compute_logits(state)
    torch.testing.assert_close(found, expected)


def test_random_weights_are_of_a_usual_size(original: Path) -> None:
    model = build_model(
        load_model_config(original).with_quantization("fp8"), TensorParallelGroup.single(), torch.float32
    )
    init_random_weights(model, CPU)
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    values = dequantise_weight(layer.weight, layer.weight_scale)
    assert all(parameter.float().isfinite().all() for parameter in model.parameters())
    assert 0.019 < float(values.std()) < 0.021


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A mixture of experts, with blocks of 128 and plain."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    path = unstack_experts(write_tiny_model(folder / "model", "Qwen3Moe", **{**SIZES, **sizes}))
    quantised, decoded = write_quantised(path, folder, fp8_blocks((128, 128)), skip=("gate.weight",))
    return {"blocks": quantised, "decoded": decoded, "plain": path}


@pytest.mark.parametrize("kept", ["fp8", "none"])
def test_stacks_of_experts_are_as_single_ones(kept: KeptWeights, experts: dict[str, Path], tmp_path: Path) -> None:
    """As Step's files have them: the codes of all experts in one tensor, and their scales in another."""
    path = shutil.copytree(experts["blocks"], tmp_path / "model")

    def stack(tensors: dict[str, Tensor]) -> None:
        stacks: dict[str, list[Tensor]] = {}
        for name in sorted(name for name in tensors if ".experts." in name):
            stacks.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(tensors.pop(name))
        tensors |= {name: torch.stack(parts) for name, parts in stacks.items()}

    edit_weights(path, stack)
    stacked, single = (load_model(one, quantization=kept).state_dict() for one in (path, experts["blocks"]))
    assert stacked.keys() == single.keys()
    assert all(torch.equal(weight.float(), single[name].float()) for name, weight in stacked.items())


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("modelopt, nvfp4", "fp8"),
        ("compressed, nvfp4", "fp8"),
        ("modelopt, nvfp4", "w4a16"),
        ("modelopt, nvfp4", "none"),
        ("compressed, mxfp4", "fp8"),
        ("modelopt, mxfp8", "fp8"),
        ("modelopt", "fp8"),
        ("fbgemm", "fp8"),
        ("fp8, blocks of 128", "fp8"),
        ("fp8, blocks of 128", "none"),
        ("plain", "fp8"),
        ("plain", "none"),
    ],
)
def test_experts_that_are_read_together_are_as_those_read_alone(
    name: str, kept: KeptWeights, experts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = experts["plain"]
    if name != "plain":
        path, _ = write_quantised(path, tmp_path, FORMATS[name], skip=("gate.weight",))
        edit_weights(path, lambda tensors: tensors.update(_other_factors(tensors)))
    load = partial(load_model, quantization=kept)
    sizes: list[int] = []
    read = weight_reader.read_kept_together

    def watched(files: Any, infos: Any, *others: Any) -> Any:
        sizes.append(len(infos))
        return read(files, infos, *others)

    monkeypatch.setattr(weight_reader, "read_kept_together", watched)
    for rank, size in ((0, 1), (1, 2)):
        together = load(path, rank, size).state_dict()
        assert 4 * size <= max(sizes) <= 8 * size, (
            "as many as a piece has room for: 2^18 numbers, or 2^19 kept as stored"
        )
        with monkeypatch.context() as patch:
            patch.setattr(weight_reader, "together_key", lambda info, source: None)
            sizes.clear()
            alone = load(path, rank, size).state_dict()
        assert not sizes
        for parameter, values in together.items():
            assert torch.equal(values.float(), alone[parameter].float()), parameter


@pytest.mark.parametrize("name", ["modelopt, nvfp4", "modelopt", "fp8, blocks of 128", "plain"])
def test_experts_that_are_staged_are_as_those_read_from_files(
    name: str, experts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU gets them, whole and for one of two ranks."""
    path = experts["plain"]
    if name != "plain":
        path, _ = write_quantised(path, tmp_path, FORMATS[name], skip=("gate.weight",))
    expected = [load_model(path, rank, size, quantization="fp8").state_dict() for rank, size in ((0, 1), (1, 2))]
    fill = weight_reader._fill_all
    monkeypatch.setattr(weight_reader, "_fill_all", lambda task, _, device: fill(task, PinnedUpload(device), device))
    for (rank, size), each in zip(((0, 1), (1, 2)), expected, strict=True):
        for parameter, values in load_model(path, rank, size, quantization="fp8").state_dict().items():
            assert torch.equal(values.float(), each[parameter].float()), parameter


def _other_factors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Factors that differ from one weight to the next."""
    names = [name for name in tensors if name.endswith(("weight_scale_2", "weight_global_scale"))]
    return {name: tensors[name] * (index % 7 + 1) / 4 for index, name in enumerate(names)}


@pytest.mark.parametrize("name", ["blocks", "plain"])
def test_experts(name: str, experts: dict[str, Path]) -> None:
    """Each rank has its part of the checkpoint's codes, and of scales; sizes are counted so; logits are near."""
    for rank, size, shares in ((0, 1, False), (1, 2, False), (1, 2, True)):
        model = load_fp8(experts[name], rank, size, expert_parallel=shares)
        counted = weight_bytes(model.config, "float32", tensor_parallel_size=size)
        assert model.weight_bytes() == counted
        share = 0.65 if name == "blocks" else 0.3  # the second layer is listed as left alone
        assert counted["experts"] < share * weight_bytes(load_model_config(experts[name]), "float32")["experts"]
    if name == "blocks":
        stored = load_file(experts[name] / "model.safetensors")
        layer: Any = load_fp8(experts[name], 1, 2).get_submodule("model.layers.0.mlp.experts")
        path = "model.layers.0.mlp.experts.3.down_proj.weight"
        assert torch.equal(layer.down_proj[3].float(), stored[path][:, 128:].float())
        assert torch.equal(layer.down_scale[3], stored[f"{path}_scale_inv"][:, 1:])
        up = "model.layers.0.mlp.experts.2.up_proj.weight"
        assert torch.equal(layer.gate_up_proj[2, 128:].float(), stored[up][128:].float())
        assert torch.equal(layer.gate_up_scale[2, 1:], stored[f"{up}_scale_inv"][1:])
    (found,) = ModelDriver(experts[name], quantization="fp8").step((RequestState(), IDS))
    exact = reference_logits(experts["decoded" if name == "blocks" else "plain"], IDS)
    assert 0 < (found - exact).abs().mean() < 0.2 * exact.std()


def test_routers_and_what_decays_are_made_of_stay_plain(experts: dict[str, Path], tmp_path: Path) -> None:
    hybrid = write_tiny_model(tmp_path / "hybrid", "Qwen3Next", **SHAPES["qwen 3-next"][1])
    found = {}
    for name, path in (("experts", experts["plain"]), ("hybrid", hybrid)):
        tensors = model_tensors(load_model_config(path).with_quantization("fp8"), "bfloat16")
        found[name] = {tensor.name.split(".")[-2] for tensor in tensors if tensor.scaling is not None}
    assert found["experts"] == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert found["hybrid"] == {*found["experts"], "out_proj"}


def with_list(path: Path, target: Path, names: list[str], **model: Any) -> ModelConfig:
    """The model of a checkpoint whose config.json lists these layers."""
    target.mkdir()
    config = json.loads((path / "config.json").read_text())
    quantization = {**config["quantization_config"], "modules_to_not_convert": names}
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization, **model}))
    return load_model_config(target).with_quantization("fp8")


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["model.layers.0.mlp.gate_proj"], {"0.mlp.gate_proj", "0.mlp.up_proj"}),
        (["model.layers.0.mlp"], {"0.mlp.gate_proj", "0.mlp.up_proj", "0.mlp.down_proj"}),
        (["down_proj"], {"0.mlp.down_proj", "1.mlp.down_proj"}),
        (["re:.*layers\\.1\\..*o_proj$"], {"1.self_attn.o_proj"}),
        (["model.layers.*.self_attn.o_proj"], {"0.self_attn.o_proj", "1.self_attn.o_proj"}),
        (["qkv_proj"], {f"{layer}.self_attn.{name}_proj" for layer in "01" for name in "qkv"}),
        (["lm_head", "model.norm", "layers.0.mlp.down", "model.layers.10"], set()),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_listed_layers_stay_plain(names: list[str], plain: set[str], blocks: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = model_tensors(with_list(blocks[0], tmp_path / "model", names), "bfloat16")
    found = {
        tensor.name.removeprefix("model.layers.").removesuffix(".weight")
        for tensor in tensors
        if "_proj" in tensor.name and tensor.scaling is None
    }
    assert found == plain


@pytest.mark.parametrize("pattern", ["re:(.*)*x", "re:.*.*.*.*.*.*x", "re:(", "re:" + "a" * 2000], ids=lambda p: p[:20])
def test_patterns_that_cannot_be_used_are_refused(pattern: str, blocks: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"leaves out layers by the pattern .*quantization: none"):
        with_list(blocks[0], tmp_path / "model", [pattern])


CUTS = [
    pytest.param({}, 4, ["128", "64 of q_proj", "quantization: none"], id="heads"),
    pytest.param({"intermediate_size": 384}, 2, ["192 of gate_proj", "blocks of 128 × 128"], id="MLP"),
]


@pytest.mark.parametrize(("values", "size", "parts"), CUTS)
def test_blocks_that_would_be_cut_are_refused(
    values: dict[str, int], size: int, parts: list[str], blocks: tuple[Path, Path], tmp_path: Path
) -> None:
    model = with_list(blocks[0], tmp_path / "model", [], **values)
    with pytest.raises(ConfigError) as caught:
        model.check_tensor_parallel(size)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert dataclasses.replace(model, quantization="none").divides_by(size)


@pytest.mark.parametrize("name", ["rows", "blocks"])
def test_rows_are_as_wide_as_the_units_read(name: str, original: Path, blocks: tuple[Path, Path]) -> None:
    """The last block of a row may be incomplete, but what is read of it may not."""
    model = load_model_config(original if name == "rows" else blocks[0]).with_quantization("fp8")
    with pytest.raises(ConfigError, match="200 of the hidden size are not multiples of 16 in FP8"):
        dataclasses.replace(model, hidden_size=200).check_tensor_parallel(1)
    dataclasses.replace(model, hidden_size=208).check_tensor_parallel(1)


def test_every_layer_is_told_how_products_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "model")
    config, asked = load_model_config(path).with_quantization("fp8"), []

    def multiply(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool, **scales: Tensor) -> Tensor:
        asked.append(use_fast_accum)
        return a.float() @ b.float()

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    for accumulation in get_args(FP8Accumulation):
        model = build_model(config, TensorParallelGroup.single(), torch.float32, fp8_accumulation=accumulation)
        methods = [layer.method for layer in model.modules() if isinstance(layer, ShardedLinear)]
        kept = [method for method in methods if isinstance(method, Fp8LinearMethod)]
        assert len(kept) == 4 * config.num_layers
        assert {method.accumulation for method in kept} == {accumulation}
        x = fp8.quantise(torch.ones(2, 16), "channel")
        fp8._scaled_product(x, torch.ones(16, 16).to(FP8), torch.ones(16), None, accumulation)
    assert asked == [False, True]
