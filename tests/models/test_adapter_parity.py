"""LoRA adapters give the logits of PEFT, for every key of adapter_config.json that changes them: merged into the
weights, and those of single rows side by side."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import ATTENTION, LINEAR
from batches import RequestState
from checkpoints import edit_weights, reference_model, write_tiny_model
from family_shapes import SHAPES
from model_driver import ModelDriver
from nvcli.engine.request import Pooling
from one_rank import make_runner, run_to_outputs
from requests_factory import make_request

peft = pytest.importorskip("peft")

IDS = random.Random(0).choices(range(97), k=20)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TIED = {"tie_word_embeddings": True}

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Gives the checkpoint of a shape or family, which is written when it is first asked for."""
    folder = tmp_path_factory.mktemp("bases")

    @cache
    def write(name: str) -> Path:
        family, overrides = SHAPES.get(name, (name.partition(",")[0], TIED if "tied" in name else {}))
        return write_tiny_model(folder / name, family, **overrides)

    return write


def train(base: Path, folder: Path, *, save_embedding_layers: bool | str = "auto", **keys: Any) -> Tensor:
    """Write a random adapter of PEFT for a checkpoint, and return its logits of `IDS`."""
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # PEFT warns of what it makes of some keys
        model = peft.get_peft_model(reference_model(base), peft.LoraConfig(**keys))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.3 * noise.abs())
                elif "lora_" in name and parameter.dim() == 2:
                    parameter.copy_(0.25 * noise)
                else:
                    parameter.add_(0.3 * noise)
        model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
        logits: Tensor = model.eval()(input_ids=torch.tensor([IDS])).logits[0]
    return logits


def logits_of(base: Path, adapter: Path | None) -> Tensor:
    return ModelDriver(base, lora=adapter).step((RequestState(), IDS))[0]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "names": ("gemma 3", {"target_modules": list(LINEAR), "lora_alpha": 6, "fan_in_fan_out": True}),
    "all-linear": ("Qwen3", {"target_modules": "all-linear"}),
    "regex": (
        "Llama",
        {
            "target_modules": r"model\.layers\.\d+\.(self_attn\.(q|k)_proj|mlp\.up_proj)",
            "exclude_modules": r".*\.1\.mlp.*",
        },
    ),
    "patterns": (
        "Llama",
        {
            "target_modules": list(LINEAR),
            "exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"],
            "use_rslora": True,
            "rank_pattern": {"k_proj": 2, r"layers.1.*v_proj": 7},
            "alpha_pattern": {"down_proj": 3, "model.layers.0.self_attn.v_proj": 9},
        },
    ),
    "layers": ("Llama", {"target_modules": list(LINEAR), "layers_to_transform": [1], "layers_pattern": "layers"}),
    "layers, head": (
        "Llama",
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0], "layers_pattern": "layers"},
    ),
    "DoRA": ("Qwen3", {"target_modules": list(LINEAR), "use_dora": True, "rank_pattern": {"k_proj": 2}}),
    "DoRA, fused": ("phi 3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "use_dora": True}),
    "DoRA, fused by head": ("pythia", {"target_modules": ["query_key_value", "dense"], "use_dora": True}),
    "stored as [in, out]": (
        "gpt 2",
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "modules_to_save": ["c_fc", "wpe"]},
    ),
    "fused under other names": ("granite 4", {"target_modules": ["q_proj", "input_linear", "output_linear"]}),
    "biases": ("Qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "biases of products": ("Qwen2", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True, "bias": "lora_only"}),
    "modules": (
        "Llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm", "mlp"]},
    ),
    "modules that are saved twice": (
        "Llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"], "save_embedding_layers": True},
    ),
    "embeddings": ("Llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "a head with a bias": ("phi 2", {"target_modules": ["fc1", "lm_head"], "bias": "all", "lora_bias": True}),
    "tied, embeddings": ("Llama, tied", {"target_modules": ["embed_tokens"]}),
    "tied, head": ("Llama, tied", {"target_modules": ["q_proj", "lm_head"]}),
    "tied, module": ("Llama, tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "tied, both": ("Llama, tied", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "tied, tokens": ("Llama, tied", {"target_modules": ["q_proj"], "trainable_token_indices": [3, IDS[0], IDS[5]]}),
    "tokens": (
        "Llama",
        {"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [IDS[0]], "lm_head": [9]}},
    ),
    "with vision": ("gemma 3 with vision", {"target_modules": list(LINEAR)}),
    "delta nets": ("qwen 3-next", {"target_modules": "all-linear"}),
    # transformers leaves `dt_proj` as it is.
    "mamba 1": ("jamba", {"target_modules": ["in_proj", "x_proj", "out_proj"]}),
    "mamba": ("bamba", {"target_modules": "all-linear"}),
    "lightning attention": ("minimax text 01", {"target_modules": "all-linear"}),
    "experts": (
        "qwen3 moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": [*EXPERTS, "mlp.gate.weight"],
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"experts.gate_up_proj": 5},
        },
    ),
    "interleaved experts": ("gpt-oss", {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
    "experts beside identities": ("longcat-flash", {"target_modules": ["down_proj"], "target_parameters": EXPERTS}),
    "experts, one projection": ("gpt-oss", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    base, keys = checkpoint_of(CASES[name][0]), CASES[name][1]
    expected = train(base, tmp_path, r=4, **keys)
    found = logits_of(base, tmp_path)
    torch.testing.assert_close(found, expected, atol=3e-3 if name == "delta nets" else 2e-4, rtol=1e-4)
    assert (found - logits_of(base, None)).abs().max() > 0.3, "an adapter that changes little is tested by nothing"


def test_an_adapter_brings_the_head_of_a_reward_model(tmp_path: Path) -> None:
    """As TRL trains it: the files of the base generate, and have no such head."""
    base, adapter = write_tiny_model(tmp_path / "base", "Llama", id2label={0: "reward"}), tmp_path / "adapter"
    expected = train(base, adapter, r=4, task_type="SEQ_CLS", target_modules=["q_proj"])
    edit_weights(base, lambda weights: weights.pop("score.weight"))
    runner = make_runner(base, "cpu", lora_path=adapter, embedding_size=1)
    done = run_to_outputs(runner, [make_request(0, IDS, 1, read=Pooling(position="last"))])
    found = torch.frombuffer(bytearray(done[0].query_results[0].hidden_sum), dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


TOGETHER: dict[str, dict[str, Any]] = {
    "one": {
        "target_modules": list(ATTENTION),
        "exclude_modules": ["layers.0.self_attn.o_proj"],
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 9},
        "trainable_token_indices": [1, IDS[0]],
        "modules_to_save": ["norm"],
        "bias": "all",
    },
    "other": {
        "target_modules": r".*self_attn\.q_proj|.*lm_head|.*embed_tokens",
        "target_parameters": EXPERTS,
        "rank_pattern": {"down_proj": 2},
        "bias": "lora_only",
    },
}
"""The keys of merged adapters, as many together as PEFT takes."""


@pytest.mark.parametrize("keys", TOGETHER)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "gemma 3", "qwen3 moe", "gpt-oss"])
def test_logits_with_many_keys_at_a_time(name: str, keys: str, checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint_of(name)
    expected = train(base, tmp_path, r=4, **TOGETHER[keys])
    torch.testing.assert_close(logits_of(base, tmp_path), expected, atol=2e-4, rtol=1e-4)


OF_ROWS: list[dict[str, Any]] = [
    {"target_modules": ["all"], "lora_alpha": 6},
    {"target_modules": ["q_proj", "v_proj"], "r": 20},
    {"target_modules": ["all"], "use_rslora": True, "rank_pattern": {"k_proj": 2, r"layers.1.*v_proj": 7}},
    {"target_modules": ["o_proj", "q_proj"], "alpha_pattern": {"layers.0.self_attn.q_proj": 9, "o_proj": 3}},
    {"target_modules": ["all"], "layers_to_transform": [1], "layers_pattern": "layers", "fan_in_fan_out": True},
    {"target_modules": r".*\.\d+\.self_attn\.(k|o)_proj", "exclude_modules": r".*\.1\.self_attn\.o.*"},
    {"target_modules": ["all"], "exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"], "r": 1},
    {"target_modules": ["v_proj", "o_proj"], "r": 33},
]
"""What adapters of single rows may say: ranks of several pages, projections that a layer fuses with unchanged ones.
`all` stands for the linear layers that they can change."""


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "gemma 3", "qwen3 moe", "gpt-oss"])
def test_logits_of_rows_with_adapters_of_their_own(name: str, checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    """Eight adapters and none in one step."""
    base = checkpoint_of(name)
    folders = [tmp_path / str(number) for number in range(len(OF_ROWS))]
    linear = list(LINEAR if name != "qwen3 moe" else ATTENTION)  # PEFT takes gate_proj for experts
    expected = []
    for folder, keys in zip(folders, OF_ROWS, strict=True):
        targets = linear if keys["target_modules"] == ["all"] else keys["target_modules"]
        expected.append(train(base, folder, **{"r": 4, **keys, "target_modules": targets}))
    with torch.no_grad():
        expected.insert(4, reference_model(base)(input_ids=torch.tensor([IDS])).logits[0])
    adapters = [1, 2, 3, 4, 0, 5, 6, 7, 8]
    driver = ModelDriver(base, row_loras=folders)
    found = driver.step(*((RequestState(), IDS) for _ in adapters), adapters=adapters)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
        assert number == 4 or (mine - found[4]).abs().max() > 0.1


def test_rows_with_an_adapter_of_heads_that_files_fuse(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint_of("pythia")
    expected = train(base, tmp_path, r=4, target_modules=["query_key_value", "dense_h_to_4h"])
    (found,) = ModelDriver(base, row_loras=[tmp_path]).step((RequestState(), IDS), adapters=[1])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_experts_by_themselves_are_those_of_stacks(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    """Adapters that transformers 4 trained name each expert's layers, which PEFT converts when it loads them."""
    from safetensors.torch import load_file, save_file

    base, folder = checkpoint_of("qwen3 moe"), tmp_path / "adapter"
    train(base, folder, r=4, target_modules=["q_proj"])
    tensors, generator = load_file(folder / "adapter_model.safetensors"), torch.Generator().manual_seed(2)
    for layer in range(2):
        for expert in range(8):
            for name, rows, columns in (("gate_proj", 32, 32), ("up_proj", 32, 32), ("down_proj", 32, 32)):
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.3
                tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(reference_model(base), folder).eval()
        expected = model(input_ids=torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(base, folder), expected, atol=2e-4, rtol=1e-4)
