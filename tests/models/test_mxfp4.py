"""gpt-oss's layout: experts in MXFP4 are loaded as the numbers that transformers makes of them, cut over ranks
and in stages too, and what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_weights import load_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from adapters import STACKS, low_rank_of_stacks, write_adapter
from batches import RequestState
from checkpoints import edit_json, reference_logits, write_tiny_model
from expert_shapes import GPT_OSS
from model_driver import ModelDriver
from mxfp4 import BLOCKS_FILE, SCALES_FILE, quantise
from nvcli.errors import ConfigError, LoadError
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.mxfp4 import dequantise
from nvcli.kernels.w4 import dequantise as dequantise_words
from nvcli.kernels.weight_formats import W4Format
from nvcli.models.adapters.adapter import read_adapter
from nvcli.models.config import load_model_config
from nvcli.worker.distributed.stage import WHOLE, Stage

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in MXFP4. Ranks cut its rows of 96 in the middle of a block."""
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    return quantise(write_tiny_model(path, "GptOss", **{**GPT_OSS, "hidden_size": 64, "intermediate_size": 96}))


@pytest.fixture(scope="module")
def plain(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint as transformers saves it when it has read the MXFP4 weights."""
    path = tmp_path_factory.mktemp("plain")
    tensors, scales = load_file(published / BLOCKS_FILE), load_file(published / SCALES_FILE)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stack = name.removesuffix("_blocks")
        tensors[stack] = convert_moe_packed_tensors(tensors.pop(name), scales[f"{stack}_scales"])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return path


def load(path: Path, *where: Any, **options: Any) -> dict[str, Tensor]:
    """The parameters of a rank in bfloat16; the arguments are those of `load_model`."""
    return dict(load_model(path, *where, dtype=torch.bfloat16, **options).named_parameters())


@pytest.mark.parametrize(
    ("rank", "size", "stage"), [(0, 1, WHOLE), (0, 2, WHOLE), (1, 2, WHOLE), (0, 1, Stage(1, 2))], ids=str
)
def test_weights_are_those_that_transformers_reads(
    rank: int, size: int, stage: Stage, published: Path, plain: Path
) -> None:
    found, expected = load(published, rank, size, stage), load(plain, rank, size, stage)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_an_adapter_changes_the_numbers_that_transformers_reads(published: Path, plain: Path, tmp_path: Path) -> None:
    stacks = low_rank_of_stacks(plain)
    adapter = write_adapter(tmp_path, stacks, r=2, target_modules=None, target_parameters=STACKS)
    found, expected = load(published, 1, 2, lora=adapter), load(plain, 1, 2, lora=adapter)
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
    with pytest.raises(ConfigError, match="w4a16, and the adapter"):
        read_adapter(adapter, load_model_config(published)).check_kept(
            load_model_config(published).with_quantization("w4a16")
        )


@pytest.mark.parametrize(("spread", "rank", "size"), [(14, 0, 1), (15, 0, 1), (14, 1, 2)])
def test_experts_in_fp8_lose_nothing_unless_the_exponents_of_a_row_are_far_apart(
    spread: int, rank: int, size: int, published: Path, plain: Path, tmp_path: Path
) -> None:
    """A row has one scale, and e4m3 holds FP4's numbers times 2^-14 to 1; all but the experts stay plain."""
    path = Path(shutil.copytree(published, tmp_path / "model"))
    edit(SCALES_FILE, lambda tensors: tensors[f"{GATE_UP}_scales"][3, 0].copy_(torch.tensor([120, 120 - spread])))(path)
    codes = torch.tensor([0x17, 0x10] * 8, dtype=torch.uint8)  # 6, and 0.5 as the smallest
    edit(BLOCKS_FILE, lambda tensors: tensors[f"{GATE_UP}_blocks"][3, 0].copy_(codes))(path)
    found, expected = load(path, rank, size, quantization="fp8"), load(path, rank, size)
    rounded = 0
    for name, parameter in found.items():
        if parameter.dtype == FP8:
            values = parameter.float() * found[name.replace("_proj", "_scale")].unsqueeze(-1)
            rounded += int((values != expected[name].float()).any(-1).sum())
            assert ".experts." in name
        elif name in expected:
            assert torch.equal(parameter, expected[name]), name
    assert rounded == (spread > 14)


@pytest.mark.parametrize(("rank", "size", "options"), [(0, 1, {}), (1, 2, {"expert_parallel": True})])
def test_experts_in_4_bits_for_fp8_are_the_same_numbers(
    rank: int, size: int, options: dict[str, Any], published: Path, plain: Path
) -> None:
    found, expected = load(published, rank, size, quantization="w4a8", **options), load(plain, rank, size, **options)
    kept = [name for name, parameter in found.items() if parameter.dtype == torch.int16]
    assert len(kept) == 2 * 4  # both matrices of four layers
    for name in kept:
        scales, values = found[name.replace("_proj", "_scale")], expected[name]
        format = W4Format("mxfp4 for fp8", 32).for_rows(values.shape[1] // (2 if "gate" in name else 1))
        for expert, words in enumerate(found[name]):
            number = dequantise_words(words, scales[expert], values.shape[-1], format)
            assert torch.equal(number, values[expert].float()), name


def test_a_rank_reads_whole_experts(published: Path, plain: Path) -> None:
    found, expected = load(published, 1, 2, expert_parallel=True), load(plain)
    for name in (name for name in expected if ".experts." in name):
        assert torch.equal(found[name], expected[name][3:]), name


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_makes_the_same_weights(rank: int, published: Path, plain: Path) -> None:
    expected = load(plain, rank, 2)
    for path in (published, plain):
        found = load(path, rank, 2, device=torch.device("cuda"))
        for name, parameter in expected.items():
            assert torch.equal(found[name].cpu(), parameter), name


def test_gate_and_up_rows_take_turns(plain: Path) -> None:
    stored, found = load_file(plain / "model.safetensors")[GATE_UP], load(plain)[GATE_UP]
    assert torch.equal(found[3], torch.cat((stored[3, :, ::2].t(), stored[3, :, 1::2].t())))


def test_logits(published: Path, plain: Path) -> None:
    ids = list(range(2, 40))
    (found,) = ModelDriver(published).step((RequestState(), ids))
    torch.testing.assert_close(found, reference_logits(plain, ids), atol=2e-4, rtol=1e-4)


def test_published_files_are_of_bfloat16_though_they_do_not_say_so(published: Path) -> None:
    assert "dtype" not in json.loads((published / "config.json").read_text())
    assert load_model_config(published).dtype == "bfloat16"


def test_every_byte_and_scale() -> None:
    """All pairs of numbers, and the scales that transformers knows up to the largest; below them the smallest, and the
    one that stands for NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(239, 255, dtype=torch.uint8)
    found = dequantise(blocks.unsqueeze(0), scales.unsqueeze(0))
    expected = convert_moe_packed_tensors(blocks.view(1, 1, 16, 16), scales.view(1, 1, 16))
    assert torch.equal(found.view(1, 512, 1), expected)
    smallest = dequantise(blocks.unsqueeze(0), torch.zeros(1, 16, dtype=torch.uint8))
    assert smallest[0, 2] == 0.5 * 2.0**-127
    assert dequantise(blocks, torch.full((16,), 255, dtype=torch.uint8)).isnan().all()


def edit(file: str, change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        tensors = load_file(path / file)
        change(tensors)
        save_file(tensors, path / file, metadata={"format": "pt"})
        index = json.loads((path / "model.safetensors.index.json").read_text())
        weight_map = {name: held for name, held in index["weight_map"].items() if held != file}
        index["weight_map"] = {**weight_map, **dict.fromkeys(tensors, file)}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return rewrite


def configure(**values: Any) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "config.json", **values)


def halve_a_block(path: Path) -> None:
    configure(intermediate_size=80)(path)
    biases = {f"model.layers.{layer}.mlp.experts.gate_up_proj_bias": torch.ones(6, 160) for layer in range(4)}
    edit(BLOCKS_FILE, lambda tensors: tensors.update(biases))(path)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            edit(SCALES_FILE, lambda tensors: tensors.pop(f"{GATE_UP}_scales")),
            [BLOCKS_FILE, f"{GATE_UP}_blocks has no scales"],
        ),
        (
            edit(BLOCKS_FILE, lambda tensors: tensors.pop(f"{GATE_UP}_blocks")),
            ["missing from the checkpoint", "layers.0.mlp.experts.0.gate_proj.weight"],
        ),
        (
            edit(SCALES_FILE, lambda tensors: tensors.update({f"{GATE_UP}_scales": torch.ones(6, 192, 3).byte()})),
            [SCALES_FILE, f"{GATE_UP}_scales", "[6, 192, 3]", "[6, 192, 2]"],
        ),
        (
            edit(BLOCKS_FILE, lambda tensors: tensors.update({f"{GATE_UP}_blocks": torch.ones(6, 192, 2, 16)})),
            [BLOCKS_FILE, f"{GATE_UP}_blocks", "F32", "U8"],
        ),
        (
            edit(BLOCKS_FILE, lambda tensors: tensors.update({f"{GATE_UP}_bias": torch.ones(6, 190)})),
            [BLOCKS_FILE, f"{GATE_UP}_bias", "[190]", "192 rows"],
        ),
        (
            edit(BLOCKS_FILE, lambda tensors: tensors.update({GATE_UP: torch.ones(6, 64, 192)})),
            ["appears twice", f"{GATE_UP}_blocks"],
        ),
        (configure(num_local_experts=5), ["experts.down_proj_bias", "[6, 64]", "5 experts"]),
        (halve_a_block, [f"{GATE_UP}_blocks", "[192, 64]", "160 rows"]),
        (
            configure(quantization_config={"quant_method": "fp8"}),
            ["`quantization_config`", '"fp8"', "not supported", "or one quantised with mxfp4"],
        ),
        (configure(architectures=["Qwen3ForCausalLM"]), ["`quantization_config`", '"mxfp4"', "not supported"]),
        (configure(swiglu_limit=0), ["`swiglu_limit`", "above zero"]),
        (configure(hidden_act="gelu_new"), ["`hidden_act`", "only silu"]),
    ],
    ids=[
        "no scales",
        "no blocks",
        "scales of another shape",
        "blocks of another type",
        "bias",
        "twice",
        "fewer experts",
        "other sizes",
        "another quantisation",
        "another family",
        "no limit",
        "activation",
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Path], None], parts: list[str], published: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(published, tmp_path / "model"))
    change(path)
    with pytest.raises(LoadError) as caught:
        load(path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
