"""Checkpoint files that are damaged, or made to do harm: an error names the file and the key of each."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import tiny_model_config
from model_facts import rope_of
from nvcli.errors import ConfigError, LoadError
from nvcli.models.checkpoint import check_weight_files, read_tensors, weight_files
from nvcli.models.config import load_model_config
from nvcli.models.json_file import JsonFile, read_json
from nvcli.models.safetensors_header import read_header
from nvcli.models.vision.llava import read_onevision_vision
from nvcli.models.vision.vision_file import layer_list, side_of

DEEP = '{"a":' * 100_000
HUGE = 2**70
INDEX_FILE = "model.safetensors.index.json"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def write_config(folder: Path, family: str = "Qwen3", **overrides: Any) -> Path:
    values = {"architectures": [f"{family}ForCausalLM"], **tiny_model_config(), **overrides}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_header(file: Path, header: Any, body: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return file


def assert_refused(read: Callable[[], object], *parts: str) -> None:
    with pytest.raises((ConfigError, LoadError)) as caught:
        read()
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message) < 600, "a message for a person"


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("architectures", "Qwen3ForCausalLM", '"Qwen3ForCausalLM" names no architecture'),
        ("architectures", 5, "5 names no architecture"),
        (
            "architectures",
            [],
            """names no architecture; --hf-overrides '{"architectures": ["NAME"]}' names one; `nvcli""",
        ),
        ("architectures", [5, None], "5 is not supported"),
        ("architectures", [["Qwen3ForCausalLM"]], "is not supported"),
        ("architectures", [{}], "{} is not supported"),
        ("architectures", ["x" * 100_000], "x… is not supported"),
        ("vocab_size", HUGE, f"{HUGE} is too large; allowed: up to 2,147,483,647"),
        ("hidden_size", 2**63, "is too large"),
        ("num_attention_heads", HUGE, "is too large"),
        ("num_hidden_layers", 2**31 - 1, "2147483647 is too large; allowed: up to 10,000"),
        ("intermediate_size", -HUGE, "is not positive"),
        ("head_dim", HUGE, "is too large"),
        ("max_position_embeddings", 10**400, "is too large"),
        ("max_position_embeddings", 1, "1 is too small; allowed: from 2 on"),
        ("rms_norm_eps", "x" * 10_000, "x… is not a number"),
        ("rms_norm_eps", 10**400, "0… is not a finite number"),
        ("eos_token_id", 2**31, "2147483648 is not a token id"),
        ("eos_token_id", list(range(65)), "65 ids end an answer; allowed: up to 64"),
        ("hidden_act", ["silu"], '["silu"] is not supported'),
        ("layer_types", [["full_attention"]] * 2, '["full_attention"] is not supported'),
        ("layer_types", "x" * 10_000, "is not a list"),
        ("dtype", "y" * 10_000, "y… is not supported"),
        ("rope_parameters", [[1]], "[[1]] is not an object"),
        ("quantization_config", {"quant_method": ["x"]}, '(["x"]) are not supported'),
    ],
)
def test_odd_values_of_config_json(tmp_path: Path, key: str, value: Any, found: str) -> None:
    write_config(tmp_path, **{key: value})
    assert_refused(lambda: load_model_config(tmp_path), f"{tmp_path / 'config.json'}: `{key}`: ", found)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("original_max_position_embeddings", 0, "0 is not positive"),
        ("original_max_position_embeddings", -1, "-1 is not positive"),
        ("factor", 0, "0.0 is not a number above zero"),
        ("beta_fast", -32, "-32.0 is not a number above zero"),
        ("beta_fast", 1e308, "1e+308 is not a number above zero; allowed: from 1e-30 to 1e+30"),
        ("factor", 1e-308, "1e-308 is not a number above zero"),
        ("beta_slow", -1, "-1.0 is not a number above zero"),
        ("rope_theta", 1, "1.0 is no base for YaRN"),
        ("rope_theta", -1, "-1.0 is not a number above zero"),
        ("rope_type", ["yarn"], "is not text"),
    ],
)
def test_yarn_by_zero(tmp_path: Path, key: str, value: Any, found: str) -> None:
    write_config(tmp_path, rope_parameters={**YARN, key: value})
    assert_refused(lambda: load_model_config(tmp_path), f"config.json: `rope_parameters.{key}`: ", found)


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_llama3_by_zero(tmp_path: Path, key: str) -> None:
    rope = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write_config(tmp_path, rope_parameters={**rope, key: 0})
    assert_refused(lambda: load_model_config(tmp_path), f"config.json: `rope_parameters.{key}`: 0")


def test_yarn_takes_zero_for_the_usual_betas_as_transformers_does(tmp_path: Path) -> None:
    rope = rope_of(load_model_config(write_config(tmp_path, rope_parameters={**YARN, "beta_fast": 0, "beta_slow": 0})))
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX_FILE])
def test_json_that_is_none_or_no_file(tmp_path: Path, file: str) -> None:
    write_config(tmp_path)
    path = tmp_path / file

    def read() -> None:
        load_model_config(tmp_path)
        read_tensors(tmp_path)

    for text, found in (
        (DEEP, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[1]", "holds [1] where a JSON object belongs"),
    ):
        path.write_text(text)
        assert_refused(read, f"{path}: ", found)
    with path.open("wb") as stream:
        stream.truncate(200_000_000)
    assert_refused(read, f"{path}: cannot be read: 200,000,000 bytes, more than", "download the file again")
    path.unlink()
    path.symlink_to("nowhere")
    assert_refused(read, f"{path}: a link to nowhere, where there is no file; download the file again")
    path.unlink()
    os.mkfifo(path)
    assert_refused(read, f"{path}: cannot be read: it is a FIFO")


def test_a_shard_that_is_not_there_or_is_no_file(tmp_path: Path) -> None:
    """Said before a process is started, and before anything is opened that may never answer."""
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    write_header(tmp_path / "model-1.safetensors", header)
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    shard = tmp_path / "model-2.safetensors"
    for read in (check_weight_files, read_tensors):
        assert_refused(lambda read=read: read(tmp_path), f"{shard}: no such file, though the index")  # type: ignore[misc]
        shard.symlink_to("blob")
        assert_refused(lambda read=read: read(tmp_path), f"{shard}: a link to blob, where there is no file")  # type: ignore[misc]
        shard.unlink()
        os.mkfifo(shard)
        assert_refused(lambda read=read: read(tmp_path), f"{shard}: cannot be read: it is a FIFO")  # type: ignore[misc]
        shard.unlink()
    (tmp_path / INDEX_FILE).unlink()
    check_weight_files(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    check_weight_files(tmp_path)  # a folder without weights is the loader's to refuse
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    assert_refused(lambda: check_weight_files(tmp_path), "model.safetensors: a link to nowhere")


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "tokenizer.json", "", ".", 5, None, ["x"]])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, file: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a.weight": file}}))
    found = f"{json.dumps(file)} is no *.safetensors file of the folder"
    assert_refused(lambda: weight_files(tmp_path), f'{INDEX_FILE}: `weight_map."a.weight"`: ', found)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (DEEP.encode(), "nested too deeply"),
        (b'{"a": {"dtype": 5}, "b":' + DEEP.encode(), "nested too deeply"),
        ([], "not a valid JSON object"),
        ({"a": 5}, 'entry "a" is malformed (Expected `object`'),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "$.shape"),
        ({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 8]}}, "$.shape"),
        ({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}, "$.shape"),
        ({"a": {"dtype": 5, "shape": [2], "data_offsets": [0, 8]}}, "$.dtype"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, "$.data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, 'places tensor "a" at bytes 8 to 0'),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**63]}}, "the file has 8"),
    ],
)
def test_odd_headers(tmp_path: Path, header: Any, found: str) -> None:
    file = write_header(tmp_path / "model.safetensors", header)
    assert_refused(lambda: read_header(file), f"{file}: corrupt", found, "download it again")


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 3 << 30))
        stream.truncate(4 << 30)  # takes no room on the disk
    assert_refused(lambda: read_header(file), "a header of 3,221,225,472 bytes, more than the 100,000,000")


def test_what_git_leaves_in_place_of_large_files_says_so(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:5f\nsize 135\n")
    for read in (read_json, read_header):
        with pytest.raises(LoadError, match=r"model.safetensors: git left a reference in place of this file; run `git"):
            read(file)


def test_pickled_weights_are_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "pytorch_model.bin").write_bytes(f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode())
    assert_refused(lambda: read_tensors(tmp_path), "pytorch_model.bin: damaged, or not as torch.save writes it")
    write_header(tmp_path / "model.safetensors", {})
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    assert_refused(lambda: read_tensors(tmp_path), "truncated or not a safetensors file")
    assert not canary.exists()


@pytest.mark.parametrize("ratio", ["anyres", "anyres_max_0", "anyres_max_" + "9" * 5000])
def test_a_number_within_text(tmp_path: Path, ratio: str) -> None:
    config = JsonFile(tmp_path / "config.json", {"vision_aspect_ratio": ratio, "vision_config": {}})
    assert_refused(lambda: read_onevision_vision(config, config, config), "`vision_aspect_ratio`: ", "anyres_max_9")


@pytest.mark.parametrize("side", [[], [14], [14, 14, 2], [14, 16], [[14], [14]]], ids=str)
def test_a_side_is_that_of_a_square(tmp_path: Path, side: list[Any]) -> None:
    config = JsonFile(tmp_path / "config.json", {"patch_size": side})
    assert_refused(lambda: side_of(config, "patch_size", 14), "`patch_size`: ")


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        (None, "missing, and its default [3, 7, 10] is not a list of different layers of 8"),
        ([3, 8], "[3, 8] is not"),
        ([3, True], "[3, true] is not"),
        ([3, 3], "[3, 3] is not a list of different layers of 8"),
    ],
)
def test_layers_that_a_tower_does_not_have_are_refused(layers: list[int] | None, problem: str, tmp_path: Path) -> None:
    vision = JsonFile(tmp_path / "config.json", {"depth": 8, "deepstack_visual_indexes": layers})
    assert_refused(
        lambda: layer_list(vision, "deepstack_visual_indexes", (3, 7, 10)), "`deepstack_visual_indexes`: ", problem
    )
