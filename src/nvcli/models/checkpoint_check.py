"""The check that a checkpoint has the tensors that its config.json describes. Torch-free; reads headers, and of the
data no more than biases that a quantised layer should not have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nvcli.core.system.regular_file import open_regular
from nvcli.core.validation import list_some
from nvcli.errors import LoadError
from nvcli.models.checkpoint import read_tensors
from nvcli.models.checkpoint_layout import LocatedTensors, locate_tensors
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import EMBEDDING, HEAD, SCORE, model_tensors, unused_tensors
from nvcli.models.kv_scales import is_kv_scale
from nvcli.models.quantisation.modelopt import QUANTISATION_FILE
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.tensor_spec import TensorSpec
from nvcli.worker.distributed.stage import WHOLE, Stage

TIED_HEAD, TIED_TO = f"{HEAD}.weight", f"{EMBEDDING}.weight"
"""A tied LM head, which some tools save as well, and the tensor whose values it must equal."""

_UNUSED_ENDS = ("rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias", ".q_scale")
"""Name suffixes of tensors that checkpoints may have but nvcli does not use: rotary frequencies, masks of attention and
query scales."""
_NUMBER = re.compile(r"\.\d+\.(?:\d+\.)*")
"""The numbers of a layer and an expert in a tensor's name."""
_MOST_SHOWN = 40
"""Names of unused tensors in a line."""
_OF_QUANTISED = {"weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "qweight", "absmax", "SCB"}
"""Last parts of the names of tensors that only quantised checkpoints have."""
_FLOAT_DTYPES, _INTEGER_DTYPES = {"F64", "F32", "F16", "BF16"}, {"I64", "I32"}


def read_model_tensors(config: ModelConfig, path: Path) -> LocatedTensors:
    """Read which of a model's tensors a checkpoint folder has, and where they are. Raises LoadError.

    A tied LM head that is stored alone is the embedding, as in transformers.
    """
    wanted = model_tensors(config, config.dtype)
    located = locate_tensors(config.decoder.layout, read_tensors(path), wanted, config.quantisation)
    if not config.tie_word_embeddings or TIED_TO in located.tensors or TIED_HEAD not in located.tensors:
        return located
    return replace(located, tensors={TIED_TO if n == TIED_HEAD else n: each for n, each in located.tensors.items()})


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo], path: Path, *, stage: Stage = WHOLE) -> None:
    """Raise LoadError unless `tensors`, which `read_model_tensors` found in `path`, are those of the model.

    Every tensor that the stage needs must be present, with the right shape and a readable type, and every tensor must
    be known to some stage.
    """
    of_quantised = (info for name, info in tensors.items() if name.rpartition(".")[2] in _OF_QUANTISED)
    if config.quantisation is None and (part := next(of_quantised, None)) is not None:
        raise part.error(
            "belongs to a quantised weight, but neither config.json (`quantization_config`) nor "
            f"{QUANTISATION_FILE} says how it is quantised; download these files again"
        )
    known = {name for tensor in model_tensors(config, config.dtype) for name in tensor.stored_names}
    known.update(unused_tensors(config))
    if config.tie_word_embeddings:
        known.add(TIED_HEAD)
    unknown = [name for name in tensors if name not in known and not is_kv_scale(name)]
    extra = [tensors[name] for name in unknown if not name.endswith(_UNUSED_ENDS)]
    if config.quantisation is not None:
        extra = [info for info in extra if not _is_zero_bias(info)]
    _check_needed(model_tensors(config, config.dtype, stage), tensors, path, extra)
    if extra:
        names = [info.name for info in extra]
        raise LoadError(f"{extra[0].file}: {_some('unknown to the model that config.json describes', names)}")


def find_unused(config: ModelConfig, located: LocatedTensors, *, reads_kv_scales: bool) -> tuple[str, ...]:
    """Return the names, as in the files, of a checkpoint's tensors that no stage of the model reads, though all are
    known: other parts of a larger model, a copy of a tied head, scales of a KV cache."""
    read = {name for tensor in model_tensors(config, config.dtype) for name in tensor.stored_names}
    unread = {name: info for name, info in located.tensors.items() if name not in read}
    return *located.left, *(info.name for name, info in unread.items() if not (reads_kv_scales and is_kv_scale(name)))


def describe_unused(names: Collection[str]) -> str:
    """Return the line that lists unused tensors; numbers in their names are `*`, and equal ones are counted."""
    patterns = Counter(sorted(_NUMBER.sub(".*.", name) for name in names))
    shown = [name if count == 1 else f"{name} (× {count:,})" for name, count in patterns.items()]
    if len(shown) > _MOST_SHOWN:
        shown[_MOST_SHOWN:] = [f"and {len(shown) - _MOST_SHOWN:,} more names"]
    return f"{len(names):,} tensors of the checkpoint are not used: {', '.join(shown)}"


def _check_needed(
    needed: Iterable[TensorSpec], tensors: Mapping[str, TensorInfo], path: Path, extra: Sequence[TensorInfo]
) -> None:
    """`extra`: tensors that are none of the model's."""
    wanted = {name: tensor for tensor in needed for name in tensor.stored_names}
    if missing := [name for name in wanted if name not in tensors]:
        raise LoadError(f"{path}: {_some('missing from the checkpoint', missing)}{_hint(missing, extra)}")
    for name, tensor in wanted.items():
        found, shape = tensors[name], tensor.stored_shape
        if found.shape != shape:
            classes = f" ({shape[0]:,} classes, by `num_labels` or `id2label`)" if name == f"{SCORE}.weight" else ""
            raise found.error(f"has shape {list(found.shape)}, config.json asks for {list(shape)}{classes}")
        is_plain = found.codes is None and (found.form is None or found.form.blocks is None)
        dtypes = _INTEGER_DTYPES if tensor.dtype == "int32" else _FLOAT_DTYPES
        if is_plain and found.dtype not in dtypes:
            raise found.error(f"is stored as {found.dtype}; supported: {', '.join(sorted(dtypes))}")


def _is_zero_bias(info: TensorInfo) -> bool:
    """Tell whether a tensor is a bias of zeros, as AutoGPTQ writes for layers without one (Qwen2.5's GPTQ files)."""
    if not info.name.endswith(".bias") or len(info.shape) != 1 or info.stored is None:
        return False
    with open_regular(info.file) as file:
        file.seek(info.stored.offset)
        return not file.read(info.num_bytes).strip(b"\0")


def _some(what: str, names: list[str]) -> str:
    return f"tensor{'s' if len(names) > 1 else ''} {what}: {list_some(names, 3)}"


def _hint(missing: list[str], extra: Sequence[TensorInfo]) -> str:
    if missing == [TIED_HEAD]:
        return "; if it shares the embedding's weight, config.json must say `tie_word_embeddings: true`"
    if extra:
        return f"; the files hold {extra[0].name}, so the names have been changed, or config.json is another model's"
    return ""
