"""Experts of a checkpoint: one by one or stacked, cut over ranks, and what is said of those that do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_weights import load_model, load_parameters
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import edit_json, edit_weights, write_tiny_model
from expert_shapes import GPT_OSS
from model_driver import CPU, load_weights
from model_facts import attention_of
from nvcli.errors import ConfigError, LoadError
from nvcli.models.config import load_model_config
from nvcli.models.geometry import model_tensors
from nvcli.models.loader import init_random_weights
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.registry import build_model
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

EXPERTS = "model.layers.{}.mlp.experts."
SHAPE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("moe"), "Qwen3Moe", **SHAPE)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A checkpoint that has each expert's tensors by themselves, to be changed."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def stack(tensors: dict[str, Tensor]) -> None:
    """Write the experts of each layer as transformers 5 keeps them."""
    for layer in range(2):
        path = EXPERTS.format(layer)
        gate, up, down = (
            torch.stack([tensors.pop(f"{path}{expert}.{name}_proj.weight") for expert in range(4)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{path}gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{path}down_proj"] = down


def test_an_expert_s_tensors_stand_in_its_place(checkpoint: Path) -> None:
    tensors, found = load_file(checkpoint / "model.safetensors"), load_parameters(checkpoint)
    path = EXPERTS.format(1)
    for expert in range(4):
        gate, up, down = (tensors[f"{path}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(found[f"{path}gate_up_proj"][expert], torch.cat((gate, up)))
        assert torch.equal(found[f"{path}down_proj"][expert], down)


@pytest.mark.parametrize("size", [1, 2])
def test_stacked_experts_are_the_same_experts(checkpoint: Path, original: Path, size: int) -> None:
    edit_weights(checkpoint, stack)
    for rank in range(size):
        found, expected = load_parameters(checkpoint, rank, size), load_parameters(original, rank, size)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_router_in_float32_beside_projections_of_its_shape(tmp_path: Path) -> None:
    """Both are read together, and are kept in types of their own."""
    sizes = {**SHAPE, "n_routed_experts": 48, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    path = write_tiny_model(tmp_path / "model", "Glm4Moe", num_hidden_layers=1, **sizes)
    file = (path / "model.safetensors").rename(path / "others.safetensors")
    tensors = load_file(file)
    names = ("model.layers.0.mlp.gate.weight", EXPERTS.format(0) + "47.up_proj.weight")
    assert len({tensors[name].shape for name in names}) == 1
    save_file({name: tensors.pop(name) for name in names}, path / "alike.safetensors")
    save_file(tensors, file)
    model = dict(load_model(path, dtype=torch.bfloat16).named_parameters())
    router, up = (load_file(path / "alike.safetensors")[name] for name in names)
    assert torch.equal(model[names[0]], router)
    assert torch.equal(model[EXPERTS.format(0) + "gate_up_proj"][47, 48:], up.bfloat16())


def test_a_rank_has_a_part_of_every_expert(original: Path) -> None:
    whole = load_parameters(original)
    path = EXPERTS.format(0)
    for rank in range(2):
        part, mine = load_parameters(original, rank, 2), slice(24 * rank, 24 * rank + 24)
        gate, up = whole[f"{path}gate_up_proj"].chunk(2, dim=1)
        assert torch.equal(part[f"{path}gate_up_proj"], torch.cat((gate[:, mine], up[:, mine]), dim=1))
        assert torch.equal(part[f"{path}down_proj"], whole[f"{path}down_proj"][:, :, mine])
    config = load_model_config(original)
    with pytest.raises(
        ConfigError, match=r"experts' intermediate size 48 does not divide by 4 into multiples of 8.*Possible: 1, 2"
    ):
        config.check_tensor_parallel(4)


def test_with_expert_parallelism_a_rank_has_whole_experts(original: Path, tmp_path: Path) -> None:
    # As many ranks as experts, of which the second reads its own alone: what others read may be broken.
    part, whole = load_parameters(original, 1, 4, expert_parallel=True), load_parameters(original)
    path = EXPERTS.format(0)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(part[f"{path}{name}"], whole[f"{path}{name}"][1:2])
    assert torch.equal(part["model.layers.0.mlp.gate.weight"], whole["model.layers.0.mlp.gate.weight"])
    with_biases = write_tiny_model(tmp_path / "gpt-oss", "GptOss", **GPT_OSS)
    part, whole = load_parameters(with_biases, 1, 2, expert_parallel=True), load_parameters(with_biases)
    names = [name for name in whole if ".experts." in name]
    assert len(names) == 4 * 4
    assert all(torch.equal(part[name], whole[name][3:]) for name in names)


def test_experts_that_cannot_be_dealt_out(original: Path, tmp_path: Path) -> None:
    config = load_model_config(original, expert_parallel=True)
    config.check_tensor_parallel(2)
    eight_heads = replace(attention_of(config), num_heads=8, num_kv_heads=8)
    layer = replace(config.layers[0], mixer=eight_heads)
    wide = replace(config, decoder=replace(config.decoder, layer_kinds=(layer,)))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size 8 .*: 4 experts do not divide by 8 \(enable_expert_parallel, --ep\)"
    ):
        wide.check_tensor_parallel(8)
    wide.check_tensor_parallel(4)
    with pytest.raises(
        ConfigError, match=r"48 does not divide by 4 into multiples of 8 \(--ep deals out whole experts"
    ):
        replace(wide, expert_parallel=False).check_tensor_parallel(4)
    with pytest.raises(ConfigError, match=r"`enable_expert_parallel` \(--ep\) .*Qwen3ForCausalLM\) has no experts"):
        load_model_config(write_tiny_model(tmp_path / "dense"), expert_parallel=True)


def drop_last(tensors: dict[str, Tensor]) -> None:
    stack(tensors)
    name = f"{EXPERTS.format(0)}gate_up_proj"
    tensors[name] = tensors[name][:3].clone()


def drop_rows(tensors: dict[str, Tensor]) -> None:
    stack(tensors)
    name = f"{EXPERTS.format(0)}gate_up_proj"
    tensors[name] = tensors[name][:, :80].clone()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS.format(1)}3.up_proj.weight"), ["missing", "layers.1.mlp.experts.3.up"]),
        (
            lambda tensors: tensors.update({f"{EXPERTS.format(0)}4.up_proj.weight": torch.ones(48, 32)}),
            ["unknown", "layers.0.mlp.experts.4.up_proj"],
        ),
        (drop_last, ["layers.0.mlp.experts.gate_up_proj", "[3, 96, 32]", "4 experts"]),
        (drop_rows, ["layers.0.mlp.experts.gate_up_proj", "[80, 32]", "96 rows"]),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(5, 32)}),
            ["layers.0.mlp.gate.weight", "[5, 32]", "[4, 32]"],
        ),
    ],
    ids=["missing", "one more", "stack of fewer", "stack of fewer rows", "router"],
)
def test_experts_that_do_not_fit(
    checkpoint: Path, change: Callable[[dict[str, Tensor]], object], parts: list[str]
) -> None:
    edit_weights(checkpoint, change)
    with pytest.raises(LoadError) as caught:
        load_parameters(checkpoint)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def edited(path: Path, **values: Any) -> Path:
    edit_json(path / "config.json", **values)
    return path


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"num_experts_per_tok": 5}, ["`num_experts_per_tok`", "5 is more", "4"]),
        ({"num_local_experts": 1 << 40}, ["`num_local_experts`", "too large", "1,024"]),
        ({"num_local_experts": None}, ["`num_experts`", "missing"]),
        ({"moe_intermediate_size": None}, ["`moe_intermediate_size`", "null"]),
        ({"mlp_only_layers": "all"}, ["`mlp_only_layers`", "not a list"]),
        ({"hidden_act": "relu"}, ["`hidden_act`", "relu"]),
    ],
)
def test_wrong_settings(checkpoint: Path, values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        load_model_config(edited(checkpoint, **values))
    assert all(part in str(caught.value) for part in ["config.json", *parts]), str(caught.value)


def test_older_files_spell_the_number_of_experts_otherwise(checkpoint: Path) -> None:
    config = load_model_config(edited(checkpoint, num_local_experts=None, num_experts=4))
    assert config == load_model_config(edited(checkpoint, num_local_experts=4, num_experts=None))


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"n_group": 3, "topk_group": 1}, "3 groups do not divide 8"),
        ({"n_group": 8, "topk_group": 4}, "8 groups have one expert each"),
        ({"n_group": 4, "topk_group": 5}, "5 groups of 4"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "1 groups of 4"),
    ],
)
def test_groups_that_do_not_fit(tmp_path: Path, values: dict[str, Any], part: str) -> None:
    path = write_tiny_model(
        tmp_path / "glm", "Glm4Moe", n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=8
    )
    with pytest.raises(LoadError, match=part):
        load_model_config(edited(path, **{"num_experts_per_tok": 2, **values}))


def test_layers_that_predict_further_ahead_stay_on_disk(tmp_path: Path) -> None:
    settings = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    path = write_tiny_model(tmp_path / "glm", "Glm4Moe", **settings, num_nextn_predict_layers=1)
    edit_weights(path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(2, 2)}))
    notes: list[str] = []
    model = build_model(load_model_config(path), TensorParallelGroup.single(), torch.float32)
    load_weights(model, path, CPU, say=notes.append)
    assert "model.layers.2" in notes[0]


def test_random_weights_route_to_all_experts(original: Path) -> None:
    config = load_model_config(original)
    model = build_model(config, TensorParallelGroup.single(), torch.float32)
    num_bytes = init_random_weights(model, CPU)
    assert num_bytes == sum(tensor.kept_bytes(1) for tensor in model_tensors(config, "float32"))
    mlp = model.get_submodule("model.layers.0.mlp")
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    assert set(mlp.gate(x).experts.flatten().tolist()) == {0, 1, 2, 3}
    assert isinstance(config.layers[0].mlp, ExpertsConfig)
