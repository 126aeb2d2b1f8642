"""A GGUF model as a folder in Hugging Face layout, made once and kept in the user's cache: config.json and a tokenizer
from its metadata, and links to its files. Everything else reads this folder as any other. Torch-free."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import Any

from nvcli.core.system.regular_file import check_regular
from nvcli.core.system.user_cache import user_cache
from nvcli.errors import LoadError
from nvcli.kernels.weight_formats import AFFINE_GROUPS
from nvcli.models.gguf.architectures import Architecture, find_architecture, layer_of
from nvcli.models.gguf.files import SUFFIX
from nvcli.models.gguf.header import GGUFHeader, GGUFTensor
from nvcli.models.gguf.settings import read_settings
from nvcli.models.gguf.tensors import read_model_header, separate_names
from nvcli.models.gguf.tokenizer import GGUFVocabulary
from nvcli.models.gguf.types import AFFINE_TYPES
from nvcli.models.quantisation.gguf import AFFINE_METHOD, HEAD, MXFP4_METHOD, NARROW, WIDE
from nvcli.models.safetensors_header import unreadable
from nvcli.models.tensor_info import MXFP4
from nvcli.models.tensor_spec import EXPERTS

_MOST_LETTERS = 60
"""The most letters of a model's name in that of its folder."""
_UNUSED_SECONDS = 30 * 24 * 3600
"""After how long a folder that no run has used is removed, such as that of a file that has changed."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a model that take the place of a tokenizer that is not read."""
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "tokenizer.ggml.suppress_tokens": "suppress_tokens",
}
"""Keys of metadata, and of generation_config.json."""
_POOLINGS = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""sentence-transformers' names of llama.cpp's poolings."""
_DTYPES = {"F32": "float32", "F16": "float16"}


def model_folder(files: Sequence[Path]) -> Path:
    """Return the folder of a model whose files, in order, are these. Raises LoadError for files that are no model that
    can be read, and if the folder cannot be made."""
    files = [Path(os.path.abspath(file)) for file in files]
    beside = [file for name in _TOKENIZER_FILES if (file := files[0].with_name(name)).is_file()]
    folder = user_cache("gguf") / f"{files[0].stem[:_MOST_LETTERS]}-{_identity([*files, *beside])}"
    if os.path.isdir(folder):  # false, too, for a cache that must not be entered
        with suppress(OSError):  # of a cache that cannot be written to
            os.utime(folder)
        return folder
    header = read_model_header(files[0], with_vocabulary=True)
    texts, links = _contents(header, beside)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _forget(folder.parent)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        try:
            _write(made, texts, [*files, *links])
            _move(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise LoadError(
            f"{files[0]}: its config.json and tokenizer cannot be written to {folder.parent}: {error.strerror}; set "
            "XDG_CACHE_HOME to a folder that can be written to"
        ) from None
    return folder


def _identity(files: Sequence[Path]) -> str:
    """Return what changes with the files, from their names, sizes and times: also that of the last change of any kind,
    as a copy may have the time of what it replaces."""
    digest = sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):  # other versions of these make other folders
        digest.update(module.read_bytes())
    for file in files:
        try:
            check_regular(file)
            found = file.stat()
        except OSError as error:
            raise unreadable(file, error) from None
        digest.update(os.fsencode(file) + f"\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ctime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _contents(header: GGUFHeader, beside: Sequence[Path]) -> tuple[dict[str, str], list[Path]]:
    """Return the texts of a model's small files, by their names, and files that are linked."""
    name, _ = find_architecture(header)
    config = make_config(header)
    found = {to: header.metadata.get(key) for key, to in _SAMPLING.items()}
    others = {
        "generation_config.json": _json({key: value for key, value in found.items() if value is not None}),
        **_pooling(header.metadata.get(f"{name}.pooling_type")),
    }
    try:
        vocabulary = GGUFVocabulary(header.file, header.metadata)
        tokenizer = vocabulary.tokenizer(name)
    except LoadError:
        if not any(file.name == _TOKENIZER_FILES[0] for file in beside):
            raise
        end = header.metadata.get("tokenizer.ggml.eos_token_id")
        return {"config.json": _json({**config, "eos_token_id": end}), **others}, [*beside]
    texts = {
        "config.json": _json({**config, "eos_token_id": vocabulary.end_ids() or None}),
        "tokenizer.json": _json(tokenizer),
        "tokenizer_config.json": _json(vocabulary.config()),
        **others,
        **vocabulary.chat_templates(),
    }
    return texts, []


def make_config(header: GGUFHeader) -> dict[str, Any]:
    """Return config.json, without what the vocabulary says. Raises LoadError."""
    name, architecture = find_architecture(header)
    return {
        "architectures": [architecture.name],
        "vocab_size": header.tensor("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        "is_causal": header.metadata.get(f"{name}.attention.causal", True),
        **architecture.config(read_settings(header, name)),
        **_quantisation(header, architecture),
    }


def _pooling(kind: object) -> dict[str, str]:
    """Return sentence-transformers' files that say how embeddings are made, which llama.cpp normalises; none if a
    model's file does not say it."""
    if not isinstance(kind, int) or kind not in _POOLINGS:
        return {}
    modules = [{"type": name, "path": f"{number}_{name}"} for number, name in enumerate(("Pooling", "Normalize"), 1)]
    return {
        "modules.json": _json(modules),
        "1_Pooling/config.json": _json({f"pooling_mode_{_POOLINGS[kind]}": True}),
    }


def _quantisation(header: GGUFHeader, architecture: Architecture) -> dict[str, Any]:
    """Return the section that says which layers' weights are not in blocks that ranks can keep, if most are, and how:
    those of experts in MXFP4, or those of all layers in types of `AFFINE_TYPES`, maybe with the LM head."""
    of_layers = [tensor for tensor in header.tensors.values() if len(tensor.shape) > 1 and layer_of(tensor.name) >= 0]
    for method, kinds in ((MXFP4_METHOD, (MXFP4,)), (AFFINE_METHOD, AFFINE_TYPES)):
        weights = [one for one in of_layers if method != MXFP4_METHOD or one.name.endswith("_exps.weight")]
        kept = [one for one in weights if one.type.name in kinds]
        if 2 * len(kept) <= len(weights):
            continue
        sizes = Counter[str]()
        for one in kept:
            sizes[one.type.name] += one.num_bytes
        found: dict[str, Any] = {"quant_method": method, "type": sizes.most_common(1)[0][0]}
        left = _modules((one for one in weights if one.type.name not in kinds), architecture)
        found["modules_to_not_convert"] = sorted(
            {f"{parent}{own}" for parent, own, _ in (module.partition(f".{EXPERTS}") for module in left)}
        )
        if method == AFFINE_METHOD:
            num_wide = sum(one.num_bytes for one in kept if AFFINE_TYPES[one.type.name].bits > 4)
            found["bits"] = 8 if 2 * num_wide > sizes.total() else 4
            head = header.tensors.get("output.weight") or header.tensor("token_embd.weight")
            found[HEAD] = head.type.name in kinds
            if found[HEAD]:
                kept.append(head)
            wide = [one for one in kept if AFFINE_TYPES[one.type.name].bits > 4]
            narrow = [one for one in kept if AFFINE_TYPES[one.type.name].group < AFFINE_GROUPS[0]]
            found |= {WIDE: _modules(wide, architecture), NARROW: _modules(narrow, architecture)}
        return {"quantization_config": found}
    return {}


def _modules(tensors: Iterable[GGUFTensor], architecture: Architecture) -> list[str]:
    """Return the decoder's names of modules, in order."""
    names = (architecture.decoder_name(tensor.name).removesuffix(".weight") for tensor in tensors)
    return sorted(name for fused in names for name in separate_names(fused))


def _dtype(header: GGUFHeader) -> str:
    """Return the type that the model is meant to be used in: that of its matrices, or bfloat16 for blocks."""
    kinds = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _write(folder: Path, texts: Mapping[str, str], links: Sequence[Path]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for file in links:
        (folder / f"{file.stem}{file.suffix.lower()}").symlink_to(file)
    folder.chmod(0o755)


def _forget(cache: Path) -> None:
    """Remove folders of models whose files are no longer there, and those that have long not been used, as other
    processes may at the same time."""
    for link in glob(f"*/*{SUFFIX}", root_dir=cache):  # Path's own method raises for a folder that is gone
        if not os.path.exists(cache / link):  # or in a folder that must not be entered
            shutil.rmtree((cache / link).parent, ignore_errors=True)
    now = time.time()
    for entry in os.scandir(cache):
        with suppress(FileNotFoundError):
            if now - entry.stat(follow_symlinks=False).st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(entry.path, ignore_errors=True)


def _move(made: Path, folder: Path) -> None:
    """Give a folder its name, unless another process was first."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _json(values: Mapping[str, Any] | list[Any]) -> str:
    return json.dumps(values, ensure_ascii=False, indent=1)
