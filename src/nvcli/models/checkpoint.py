"""Locating a model's files: from its name to a folder, from the folder to files of weights, from these to tensors.

Torch-free; the hub (`models.hub`) is asked only for a name that is neither `demo` nor a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvcli.core.system.regular_file import check_regular, read_regular
from nvcli.core.validation import list_some, show
from nvcli.errors import ConfigError, LoadError, reworded
from nvcli.models.config import CONFIG_FILE
from nvcli.models.config_overrides import NO_OVERRIDES
from nvcli.models.gguf.files import SUFFIX as GGUF_SUFFIX
from nvcli.models.gguf.files import check_parts, is_gguf, models_among, part_names
from nvcli.models.gguf.folder import model_folder
from nvcli.models.gguf.tensors import read_gguf
from nvcli.models.hub import (
    cached_gguf,
    cached_revisions,
    cached_snapshot,
    download,
    download_small_files,
    split_quantisation,
)
from nvcli.models.json_file import JsonFile
from nvcli.models.other_checkpoints import check_kind, other_weights
from nvcli.models.safetensors_header import SUFFIX, read_header, unreadable
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.torch_file import read_torch_file

_MOST_REF_BYTES = 1000
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+(:[\w.-]+)?)?")
_WITH_REVISION = re.compile(_HUB_ID.pattern + "@.+")
_HUB_URL = re.compile(r"(?:hf:/|(?:https?://)?(?:huggingface\.co|hf\.co))/([\w.-]+/[\w.-]+(?::[\w.-]+)?)")


@dataclass(frozen=True, slots=True)
class _Format:
    """Names of files of weights."""

    single: str
    """The name of a checkpoint's only file."""
    pattern: str
    """Names of several files."""

    @property
    def suffix(self) -> str:
        return Path(self.single).suffix

    @property
    def index(self) -> str:
        """The name of the file that says which of several files holds which tensor."""
        return f"{self.single}.index.json"

    def files(self, path: Path) -> list[Path]:
        """Return a folder's files without an index."""
        if os.path.lexists(path / self.single):
            return [path / self.single]
        return sorted(path.glob(self.pattern))

    def is_in(self, path: Path) -> bool:
        return os.path.lexists(path / self.index) or bool(self.files(path))


_SAFETENSORS = _Format("model.safetensors", f"*{SUFFIX}")
_TORCH = _Format("pytorch_model.bin", "pytorch_model*.bin")
_GGUF = _Format(f"model{GGUF_SUFFIX}", f"*{GGUF_SUFFIX}")
"""Files in a folder that `model_folder` made."""


def resolve_model(
    name: str,
    *,
    weights: bool = True,
    revision: str | None = None,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
) -> Path:
    """Return the folder of the model `name`: `demo`, a local folder or GGUF file, or a Hugging Face id (local cache
    first, then download), which may have the name of a quantisation in GGUF behind a colon.

    `weights` false: configuration and tokenizer are enough, and no weights are downloaded. `revision` is a branch, tag
    or commit of the hub; None: its main branch. `overrides` are those of `load_model_config`, which checks the model
    before its weights are downloaded.
    """
    found = find_model(name, weights=weights, revision=revision)
    if found is not None:
        return found
    try:
        return download(name, revision, overrides=overrides) if weights else download_small_files(name, revision)
    except LoadError as error:
        there = parts_in_cache(name, weights=weights, revision=revision)
        raise reworded(error, f"{error}\n{there}" if there else str(error)) from None


def find_model(name: str, *, weights: bool = True, revision: str | None = None) -> Path | None:
    """Find the folder of the model `name` on this machine; None if `resolve_model` would try a download.

    `weights` false: a folder without weights counts too. `revision`: as in `resolve_model`. Raises ConfigError if the
    name is empty or its model has no revisions, and LoadError if it cannot be a model.
    """
    if name == "demo":
        from nvcli.demo import demo_path

        _check_no_revision(name, "built in", revision)
        return demo_path()
    if not name:
        raise ConfigError("`model` is empty: give a folder, a Hugging Face id, or `demo`")
    path = Path(os.path.expanduser(name))
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # too long a name, a folder that must not be entered
        raise LoadError(f"{name}: {error.strerror}") from None
    if is_folder:
        return _local_folder(path, name, revision)
    if is_there:
        if is_gguf(name):
            _check_no_revision(name, "a file", revision)
            return _folder_of_parts([path.with_name(part) for part in part_names(path.name)])
        raise LoadError(f"{name}: a file; `model` is the folder that holds it, in Hugging Face layout")
    if is_gguf(name) or name.startswith((".", "~", os.sep)) or not _HUB_ID.fullmatch(name):
        at = "; a revision of a model on the hub is named with --revision" if _WITH_REVISION.fullmatch(name) else ""
        if (found := _HUB_URL.match(name)) is not None:
            at = f"; a model on the hub is named by its id: {found[1]}"
        raise LoadError(f"{name}: no such {'file' if is_gguf(name) else 'folder'}{at}")
    hub_id, quantisation = split_quantisation(name)
    cached = cached_snapshot(hub_id, weights=weights, revision=revision)
    if cached is None:
        return None
    if quantisation is None and _lacks(cached, weights=weights) is None and _format_of(cached) is not _GGUF:
        check_kind(cached, name)
        return cached
    if quantisation is None and "gguf" not in hub_id.lower():
        return None  # one of its quantisations was asked for, and now perhaps its safetensors
    try:
        files = cached_gguf(cached, name)
    except LoadError:
        return None
    return model_folder(files)


def _local_folder(path: Path, name: str, revision: str | None) -> Path:
    """Return the folder of a model given as a folder, which may be its folder in the Hugging Face cache. Raises
    ConfigError and LoadError."""
    if not (path / "snapshots").is_dir() or (path / CONFIG_FILE).exists():
        _check_no_revision(name, "a folder", revision)
        return _checked(path, name)
    wanted = revision or "main"  # a model's folder in the Hugging Face cache
    try:
        commit = read_regular(path / "refs" / wanted, most_bytes=_MOST_REF_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        commit = wanted
    snapshot = path / "snapshots" / commit
    if Path(commit).name != commit or not snapshot.is_dir():
        known = ", ".join(sorted(os.listdir(path / "snapshots"))) or "none"
        raise LoadError(f"{name}: no revision {wanted} in this folder of the Hugging Face cache; there are: {known}")
    return _checked(snapshot, name)


def _checked(folder: Path, name: str) -> Path:
    """Return a folder in Hugging Face layout, or the one that is made of the GGUF files in it. Raises LoadError."""
    check_kind(folder, name)
    has_others = _SAFETENSORS.is_in(folder) or _TORCH.is_in(folder)
    try:
        models = [] if has_others else [*models_among(os.listdir(folder)).values()]
    except OSError as error:  # a folder that must not be listed
        raise LoadError(f"{name}: {error.strerror}") from None
    if len(models) > 1:
        some = list_some([parts[0] for parts in models], 3)
        raise LoadError(f"{name}: a folder with several GGUF models: {some}; name one: {Path(name) / models[0][0]}")
    return _folder_of_parts([folder / file for file in models[0]]) if models else folder


def _folder_of_parts(files: list[Path]) -> Path:
    check_parts([str(file) for file in files if os.path.lexists(file)])
    return model_folder(files)


def _check_no_revision(name: str, kind: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(
            f"`revision` is {show(revision)}, and the model {name} is {kind}: only models named by "
            "their id on the Hugging Face hub have revisions; leave it out"
        )


def is_hub_id(name: str) -> bool:
    """Whether the name of a model that was found is a Hugging Face id: neither `demo` nor a folder or file."""
    return name != "demo" and not Path(os.path.expanduser(name)).exists()


def weight_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint folder: those that the index lists, if there is one. torch's own count where
    there are no safetensors. Raises LoadError."""
    if index := read_index(path):
        return _files_of(path, index)
    form = _format_of(path)
    if files := form.files(path):
        return [Path(os.readlink(file)) if form is _GGUF and file.is_symlink() else file for file in files]
    other, hint = other_weights(path), "; copy the model's weights there"
    if other is not None:
        hint = f"; {other} is of another format: save the model with transformers' save_pretrained to convert it"
    raise LoadError(f"{path}: no *.safetensors file{hint}")


def read_file(file: Path) -> dict[str, TensorInfo]:
    """Read the entry of every tensor of one of `weight_files`; no weights are read. Raises LoadError."""
    return {SUFFIX: read_header, GGUF_SUFFIX: read_gguf}.get(file.suffix.lower(), read_torch_file)(file)


def _format_of(path: Path) -> _Format:
    return next((form for form in (_SAFETENSORS, _TORCH, _GGUF) if form.is_in(path)), _SAFETENSORS)


def check_weight_files(path: Path) -> None:
    """Raise LoadError if a weight file of a checkpoint folder is missing or not a regular file.

    A folder that names no weights at all is left to the loader. Only the index is opened.
    """
    if not _format_of(path).is_in(path):
        return
    for file in weight_files(path):
        try:
            check_regular(file)
        except OSError as error:
            raise unreadable(file, error) from None


def read_index(path: Path) -> dict[str, str]:
    """Read which file of a folder holds which tensor (tensor name → file name); empty if there is no index.

    One that does not name the single file beside it does not count, as in transformers, whose `save_pretrained` leaves
    it behind when it takes away the files of an earlier save.
    """
    form = _format_of(path)
    index = JsonFile.read_if_present(path / form.index)
    if not index.values:
        if os.path.lexists(index.path):
            raise index.error("weight_map", "missing; download the file again")
        return {}
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.error("weight_map", f"{show(weight_map)} does not map tensor names to file names")
    allowed: set[str] = set()
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file in allowed:
            continue
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(form.suffix):
            raise index.error(
                f"weight_map.{show(tensor)}", f"{show(file)} is no *{form.suffix} file of the folder; download it again"
            )
        allowed.add(file)
    return {} if form.single not in allowed and os.path.lexists(path / form.single) else weight_map


def _files_of(path: Path, index: Mapping[str, str]) -> list[Path]:
    return [path / file for file in sorted(set(index.values()))]


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Read the entry of every tensor of a checkpoint folder from the file headers; no weights are read.

    Raises LoadError for a missing, truncated or corrupt file, a tensor that the index promises and its file lacks, and
    a tensor in two files.
    """
    index = read_index(path)
    tensors: dict[str, TensorInfo] = {}
    for file in _files_of(path, index) if index else weight_files(path):
        file_name = file.name
        for name, info in read_file(file).items():
            if index and index.get(name) != file_name:
                continue  # the index leaves it out, or names another file for it
            if name in tensors:
                raise LoadError(f"{path}: tensor {name} is both in {tensors[name].file.name} and {file.name}")
            tensors[name] = info
    for name, file_name in index.items():
        if name not in tensors:
            raise LoadError(
                f"{path / file_name}: tensor {name} is missing, though {_format_of(path).index} says that this file "
                "has it; download the file again"
            )
    return tensors


def _lacks(path: Path, *, weights: bool) -> str | None:
    """Return the first file that a folder of the cache lacks, as after an interrupted download; None: it has its
    config, and the weights if asked for.

    A folder without weights has a tokenizer file beside its config.
    """
    if not (path / CONFIG_FILE).exists():
        return CONFIG_FILE
    if not weights:
        return None if any(path.glob("tokenizer*")) else "tokenizer.json"
    try:
        return next((file.name for file in weight_files(path) if not file.exists()), None)
    except LoadError:
        return _format_of(path).single


def parts_in_cache(name: str, *, weights: bool = True, revision: str | None = None) -> str:
    """Say what the cache has of a model that it does not have as a whole; empty if it has nothing of it. The arguments
    are those of `resolve_model`."""
    hub_id, quantisation = split_quantisation(name)
    folder = cached_snapshot(hub_id, weights=weights, revision=revision)
    if folder is not None:
        if quantisation is not None or _format_of(folder) is _GGUF:
            try:
                cached_gguf(folder, name)
            except LoadError as error:
                return f"in the cache: {error}"
            return f"the cache has a GGUF model of it: name its quantisation, as in {hub_id}:Q4_K_M"
        return f"the cache has a part of it: {folder} lacks {_lacks(folder, weights=weights)}"
    others = cached_revisions(hub_id)
    return f"the cache has other revisions of it (--revision): {', '.join(others)}" if others else ""
