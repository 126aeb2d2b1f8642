"""Weights arrive whole, in place and in the right type; a checkpoint that does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from batches import RequestState
from checkpoints import edit_json, edit_weights, reference_logits, write_tiny_qwen3
from model_driver import CPU, ModelDriver, load_weights
from nvcli.errors import LoadError
from nvcli.models import pinned_upload
from nvcli.models.checkpoint_check import describe_unused
from nvcli.models.config import load_model_config
from nvcli.models.loader import find_weights
from nvcli.models.pinned_upload import PinnedUpload
from nvcli.models.registry import build_model
from nvcli.models.safetensors_header import read_header
from nvcli.models.stored_values import OpenFiles, ranges_of
from nvcli.models.tensor_info import FileRange
from nvcli.worker.distributed.stage import Stage
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def original_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_qwen3(tmp_path_factory.mktemp("sharded"), max_shard_size="30KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def single(original: Path, tmp_path: Path) -> Path:
    """A checkpoint of one file, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def sharded(original_shards: Path, tmp_path: Path) -> Path:
    """A checkpoint of several files with an index, to be damaged."""
    return Path(shutil.copytree(original_shards, tmp_path / "model"))


def load(path: Path, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], int]:
    model = build_model(load_model_config(path), TensorParallelGroup.single(), dtype)
    num_bytes = load_weights(model, path, CPU)
    return dict(model.named_parameters()), num_bytes


def test_fused_parameters_are_the_checkpoints_tensors_stacked(single: Path) -> None:
    parameters, num_bytes = load(single)
    tensors = load_file(single / "model.safetensors")
    attention = "model.layers.0.self_attn."
    expected = torch.cat([tensors[f"{attention}{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(parameters["model.layers.0.mixer.qkv_proj.weight"], expected)
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in parameters.values())
    assert num_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())


def test_many_files_give_what_one_file_gives(single: Path, original_shards: Path) -> None:
    one, many = load(single), load(original_shards)
    assert one[1] == many[1]
    for name, parameter in one[0].items():
        assert torch.equal(parameter, many[0][name]), name


def test_many_files_load_as_the_runner_loads(single: Path, original_shards: Path) -> None:
    """The runner loads in inference mode, which is a thread's own; several files are read by several threads."""
    with torch.inference_mode():
        many = load(original_shards)[0]
    for name, parameter in load(single)[0].items():
        assert torch.equal(parameter, many[name]), name


def test_weights_are_cast(tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path / "model", dtype="bfloat16")
    parameters, num_bytes = load(path)
    assert torch.equal(
        parameters["model.norm.weight"], load_file(path / "model.safetensors")["model.norm.weight"].float()
    )
    assert num_bytes == 2 * load(path, torch.bfloat16)[1]
    ids = list(range(20))
    (logits,) = ModelDriver(path).step((RequestState(), ids))
    torch.testing.assert_close(logits, reference_logits(path, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("stored", [(EMBEDDING,), (EMBEDDING, HEAD), (HEAD,)])
def test_tied_embeddings(tmp_path: Path, stored: tuple[str, ...]) -> None:
    """Some tools write the tied LM head, too, or alone."""
    path = write_tiny_qwen3(tmp_path / "model", tie_word_embeddings=True)

    def store(tensors: dict[str, Tensor]) -> None:
        weight = tensors.pop(EMBEDDING)
        tensors.update({name: weight.clone() for name in stored})

    edit_weights(path, store)
    parameters, num_bytes = load(path)
    assert HEAD not in parameters, "one parameter, counted once"
    assert num_bytes == sum(parameter.numel() * 4 for parameter in parameters.values())
    ids = list(range(20))
    (logits,) = ModelDriver(path).step((RequestState(), ids))
    torch.testing.assert_close(logits, reference_logits(path, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("change", [lambda head: head[-1].add_(0.5), lambda head: head.resize_(90, 32)])
def test_a_head_of_its_own_is_not_tied(tmp_path: Path, change: Callable[[Tensor], object]) -> None:
    """transformers computes with such a head, whatever config.json says."""
    path = write_tiny_qwen3(tmp_path / "model", tie_word_embeddings=True)

    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        change(tensors[HEAD])

    edit_weights(path, add_head)
    assert_refused(path, HEAD, EMBEDDING, "tie_word_embeddings")
    with pytest.raises(LoadError, match="tie_word_embeddings"):
        ModelDriver(path, stage=Stage(1, 2))
    ModelDriver(path, stage=Stage(0, 2))  # has no use for it


def test_harmless_extras_are_passed_over_and_listed(single: Path) -> None:
    extras = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in (0, 1)}
    edit_weights(single, lambda tensors: tensors.update({**extras, "model.layers.1.self_attn.k_scale": torch.ones(1)}))
    load(single)
    model = build_model(load_model_config(single), TensorParallelGroup.single(), torch.float32)
    assert describe_unused(find_weights(model, single).unused) == (
        "3 tensors of the checkpoint are not used: model.layers.*.self_attn.k_scale, "
        "model.layers.*.self_attn.rotary_emb.inv_freq (× 2)"
    )
    assert set(find_weights(model, single, reads_kv_scales=True).unused) == extras.keys()


def test_what_goes_through_a_pinned_buffer_is_what_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part is read, in as many pieces as the buffer makes of it."""
    monkeypatch.setattr(pinned_upload, "_BUFFER_BYTES", 48)
    generator = torch.Generator().manual_seed(0)
    stored = {
        "matrix": torch.randn(9, 10, generator=generator),
        "vector": torch.randn(30, generator=generator).bfloat16(),
        "experts": torch.randint(256, (3, 8, 6), dtype=torch.uint8, generator=generator),
        "number": torch.tensor(7.0),
    }
    file = tmp_path / "model.safetensors"
    save_file(stored, file)
    infos = read_header(file)
    infos["experts"] = replace(infos["experts"], expert=1, shape=(8, 6))
    parts = {
        "matrix": [(slice(0, 9), slice(0, 10)), (slice(2, 7), slice(3, 5)), (slice(8, 9), slice(0, 10))],
        "vector": [(slice(0, 30),), (slice(29, 30),)],
        "experts": [(slice(0, 8), slice(0, 6)), (slice(3, 5), slice(2, 6))],
        "number": [(slice(0, 1),)],
    }
    upload = PinnedUpload(CPU)
    with OpenFiles() as files, OpenFiles(upload) as uploads:
        for name, each in parts.items():
            for part in each:
                expected = files.read(infos[name], part, CPU)
                assert torch.equal(uploads.read(infos[name], part, CPU), expected)
        twice = [infos["matrix"], infos["matrix"]]
        for part in parts["matrix"]:
            assert torch.equal(uploads.read_together(twice, part), files.read(infos["matrix"], part, CPU).repeat(2, 1))
        assert uploads.read_together([infos["number"]] * 3, ()).tolist() == [7.0, 7.0, 7.0]
        upload.stage([*ranges_of([infos["matrix"]], (slice(1, 9),)), *ranges_of([infos["vector"]], (slice(3, 30),))])
        for name, part in (
            ("matrix", (slice(2, 7), slice(3, 5))),
            ("vector", (slice(3, 20),)),
            ("matrix", (slice(0, 2),)),
        ):
            assert torch.equal(uploads.read_stored(infos[name], part), files.read_stored(infos[name], part))
        rows = [FileRange(file, infos["matrix"].stored.offset + 40 * row, 0) for row in (1, 3, 5, 2)]
        for chosen in (rows[:3], rows, rows[1:2]):
            found = upload.read_parts([one._replace(end=one.begin + 40) for one in chosen]).view(torch.float32)
            expected = stored["matrix"].flatten().view(torch.uint8)
            starts = [one.begin - infos["matrix"].stored.offset for one in chosen]
            assert torch.equal(found, torch.cat([expected[start : start + 40] for start in starts]).view(torch.float32))
    with pytest.raises(OSError, match="it ends at byte"):
        PinnedUpload(CPU).read(file, file.stat().st_size - 5, 6)


def assert_refused(path: Path, *parts: str) -> None:
    with pytest.raises(LoadError) as caught:
        load(path)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert "\n" not in message


def test_missing_tensor(single: Path) -> None:
    edit_weights(single, lambda tensors: tensors.pop(Q_PROJ))
    assert_refused(single, "missing", Q_PROJ)


def test_many_missing_tensors_are_summed_up(single: Path) -> None:
    edit_weights(single, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    assert_refused(single, "model.layers.1.", "and 8 more")


def test_missing_head_names_the_setting_that_explains_it(single: Path) -> None:
    edit_weights(single, lambda tensors: tensors.pop("lm_head.weight"))
    assert_refused(single, "lm_head.weight", "tie_word_embeddings")


def test_extra_tensor(single: Path) -> None:
    edit_weights(single, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}))
    assert_refused(single, "model.safetensors", "unknown", "model.layers.7.mlp.up_proj.weight")


def test_misshapen_tensor(single: Path) -> None:
    edit_weights(single, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 31)}))
    assert_refused(single, "model.safetensors", Q_PROJ, "[64, 31]", "[64, 32]")


def test_config_that_is_not_the_weights(single: Path) -> None:
    edit_json(single / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert_refused(single, "missing", "model.layers.2.")


def test_quantised_storage(single: Path) -> None:
    edit_weights(single, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 32, dtype=torch.int8)}))
    assert_refused(single, Q_PROJ, "I8")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_file(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    assert_refused(single, str(file), "truncated", "download it again")


def test_corrupt_header(single: Path) -> None:
    file = single / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"\xff" * 12
    file.write_bytes(data)
    assert_refused(single, str(file), "corrupt")


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}', b"3"])
def test_header_of_another_kind(single: Path, header: bytes) -> None:
    (single / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert_refused(single, "model.safetensors", "corrupt")


def test_header_that_contradicts_itself(single: Path) -> None:
    """Offsets that are not as long as the shape says: found by safetensors itself when the file is opened."""
    file = single / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[Q_PROJ]["data_offsets"][1] -= 4
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert_refused(single, str(file), "cannot be read")


def test_missing_file_of_the_index(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    assert_refused(sharded, file.name, "no such file", "though the index")


def test_index_that_promises_a_tensor_its_file_lacks(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit_weights(sharded, lambda tensors: tensors.pop(Q_PROJ), file=weight_map[Q_PROJ])
    assert_refused(sharded, weight_map[Q_PROJ], Q_PROJ, INDEX)


def test_index_that_names_a_tensor_unknown_to_the_model(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit_weights(sharded, lambda tensors: tensors.update({"visual.weight": torch.ones(1)}), file=weight_map[Q_PROJ])
    edit_json(sharded / INDEX, weight_map={**weight_map, "visual.weight": weight_map[Q_PROJ]})
    assert_refused(sharded, weight_map[Q_PROJ], "visual.weight", "unknown")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert_refused(sharded, INDEX)


def test_weights_of_another_format(single: Path) -> None:
    (single / "model.safetensors").rename(single / "model.pt")
    assert_refused(single, "no *.safetensors", "model.pt", "save_pretrained")


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert_refused(single, str(single), "no *.safetensors")


def test_nothing_is_allocated_for_a_checkpoint_that_does_not_fit(single: Path) -> None:
    edit_weights(single, lambda tensors: tensors.pop(Q_PROJ))
    model = build_model(load_model_config(single), TensorParallelGroup.single(), torch.float32)
    with pytest.raises(LoadError):
        load_weights(model, single, CPU)
    assert all(parameter.is_meta for parameter in model.parameters())
