"""Weights in files of torch.save are those that torch loads; no file runs code, or ends otherwise than in an error."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import write_tiny_qwen3
from model_driver import CPU, load_weights
from nvcli.errors import LoadError
from nvcli.models.checkpoint import read_tensors
from nvcli.models.config import load_model_config
from nvcli.models.registry import build_model
from nvcli.models.stored_values import OpenFiles, reading
from nvcli.models.torch_file import read_torch_file
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

FILE = "pytorch_model.bin"


def values_of(path: Path) -> dict[str, Tensor]:
    with OpenFiles() as files:
        infos = read_tensors(path)
        return {name: files.read(info, [slice(0, n) for n in info.shape], CPU) for name, info in infos.items()}


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_those_that_torch_loads(protocol: int, tmp_path: Path) -> None:
    """Of all types, as parameters, and as views that share a storage; other entries are left out."""
    numbers = torch.arange(40.0).view(5, 8)
    types = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8)
    saved: dict[str, Any] = OrderedDict({f"as {dtype}": numbers.to(dtype) for dtype in (*types, torch.uint8)})
    saved |= {"parameter": torch.nn.Parameter(numbers * 2), "rows": numbers[1:3], "same": numbers, "step": 7}
    saved["with a hook"] = saved["parameter"]
    torch.save(saved, tmp_path / FILE, pickle_protocol=protocol)
    found = values_of(tmp_path)
    assert list(found) == [name for name in saved if name != "step"]
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name].detach()), name


def test_files_that_change_before_they_are_read_are_errors(tmp_path: Path) -> None:
    file = tmp_path / FILE
    torch.save({"a.weight": torch.ones(40)}, file)
    info = read_torch_file(file)["a.weight"]
    for spoil in (lambda: os.truncate(file, info.num_bytes), file.unlink):
        spoil()
        with pytest.raises(LoadError, match=rf"{FILE}: cannot be read"), reading(file), OpenFiles() as files:
            files.read(info, [slice(0, 40)], CPU)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_in_torchs_files_is_that_in_safetensors(is_sharded: bool, tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path)

    def load() -> dict[str, Tensor]:
        model = build_model(load_model_config(path), TensorParallelGroup.single(), torch.float32)
        load_weights(model, path, CPU)
        return dict(model.named_parameters())

    expected, tensors = load(), load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    if is_sharded:
        weight_map = {name: f"pytorch_model-{number % 2 + 1:05}-of-00002.bin" for number, name in enumerate(tensors)}
        for file in set(weight_map.values()):
            torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file)
        (path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(tensors, path / FILE)
    found = load()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"a.weight": torch.ones(4, 6).t()}, 'tensor "a.weight": its numbers are not stored row by row'),
        ({"model": {"a.weight": torch.ones(2)}}, 'no tensors, but "model"'),
        ([torch.ones(2)], "no tensors"),
        ({"a.weight": os.getcwd}, 'no tensors, but "a.weight"'),
        ({"a.weight": torch.ones(2), 3: 4, "b": {5}}, 'set", which is not called'),
    ],
)
def test_what_is_not_read_is_told(saved: Any, told: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / FILE)
    with pytest.raises(LoadError, match=FILE) as caught:
        read_torch_file(tmp_path / FILE)
    assert told in str(caught.value)


class Runs:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_nothing_of_a_file_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({"a.weight": torch.ones(2), "b": Runs(f"touch {canary}")}, tmp_path / FILE)
    with pytest.raises(LoadError, match=r"names .*system"):
        read_torch_file(tmp_path / FILE)
    assert not canary.exists()


def test_files_of_torch_before_1_6(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2)}, tmp_path / FILE, _use_new_zipfile_serialization=False)
    with pytest.raises(LoadError, match=r"not as torch.save writes it since version 1.6 .* save_pretrained"):
        read_torch_file(tmp_path / FILE)


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    """Bytes of the file, and of the pickle in a sound archive, are changed, left out or put in."""
    rng, file = random.Random(5), tmp_path / FILE
    torch.save(OrderedDict({f"layers.{i}.weight": torch.ones(3, 4) for i in range(3)}), file)
    whole = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    described = next(name for name in entries if name.endswith("data.pkl"))
    for number in range(400):
        if number % 2:
            file.write_bytes(mutated(whole, rng))
        else:
            with zipfile.ZipFile(file, "w") as archive:
                for name, data in entries.items():
                    archive.writestr(name, mutated(data, rng) if name == described else data)
        with suppress(LoadError):
            for info in read_torch_file(file).values():
                assert info.stored is not None
                assert 0 <= info.stored.offset <= info.stored.offset + info.num_bytes <= file.stat().st_size


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place, kind = rng.randrange(len(changed)), rng.randrange(3)
        if kind == 0:
            changed[place] = rng.randrange(256)
        elif kind == 1:
            del changed[place : place + rng.randint(1, 40)]
        else:
            changed[place:place] = rng.choice((pickle.MARK, pickle.POP, pickle.REDUCE, b"\xff\xff\xff\x7f"))
    return bytes(changed) or b"x"
