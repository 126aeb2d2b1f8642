"""LoRA adapters without PEFT: what ranks and quantised weights make of them, and what is refused by its key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rank_weights import load_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters import ATTENTION, LINEAR, PREFIX, STACKS, low_rank, low_rank_of_stacks, merge, write_adapter
from checkpoints import write_tiny_model
from expert_shapes import EXPERT_SHAPES
from family_shapes import SHAPES
from hostile_checkpoints import OF_ADAPTERS, mutate
from nvcli.errors import ConfigError, LoadError
from nvcli.kernels.fp8_types import numbers
from nvcli.models.adapters.adapter import read_adapter
from nvcli.models.adapters.find import find_adapter
from nvcli.models.config import load_model_config
from nvcli.models.stored_tensors import with_stored_tensors
from nvcli.worker.distributed.stage import Stage
from quantised_checkpoints import FORMATS, fp8_blocks, packed, write_quantised

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base") / "llama", "Llama")


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    others = dict(expected.named_parameters())
    assert others
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter, others.pop(name), atol=2e-6, rtol=2e-6, msg=lambda text, n=name: n + text)
    assert not others


@pytest.mark.parametrize(("rank", "stage"), [(0, Stage(0, 1)), (1, Stage(0, 1)), (1, Stage(1, 2))])
def test_each_rank_has_its_part(base: Path, tmp_path: Path, rank: int, stage: Stage) -> None:
    tensors = low_rank(base, (*LINEAR, "lm_head"))
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=None)
    merged = merge(base, tensors, tmp_path / "merged")
    assert_same(load_model(base, rank, 2, stage, lora=adapter), load_model(merged, rank, 2, stage))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_each_rank_has_its_part_of_experts(tmp_path: Path, expert_parallel: bool) -> None:
    family, shape = EXPERT_SHAPES["qwen3 moe"]
    base = write_tiny_model(tmp_path / "base", family, **shape)
    tensors = low_rank(base, LINEAR)
    assert any(".experts.7.down_proj." in name for name in tensors)
    adapter, merged = write_adapter(tmp_path / "adapter", tensors), merge(base, tensors, tmp_path / "merged")
    found, expected = (
        load_model(path, 1, 2, expert_parallel=expert_parallel, lora=lora)
        for path, lora in ((base, adapter), (merged, None))
    )
    assert_same(found, expected)


def test_rows_of_interleaved_stacks(tmp_path: Path) -> None:
    """Both parameters of a stack: the first is the innermost of PEFT's wrappers."""
    family, shape = EXPERT_SHAPES["gpt-oss"]
    base = write_tiny_model(tmp_path / "base", family, **shape)
    stacks, weights = low_rank_of_stacks(base), load_file(base / "model.safetensors")
    for name, stack in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [experts, in, out]
            wrapper = PREFIX + name.replace("gate_up_proj", "base_layer").removesuffix(".down_proj")
            down, up = stacks[f"{wrapper}.lora_A.weight"], stacks[f"{wrapper}.lora_B.weight"]
            downs, ups = down.view(len(stack), 2, -1), up.view(len(up), 2, -1)
            weights[name] = stack + 4.0 * torch.einsum("ore,eri->eio", ups, downs)
    adapter = write_adapter(tmp_path / "adapter", stacks, r=2, target_modules=None, target_parameters=STACKS)
    merged = merge(base, {}, tmp_path / "merged")
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    assert_same(load_model(base, 1, 2, lora=adapter), load_model(merged, 1, 2))


def test_products_with_magnitudes_see_whole_rows(base: Path, tmp_path: Path) -> None:
    """A rank with some columns of a row scales them as the whole row is."""
    tensors, weights = low_rank(base, ("o_proj", "down_proj")), load_file(base / "model.safetensors")
    for name in [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name]:
        product = tensors[f"{PREFIX}{name}.lora_B.weight"] @ tensors[f"{PREFIX}{name}.lora_A.weight"]
        changed = weights[f"{name}.weight"] + 2.0 * product
        lengths = torch.linspace(0.5, 2.0, len(changed))
        tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = lengths
        weights[f"{name}.weight"] = changed * (lengths / changed.norm(dim=1)).unsqueeze(1)
    adapter = write_adapter(tmp_path / "adapter", tensors, use_dora=True)
    merged = merge(base, {}, tmp_path / "merged")
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    assert_same(load_model(base, 1, 2, lora=adapter), load_model(merged, 1, 2))


def test_rounding_happens_once(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", "Llama", dtype="bfloat16")
    tensors = low_rank(base, ATTENTION, size=0.02)
    found = load_model(base, lora=write_adapter(tmp_path / "adapter", tensors), dtype=torch.bfloat16)
    weight = load_file(base / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    name = f"{PREFIX}model.layers.0.self_attn.o_proj"
    product = 2.0 * (tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double())
    exact = weight.double() + product
    kept = next(one for name, one in found.named_parameters() if name.endswith("layers.0.mixer.o_proj.weight"))
    assert kept.dtype == torch.bfloat16
    error = (kept.double() - exact).abs() / exact.abs().clamp(min=1e-6)
    assert float(error.max()) <= 2**-8 * 1.01, "half a unit in the last place"


Kept = Literal["none", "fp8"]


@pytest.mark.parametrize(("name", "kept"), [("plain", "fp8"), ("fp8", "none"), ("fp8", "fp8"), ("gptq", "none")])
def test_changes_are_made_before_weights_are_quantised(tmp_path: Path, name: str, kept: Kept) -> None:
    """What a quantised checkpoint has is dequantised, changed, and quantised again where ranks keep it so."""
    base = values = write_tiny_model(tmp_path / "base", "Llama", head_dim=32, **SIZES)
    tensors = low_rank(base, ("q_proj", "down_proj"))
    if name != "plain":
        form = fp8_blocks((128, 128)) if name == "fp8" else FORMATS["gptq, act-order"]
        base, values = write_quantised(base, tmp_path / "quantised", form)
    adapter, merged = write_adapter(tmp_path / "adapter", tensors), merge(values, tensors, tmp_path / "merged")
    found = dict(load_model(base, lora=adapter, quantization=kept).named_parameters())
    plain = dict(load_model(merged).named_parameters())
    number = 0
    for parameter in (one for one in plain if one.endswith(("qkv_proj.weight", "down_proj.weight"))):
        value = _values(found, parameter)
        step = 0.07 * plain[parameter].abs().amax() if kept == "fp8" else 1e-5
        assert (value - plain[parameter]).abs().max() < step
        number += 1
    assert number == 4


def _values(parameters: dict[str, Tensor], name: str) -> Tensor:
    """The values of a weight, which may be in FP8."""
    weight, scales = parameters[name], parameters.get(f"{name}_scale")
    if scales is None:
        return weight
    if scales.dim() == 2:
        scales = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
        return numbers(weight) * scales
    return numbers(weight) * scales.unsqueeze(1)


def test_four_bits_of_changed_weights_cannot_be_kept(tmp_path: Path) -> None:
    original = write_tiny_model(tmp_path / "base", "Llama", head_dim=32, **SIZES)
    base, values = write_quantised(original, tmp_path / "quantised", packed(32), has_head=True)
    model = with_stored_tensors(load_model_config(base), base).with_quantization("w4a16")
    assert model.keeps_head
    changed = read_adapter(write_adapter(tmp_path / "a", low_rank(original, ("q_proj",))), model)
    with pytest.raises(ConfigError, match=r"w4a16, and the adapter \(`lora`\) changes .*q_proj.weight"):
        changed.check_kept(model)
    of_head = low_rank(original, ("lm_head",))
    path = write_adapter(tmp_path / "b", of_head, target_modules=None)
    read_adapter(path, model).check_kept(model)
    found = dict(load_model(base, lora=path, quantization="w4a16").named_parameters())["lm_head.weight"]
    merged = load_file(merge(values, of_head, tmp_path / "merged") / "model.safetensors")
    torch.testing.assert_close(found, merged["lm_head.weight"])


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "LOHA"}, '`peft_type`: "LOHA" is not supported'),
    "rank": ({"r": 8}, "has rank 4, and `r` or `rank_pattern` in adapter_config.json says 8"),
    "no rank": ({"r": None}, "`r`: null where a value belongs"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 3}}, "says 3"),
    "rank zero": ({"rank_pattern": {"q_proj": 0}}, '`rank_pattern."q_proj"`: 0 is not a rank'),
    "alpha": ({"lora_alpha": "x"}, '`lora_alpha`: "x" is not a number'),
    "not chosen": ({"target_modules": ["k_proj"]}, '`target_modules`: leaves out "model.layers.0.self_attn.q_proj"'),
    "excluded": ({"exclude_modules": ["q_proj"]}, "`exclude_modules`: leaves out"),
    "layer": ({"layers_to_transform": [1]}, "`layers_to_transform`: leaves out"),
    "pattern": ({"target_modules": "(a+)+b"}, "`target_modules`: the pattern .* could take very long"),
    "broken pattern": ({"alpha_pattern": {"[": 1}}, "`alpha_pattern`: the pattern"),
    "DoRA": ({"use_dora": True}, "`use_dora`: true, and adapter_model.safetensors lacks magnitudes"),
    "bias": ({"lora_bias": True}, "`lora_bias`: .* lacks the bias"),
    "begin": ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights`: .* changes the base model's weights too"),
    "activated": ({"alora_invocation_tokens": [5]}, "`alora_invocation_tokens`: it is active from some token on"),
    "copied layers": ({"layer_replication": [[0, 1]]}, "`layer_replication`: models with repeated layers"),
    "variant": ({"use_qalora": True}, "`use_qalora`: true is not supported"),
    "later variant": ({"monteclora_config": {"x": 1}}, "`monteclora_config`: "),
    "module": ({"modules_to_save": ["lm_head"]}, '`modules_to_save`: "lm_head" is not in adapter_model.safetensors'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_its_key(base: Path, tmp_path: Path, name: str) -> None:
    keys, message = REFUSED[name]
    folder = write_adapter(tmp_path, low_rank(base, ("q_proj",)), **keys)
    with pytest.raises(LoadError, match=message):
        read_adapter(folder, load_model_config(base))


def test_refused_by_a_tensor(base: Path, tmp_path: Path) -> None:
    model, plain = load_model_config(base), low_rank(base, ("q_proj",))
    down, up = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    other_base = r"was made for someone/base \(base_model_name_or_path\)"
    head = {f"{PREFIX}lm_head.weight": torch.zeros(120, 32)}
    rows = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(2, 32)}
    cases: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
        (plain | {down: torch.zeros(4, 40)}, {}, rf"{down}\" has shape \[4, 40\], which does not fit .*{other_base}"),
        (plain | {up: torch.zeros(40, 4)}, {}, rf"{up}\" has shape \[40, 4\]"),
        (plain | {up: torch.zeros(64)}, {}, "where 2 dimensions belong"),
        ({down: plain[down]}, {}, "has no partner"),
        (plain | {f"{Q}.lora_B.bias": torch.zeros(64)}, {}, "`lora_bias`: false, and .* has a bias of"),
        (plain | {up: torch.zeros(64, 4, dtype=torch.int8)}, {}, "is stored as I8; supported: F64"),
        (
            {n.replace("layers.0", "layers.7"): t for n, t in plain.items()},
            {},
            f"matches nothing in this model.*{other_base}",
        ),
        (head, {}, r"lm_head.weight.* has 120 tokens, and the model 97: training resized the vocabulary"),
        (rows, {"trainable_token_indices": [1, 97]}, "`trainable_token_indices`: 97 is not a token of this model"),
        (rows, {}, "`trainable_token_indices`: names no tokens"),
        (
            plain,
            {"trainable_token_indices": [1, 2]},
            "`trainable_token_indices`: no rows of its tokens are in adapter_m",
        ),
        (rows, {"trainable_token_indices": [1, 1]}, "has a token twice"),
        ({}, {}, "has no tensors"),
    ]
    for number, (tensors, keys, message) in enumerate(cases):
        keys = {"base_model_name_or_path": "someone/base", **keys}
        with pytest.raises(LoadError, match=message):
            read_adapter(write_adapter(tmp_path / str(number), tensors, **keys), model)


@pytest.mark.parametrize(
    ("pattern", "is_chosen"),
    [
        (  # Unsloth's
            r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj).*?)|"
            r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:q_proj|k_proj)))",
            True,
        ),
        (r"^(?!.*(?:vision|visual)).*\.(self_attn|mlp)\.(q|k|v)_proj$", True),
        (r"^(model\.visual)(?!.*(lm_head)).*", False),
    ],
)
def test_patterns_that_trainers_write(base: Path, tmp_path: Path, pattern: str, is_chosen: bool) -> None:
    folder = write_adapter(tmp_path, low_rank(base, ("q_proj",)), target_modules=pattern)
    if is_chosen:
        assert len(read_adapter(folder, load_model_config(base)).changes) == 2
    else:
        with pytest.raises(LoadError, match="`target_modules`: leaves out"):
            read_adapter(folder, load_model_config(base))


def test_names_of_other_classes_of_a_model(base: Path, tmp_path: Path) -> None:
    """Those of a model without a head, of the text part alone, and of the whole in older and newer releases."""
    family, shape = SHAPES["gemma 3 with vision"]
    vision = write_tiny_model(tmp_path / "vision", family, **shape)
    plain = {
        name: torch.zeros(4, 32) if "lora_A" in name else torch.zeros(64, 4) for name in low_rank(base, ("q_proj",))
    }
    expected = {f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1)}
    cases = [(base, "model.layers", "layers"), (vision, "model.layers", "layers"), (vision, "", "")]
    cases += [
        (vision, "model.layers", f"{prefix}.layers") for prefix in ("language_model.model", "model.language_model")
    ]
    for number, (path, old, new) in enumerate(cases):
        tensors = {name.replace(old, new, 1): tensor for name, tensor in plain.items()}
        adapter = read_adapter(write_adapter(tmp_path / str(number), tensors), load_model_config(path))
        assert set(adapter.changes) == expected
        assert not adapter.left


def test_folders_that_hold_no_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"the folder has no adapter_config.json; a LoRA adapter is a folder"):
        find_adapter(str(base))
    with pytest.raises(LoadError, match="no such folder"):
        find_adapter("./nowhere")
    with pytest.raises(LoadError, match="a file; a LoRA adapter is a folder"):
        find_adapter(str(base / "config.json"))
    folder = write_adapter(tmp_path, low_rank(base))
    assert find_adapter(str(folder)) == folder
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(LoadError, match=r"no adapter_model.safetensors, but adapter_model.bin, which is pickled"):
        read_adapter(folder, load_model_config(base))


def test_a_header_that_safetensors_refuses_ends_before_weights_load(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, low_rank(base))
    file = folder / "adapter_model.safetensors"
    start, rest = file.read_bytes()[:8], file.read_bytes()[8:]
    length = int.from_bytes(start, "little")
    header, body = json.loads(rest[:length]), rest[length:]
    one, other = list(header)[:2]
    wide = {**header, one: {**header[one], "dtype": "F64"}}
    twice = {**header, one: {**header[one], "data_offsets": header[other]["data_offsets"]}}
    twice[one]["shape"] = header[other]["shape"]
    for changed, message in ((wide, r"tensor \".*\" has .* bytes, and its shape .* in F64 takes"), (twice, "corrupt")):
        text = json.dumps(changed).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + body)
        with pytest.raises(LoadError, match=message):
            read_adapter(folder, load_model_config(base))


def test_hostile_adapters_end_with_an_error_or_load(base: Path, tmp_path: Path) -> None:
    """Keys and headers that were changed at random; nothing but LoadError and ConfigError is raised."""
    rng, plain = random.Random(0), low_rank(base, ("q_proj", "o_proj"))
    ends = []
    for number in range(120):
        folder = write_adapter(tmp_path / str(number), plain)
        mutate(folder, rng, OF_ADAPTERS)
        try:
            load_model(base, lora=folder)
            ends.append("loads")
        except (LoadError, ConfigError):
            ends.append("refused")
    assert {"loads", "refused"} == set(ends)


def test_adapters_of_layers_that_run_several_times_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank(base, ATTENTION))
    values = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
    values |= {"n_input_layers": 1, "n_output_layers": 1, "vocab_size": 97, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["DoryForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"`lora` is .*\(DoryForCausalLM\) run several times"):
        read_adapter(adapter, load_model_config(tmp_path))
