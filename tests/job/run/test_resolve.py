"""What `auto` and null stand for, decided without torch."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvcli.core.config import AttentionBackends, RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.demo import demo_path
from nvcli.errors import ConfigError
from nvcli.job.run import device, resolve
from nvcli.job.run.device import detect_device, unused_gpu
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.job.run.row_settings import sampling_defaults
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.layer_config import LearnedPositions
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.check.machine import named_gpus


def make_model(**changes: Any) -> ModelConfig:
    """The built-in model's configuration, changed: 4,096 positions, bfloat16."""
    changes = {"max_position_embeddings": 4096, "dtype": "bfloat16", **changes}
    return dataclasses.replace(load_model_config(demo_path()), **changes)


@pytest.mark.parametrize(
    ("keys", "found", "device", "dtype"),
    [
        ({}, "cpu", "cpu", "float32"),
        ({}, "cuda", "cuda", "bfloat16"),
        ({"device": "cpu"}, "cuda", "cpu", "float32"),
        ({"device": "cuda"}, "cpu", "cuda", "bfloat16"),
        ({"dtype": "float16"}, "cpu", "cpu", "float16"),
    ],
)
def test_device_and_dtype(
    keys: dict[str, Any], found: Any, device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvcli.job.run.device.detect_device", lambda: found)
    config = resolve_engine_config(RunConfig(model="m", **keys), Path("/m"), make_model())
    assert (config.device, config.dtype) == (device, dtype)


@pytest.mark.parametrize(("key", "kept"), [("auto", "none"), ("none", "none"), ("fp8", "fp8")])
def test_quantization(key: Any, kept: str) -> None:
    run = RunConfig(model="demo", quantization=key, device="cpu")
    assert resolve_engine_config(run, Path("/m"), make_model()).quantization == kept
    assert resolve.resolve_settings(run).model.quantization == kept


def test_batch_invariance_is_refused_where_it_cannot_be_had(tmp_path: Path) -> None:
    run = RunConfig(model="m", batch_invariant=True, device="cpu")
    assert resolve_engine_config(run, Path("/m"), make_model()).batch_invariant
    with pytest.raises(ConfigError, match="`kv_cache_dtype` is fp8, and `batch_invariant` keeps"):
        resolve_engine_config(msgspec.structs.replace(run, kv_cache_dtype="fp8"), Path("/m"), make_model())
    backends = AttentionBackends(decode="flashinfer")
    with pytest.raises(ConfigError, match="flashinfer gives rows different bits in different batches"):
        resolve_engine_config(msgspec.structs.replace(run, attention_backend=backends), Path("/m"), make_model())
    with pytest.raises(ConfigError, match=r"`batch_invariant` is true, .* weights kept in fp8, .*: none keeps plain"):
        resolve_engine_config(msgspec.structs.replace(run, quantization="fp8"), Path("/m"), make_model())
    with pytest.raises(ConfigError, match=r"`batch_invariant` is true, and this model .* has layers with a recurrent"):
        resolve_engine_config(run, Path("/m"), load_model_config(write_shape("qwen3.5-35b-a3b", tmp_path)))


def test_lengths_and_sizes() -> None:
    run = RunConfig(model="m", device="cpu", kv_cache_memory="2MiB")
    config = resolve_engine_config(run, Path("/m"), make_model())
    assert (config.max_model_len, config.kv_cache_memory) == (4096, 2 * 2**20)

    def resolved(**keys: Any) -> EngineConfig:
        return resolve_engine_config(RunConfig(model="m", device="cpu", **keys), Path("/m"), make_model())

    assert resolved(max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="`max_model_len` is 4097, and m was made for at most 4096"):
        resolved(max_model_len=4097)
    learned = dataclasses.replace(make_model().decoder, learned_positions=LearnedPositions(count=4096))
    run = RunConfig(model="m", device="cpu", max_model_len=4097)
    with pytest.raises(ConfigError, match=r"lower it or leave it out; it learned an embedding for each position"):
        resolve_engine_config(run, Path("/m"), make_model(decoder=learned))
    with pytest.raises(ConfigError, match="tensor_parallel_size 7 does not fit"):
        resolved(tensor_parallel_size=7)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size \(--pp\) is 99"):
        resolved(pipeline_parallel_size=99)


def test_small_models_take_more_tokens_a_step(tmp_path: Path) -> None:
    """Unless the configuration says otherwise, and never fewer than there are requests. So do models whose experts
    would get few rows, if the GPU has room for the step's activations."""
    names = ("qwen3-0.6b", "qwen3-8b", "nemotron-3-nano-30b-a3b", "qwen3.5-35b-a3b", "deepseek-v3")
    shapes = {name: load_model_config(write_shape(name, tmp_path)) for name in names}

    def tokens(shape: str, device: Any, gpus: Sequence[SmiGpu] = (), **keys: Any) -> int:
        run = RunConfig(model="m", device=device, **keys)
        config = resolve_engine_config(run, Path("/m"), shapes[shape], gpus=gpus)
        return config.max_num_batched_tokens

    assert [tokens("qwen3-0.6b", "cuda"), tokens("qwen3-8b", "cuda"), tokens("qwen3-0.6b", "cpu")] == [
        16384,
        8192,
        8192,
    ]
    few_rows = "nemotron-3-nano-30b-a3b", "qwen3.5-35b-a3b", "deepseek-v3"
    expected = {"h200": [16384, 32768, 8192], "h100": [16384, 32768, 8192], "a100-40gb": [16384, 16384, 8192]}
    for name, most in expected.items():
        assert [tokens(shape, "cuda", named_gpus(name, 2) or ()) for shape in few_rows] == most, name
    assert tokens("nemotron-3-nano-30b-a3b", "cuda") == 8192
    assert tokens("qwen3-0.6b", "cuda", max_num_batched_tokens=1000) == 1000
    assert tokens("qwen3-0.6b", "cuda", max_num_batched_tokens=1 << 30, max_num_seqs=9, max_model_len=5000) == 45000
    assert tokens("qwen3-8b", "cuda", max_num_seqs=9000) == 9000


def test_the_block_size_follows_from_the_model(tmp_path: Path) -> None:
    """Unless the configuration says otherwise."""
    shapes = {name: load_model_config(write_shape(name, tmp_path)) for name in ("qwen3-8b", "qwen3.5-35b-a3b")}

    def tokens(shape: str, **keys: Any) -> int:
        run = RunConfig(model="m", device="cuda", **keys)
        return resolve_engine_config(run, Path("/m"), shapes[shape]).block_size

    assert [tokens("qwen3-8b"), tokens("qwen3.5-35b-a3b"), tokens("qwen3.5-35b-a3b", dtype="float32")] == [64, 192, 128]
    assert tokens("qwen3.5-35b-a3b", tensor_parallel_size=2) == 192
    assert tokens("qwen3.5-35b-a3b", attention_backend=AttentionBackends(prefill="flash-attn")) == 256
    assert tokens("qwen3.5-35b-a3b", block_size=48) == 48


def test_ranks_are_numbered_stage_by_stage() -> None:
    run = RunConfig(model="m", device="cpu", tensor_parallel_size=2, pipeline_parallel_size=3, max_num_seqs=8)
    config = resolve_engine_config(run, Path("/m"), make_model())
    assert (config.num_ranks, config.output_rank, config.max_num_decodes, config.max_steps_in_flight) == (6, 4, 3, 3)
    assert [config.stage_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert config.rank_name(3) == "rank 3 of stage 1"
    second = msgspec.structs.replace(config, replica=1)
    assert [second.gpu_index(rank) for rank in range(6)] == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ("torch", "torch"),
        (AttentionBackends(prefill="torch"), "torch:auto"),
        (AttentionBackends(prefill="triton", decode="triton"), "triton"),
    ],
)
def test_the_attention_backend_is_passed_on_as_a_choice(choice: Any, told: str) -> None:
    run = RunConfig(model="m", device="cpu", attention_backend=choice)
    assert resolve_engine_config(run, Path("/m"), make_model()).attention_backend == told


def test_sampling_defaults_lie_over_those_of_the_checkpoint() -> None:
    model = make_model(generation_defaults={"temperature": 0.6, "top_k": 20})
    assert sampling_defaults(RunConfig(sampling={"top_k": 5}), model) == {"temperature": 0.6, "top_k": 5}
    assert sampling_defaults(RunConfig(generation_config="none"), model) == {}
    least = make_model(generation_defaults={"min_tokens": 9})
    assert sampling_defaults(RunConfig(sampling={"max_tokens": 5}), least) == {"min_tokens": 5, "max_tokens": 5}
    with pytest.raises(ConfigError, match=r"`sampling.top_p` is 7.*generation_config: none"):
        sampling_defaults(RunConfig(model="m"), make_model(generation_defaults={"top_p": 7}))


def test_bad_defaults_of_a_checkpoint_can_be_left_out(tmp_path: Path) -> None:
    """The way out that their error names."""
    folder = shutil.copytree(demo_path(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "top_p": 1.5}')
    model = load_model_config(folder)
    assert sampling_defaults(RunConfig(generation_config="none"), model) == {}
    assert sampling_defaults(RunConfig(sampling={"top_p": 0.9}), model) == {"top_p": 0.9}
    with pytest.raises(ConfigError, match=r"generation_config.json.*`sampling.top_p` is 1.5.*generation_config: none"):
        sampling_defaults(RunConfig(model="m"), model)


def test_what_only_transformers_does_of_generation_config_is_told(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_path(), tmp_path / "model")
    values = {"do_sample": False, "num_beams": 4, "min_new_tokens": 0, "min_length": 9, "typical_p": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(values))
    run = RunConfig(model=str(folder), device="cpu")
    (warning,) = resolve.resolve_settings(run).warnings
    assert warning.endswith(
        "/generation_config.json: not applied, unlike in transformers: `num_beams` 4, `min_length` 9 (set "
        "`sampling.min_tokens`)"
    )
    run = msgspec.structs.replace(run, sampling={"min_tokens": 9})
    (folder / "generation_config.json").write_text(json.dumps(values | {"num_beams": 1}))
    assert resolve.resolve_settings(run).warnings == []


@pytest.mark.parametrize(
    ("names", "environ", "built_for_cuda", "expected"),
    [
        ([], {}, True, "cpu"),
        (["nvidia0", "nvidiactl"], {}, True, "cuda"),
        (["nvidia7"], {"CUDA_VISIBLE_DEVICES": "0"}, True, "cuda"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, True, "cpu"),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, True, "cpu"),
        (["nvidia0"], {}, False, "cpu"),
        (["nvidiactl", "nvidia-uvm"], {}, True, "cpu"),
        (["dxg"], {}, True, "cuda"),
    ],
)
def test_the_device_is_found_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    environ: dict[str, str],
    built_for_cuda: bool,
    expected: str,
) -> None:
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(device, "_torch_has_cuda", lambda: built_for_cuda)
    assert detect_device(environ, tmp_path) == expected


@pytest.mark.parametrize(
    ("names", "environ", "built_for_cuda", "chosen", "is_warned"),
    [
        (["nvidia0"], {}, False, "auto", True),
        (["nvidia0"], {}, False, "cpu", False),
        (["nvidia0"], {}, True, "auto", False),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, False, "auto", False),
        ([], {}, False, "auto", False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    environ: dict[str, str],
    built_for_cuda: bool,
    chosen: Any,
    is_warned: bool,
) -> None:
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(device, "_torch_has_cuda", lambda: built_for_cuda)
    monkeypatch.setattr(device, "driver_cuda", lambda: (12, 9))
    warning = unused_gpu(RunConfig(model="m", device=chosen), environ, tmp_path)
    assert (warning is not None) == is_warned
    if warning is not None:
        assert "pip install --force-reinstall 'torch>=" in warning
        assert "https://download.pytorch.org/whl/cu128" in warning


def test_what_torch_was_built_for_is_read_from_its_files() -> None:
    import torch

    assert device._torch_has_cuda() == (torch.version.cuda is not None)
