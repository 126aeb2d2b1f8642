"""Models over an FP8 KV cache: near the exact answer, however a prompt is computed, with scales of their own or those
of the checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batches import RequestState
from checkpoints import write_tiny_model, write_tiny_qwen3
from family_shapes import SHAPES
from model_driver import CPU, ModelDriver
from nvcli.errors import LoadError
from nvcli.kernels.fp8_kv import dequantise_heads
from nvcli.kernels.fp8_types import FP8
from nvcli.models.causal_lm import CausalLM
from nvcli.models.config import load_model_config
from nvcli.models.kv_groups import block_bytes
from nvcli.models.kv_scales import is_kv_scale
from nvcli.models.loader import find_weights, read_kv_scales, set_kv_scales

LENGTH = 60
PROMPT = random.Random(0).choices(range(97), k=LENGTH)


def logits(driver: ModelDriver, *lengths: int) -> Tensor:
    """The logits of the prompt, computed in steps of these lengths, and then token by token."""
    request, start, parts = RequestState(), 0, []
    for length in (*lengths, *[1] * (LENGTH - sum(lengths))):
        parts += driver.step((request, PROMPT[start : start + length]))
        start += length
    return torch.cat(parts)


def kl(exact: Tensor, found: Tensor) -> float:
    """The mean Kullback-Leibler divergence over the tokens."""
    log_p, log_q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize(
    "name", ["gemma 2", "gemma 4, inputs of each layer and shared keys", "qwen 3-next", "gpt-oss", "glm 4.7 flash"]
)
def test_families(name: str, tmp_path: Path) -> None:
    """Windows and soft caps, layers that share keys in blocks of two shapes, recurrent states, sinks, and latents."""
    family, overrides = SHAPES[name]
    path = write_tiny_model(tmp_path, family, **overrides)
    exact = logits(ModelDriver(path, max_positions=LENGTH), LENGTH)
    driver = ModelDriver(path, max_positions=LENGTH, kv_dtype=FP8)
    found = logits(driver, LENGTH)
    assert 0 < kl(exact, found) < 0.02
    # A token reads the same numbers in its own step and behind it. Where float32 sums differ in their last places, a
    # number may be rounded to its neighbour.
    in_steps = logits(driver, 7, 30, 11)
    assert kl(found, in_steps) < 0.1 * kl(exact, found)
    config = load_model_config(path)
    assert driver.kv_cache.spec.block_bytes == block_bytes(config, "float32", block_size=4, kv_dtype="fp8")


def with_scales(path: Path, scales: dict[str, float]) -> Path:
    """Write a tiny Qwen3 of two layers, and these scalars beside its weights."""
    write_tiny_qwen3(path)
    file = path / "model.safetensors"
    save_file(load_file(file) | {name: torch.tensor(value) for name, value in scales.items()}, file, {"format": "pt"})
    return path


def load_kv_scales(model: CausalLM, path: Path) -> str | None:
    return set_kv_scales(model, read_kv_scales(model, find_weights(model, path)), CPU)


LAYER = "model.layers.{}.self_attn."


@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",) * 2],
    ids=str,
)
def test_scales_of_the_checkpoint(names: tuple[str, str], tmp_path: Path) -> None:
    """They are found under the names of the field's tools, and stored with every token; one layer of two has them."""
    k, v = (0.02, 0.02) if names[0] == names[1] else (0.02, 0.03)
    path = with_scales(tmp_path, {LAYER.format(1) + names[1]: v, LAYER.format(1) + names[0]: k})
    driver = ModelDriver(path, max_positions=LENGTH, kv_dtype=FP8)
    note = load_kv_scales(driver.model, path)
    assert note is not None
    assert "in 1 of 2 layers" in note
    exact = logits(ModelDriver(path, max_positions=LENGTH), LENGTH)
    assert 0 < kl(exact, logits(driver, 20)) < 0.02
    for layer, scales in enumerate(driver.kv_cache.scales(number) for number in range(2)):
        assert scales is not None
        for kind, expected in zip(scales, (k, v), strict=True):
            used = kind[kind != 0].float().unique()
            assert (used.tolist() == torch.tensor([expected]).bfloat16().float().tolist()) == (layer == 1)
    held = driver.model.mixers[1].static_kv_scales
    assert held is not None
    set_kv_scales(driver.model, {1: [0.5, 0.25]}, CPU)
    assert held.tolist() == [0.5, 0.25]  # in place: graphs have its address


def test_both_kinds_of_scales_read_back_the_same_keys(tmp_path: Path) -> None:
    """A large enough scale of the checkpoint rounds as coarsely as it says, and no more."""
    path = with_scales(tmp_path, {LAYER.format(0) + f"{kind}_scale": 0.05 for kind in "kv"})
    keys = []
    for has_scales in (False, True):
        driver = ModelDriver(path, max_positions=LENGTH, kv_dtype=FP8)
        if has_scales:
            load_kv_scales(driver.model, path)
        logits(driver, LENGTH)
        scales = driver.kv_cache.scales(0)
        assert scales is not None
        keys.append(dequantise_heads(driver.kv_cache.layer(0)[0], scales.k.transpose(1, 2)))
        driver.blocks.rng.seed(0)
    torch.testing.assert_close(keys[1], keys[0], rtol=1 / 7, atol=0.05 * 2**-8)


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.tensor(0.0), "is 0.0, and a scale has to be above 0"), (torch.ones(2), r"shape \[2\]")],
    ids=["zero", "two"],
)
def test_scales_that_are_none(value: Tensor, words: str, tmp_path: Path) -> None:
    path = with_scales(tmp_path, {LAYER.format(0) + "v_scale": 0.1})
    file = path / "model.safetensors"
    save_file(load_file(file) | {LAYER.format(0) + "k_scale": value}, file, {"format": "pt"})
    driver = ModelDriver(path, kv_dtype=FP8)
    with pytest.raises(LoadError, match=rf"model\.layers\.0\.self_attn\.k_scale.*{words}.*kv_cache_dtype: auto"):
        load_kv_scales(driver.model, path)


def test_names_of_scales() -> None:
    known = ["attn.q_scale", "attn.prob_scale", "k_scale", "k_proj.output_scale", "attn.kv_scale"]
    assert all(is_kv_scale("model.layers.11.self_attn." + name) for name in known)
    others = ["k_proj.weight_scale", "q_proj.output_scale", "v_proj.k_scale", "k_scale.x", "k_proj.input_scale"]
    assert not any(is_kv_scale("model.layers.11.self_attn." + name) for name in others)
