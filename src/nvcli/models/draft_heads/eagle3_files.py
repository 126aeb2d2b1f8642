"""Reading of EAGLE-3 heads: config.json and the tensors, in both layouts in which heads are published. Torch-free.

SafeAILab, SpecForge and Model Optimizer have the settings of the layer at the top level, with what is the head's own
beside them or in `eagle_config`, and call the layer `midlayer`. speculators has them in `transformer_layer_config`, and
calls it `layers.0`. Anything that cannot be computed is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcli.core.system.regular_file import open_regular
from nvcli.core.validation import is_integer, list_some, show
from nvcli.errors import LoadError
from nvcli.models.checkpoint import read_tensors
from nvcli.models.config import CONFIG_FILE, ModelConfig
from nvcli.models.draft_heads.eagle3_config import EMBEDDING, HEAD, LAYER, PREFIX, Eagle3Config
from nvcli.models.families.model_file import MAX_LAYERS, ModelFile
from nvcli.models.json_file import JsonFile
from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.safetensors_header import unreadable
from nvcli.models.tensor_info import TensorInfo

if TYPE_CHECKING:
    import numpy as np

_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
_KIND, _LAYER_CONFIG, _OWN_CONFIG = "speculators_model_type", "transformer_layer_config", "eagle_config"
_QK_NORMS = {"llama": None, "qwen3": "head"}
"""The norm of queries and keys in each kind of layer."""
_NUM_STATES = 3
"""States that a head reads if its config does not list them."""
_OFFSETS, _IS_DRAFTED = "d2t", "t2d"
"""Tensors of a head that drafts some tokens only: for each of its tokens the target's number minus its own, and for
each token of the target whether it is one of them."""
_INTEGERS = {"I64": "<i8", "I32": "<i4", "BOOL": "?"}
"""Types of these tensors."""


def is_eagle3(config: JsonFile) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, in either layout."""
    names = config.values.get("architectures")
    is_named = isinstance(names, list) and any(name in _ARCHITECTURES for name in names)
    return config.values.get(_KIND) == "eagle3" or is_named


def read_eagle3(folder: Path, target: ModelConfig, *, is_random: bool = False) -> Eagle3Config:
    """Read the head in `folder`, which drafts for `target`: its config.json and the headers of its files. `is_random`:
    it gets random weights, and its files are not read; it then has an LM head of its own and no embedding, as most
    have.

    Raises LoadError naming the file and the key or tensor.
    """
    whole = JsonFile.read(folder / CONFIG_FILE)
    file = ModelFile(whole.path, whole.values)
    by_speculators = file.values.get(_KIND) is not None
    own = file if by_speculators else file.object(_OWN_CONFIG)
    layer = file.object(_LAYER_CONFIG) if by_speculators else file
    _check_form(file, own, layer)
    infos = {} if is_random else {_name(name): info for name, info in read_tensors(folder).items()}
    offsets, is_drafted = (infos.pop(f"{PREFIX}{name}", None) for name in (_OFFSETS, _IS_DRAFTED))
    has_embedding, has_lm_head = (f"{name}.weight" in infos for name in (EMBEDDING, HEAD))
    has_lm_head |= is_random
    config = Eagle3Config(
        hidden_size=layer.positive("hidden_size"),
        target_hidden_size=target.hidden_size,
        aux_layers=_aux_layers(file, own, target),
        attention=layer.attention(
            qk_norm=_QK_NORMS[layer.get("model_type", str, "llama")], bias=layer.bias(), rope=layer.rope()
        ),
        mlp=layer.mlp(bias=layer.mlp_bias()),
        norm=layer.rms_norm(),
        # Tools disagree on the default that it has in speculators' layout.
        norms_residual=_flag("norm_before_residual", file, own, is_needed=by_speculators),
        norms_states=_flag("norm_before_fc", file, own),
        norms_each_state=_flag("fc_norm", file, own),
        feeds_normed=_flag("norm_output", file, own),
        has_embedding=has_embedding,
        has_lm_head=has_lm_head,
        is_tied=has_embedding and not has_lm_head and file.get("tie_word_embeddings", bool, False),
        draft_ids=_draft_ids(file, target, offsets, is_drafted, is_random=is_random) if has_lm_head else None,
        tensor_infos=infos,
    )
    _check_sizes(file, layer, config, target)
    context = LayerContext(hidden_size=config.hidden_size, norm=config.norm, dtype=target.dtype)
    known = {tensor.name for tensor in config.tensors(context, target.vocab_size)}
    if unknown := [info for name, info in infos.items() if name not in known]:
        names = list_some([info.name for info in unknown], 3)
        raise LoadError(f"{unknown[0].file}: {names}: no tensor of the head that config.json describes")
    return config


def _name(stored: str) -> str:
    """Return the decoder's name of a tensor in the files."""
    name = stored.removeprefix("model.")
    return f"{LAYER}.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else f"{PREFIX}{name}"


def _check_form(file: ModelFile, own: ModelFile, layer: ModelFile) -> None:
    """Refuse what is no EAGLE-3 head, or one of a form that is not computed here."""
    if not is_eagle3(file):
        key = "architectures" if file.values.get(_KIND) is None else _KIND
        raise file.error(key, f"{show(file.values.get(key))} is not an EAGLE-3 head; speculators say eagle3 there")
    kind = layer.get("model_type", str, "llama")
    if kind not in _QK_NORMS:
        raise layer.error("model_type", f"{show(kind)} is not supported in a head; supported: {', '.join(_QK_NORMS)}")
    if (count := layer.get("num_hidden_layers", int, 1)) != 1:
        raise layer.error("num_hidden_layers", f"{count}: only heads of one layer are supported")
    if (types := layer.values.get("layer_types")) not in (None, ["full_attention"]):
        raise layer.error("layer_types", f"{show(types)} is not supported in a head, only full_attention")
    for section in (file, layer):
        for key in ("quantization_config", "compression_config"):
            if section.has(key):
                raise section.error(key, "quantised heads are not supported; use one with plain weights")
    for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer"):
        if not own.get(key, bool, True):
            raise own.error(key, "false is not supported: the head is of another form")
    if (scale := file.get("logit_scale", float, 1.0)) != 1.0:
        raise file.error("logit_scale", f"{show(scale)} is not supported, only 1")


def _check_sizes(file: ModelFile, layer: ModelFile, config: Eagle3Config, target: ModelConfig) -> None:
    """Refuse a head of another target, and one that lacks what it cannot share with its target."""
    if target.decoder.num_streams > 1:
        raise file.error("architectures", "the model has several residual streams, and EAGLE-3 heads read one")
    if (found := layer.positive("vocab_size")) != target.vocab_size:
        raise layer.error(
            "vocab_size", f"{found:,}, and the model's is {target.vocab_size:,}: use a head of this model"
        )
    own_key = "target_hidden_size"
    section, key = (file, own_key) if file.has(own_key) else (layer, "hidden_size")
    if (found := section.positive(key)) != target.hidden_size:
        raise section.error(key, f"{found:,}, and the model's is {target.hidden_size:,}: use a head of this model")
    shares_embedding, shares_head = not config.has_embedding, not (config.has_lm_head or config.is_tied)
    missing = "embed_tokens.weight" if shares_embedding else "lm_head.weight"
    if (shares_embedding or shares_head) and config.hidden_size != target.hidden_size:
        raise layer.error(
            "hidden_size",
            f"{config.hidden_size:,}, and the model's is {target.hidden_size:,}: the head needs {missing} of its own, "
            "which its files lack",
        )
    drafted = file.values.get("draft_vocab_size")
    if not config.has_lm_head and drafted not in (None, target.vocab_size):
        raise file.error("draft_vocab_size", f"{show(drafted)}, and the files have no lm_head.weight of that size")
    if shares_embedding and target.decoder.embedding_scale != 1.0:
        raise layer.error(
            "hidden_size", "the model scales its embeddings: the head needs embed_tokens.weight of its own"
        )


def _aux_layers(file: ModelFile, own: ModelFile, target: ModelConfig) -> tuple[int, ...]:
    """Read before which layers of the target the head reads the residual stream.

    At the top level (speculators, vLLM), number n is the input of layer n; in `eagle_config` (SpecForge, SGLang, Model
    Optimizer) it is the output of layer n. Without a list, every engine takes the inputs of layer 2, of the middle one
    and of the third last.
    """
    count = target.num_layers
    source = next((section for section in (file, own) if section.has(_IDS)), None)
    if source is None:
        usual = 2, count // 2, count - _NUM_STATES
        if not usual[0] < usual[1] < usual[2]:
            raise file.error(_IDS, f"missing, and a model of {count} layers is too small for the usual ones")
        return usual
    found: Any = source.values[_IDS]
    are_numbers = isinstance(found, list) and all(map(is_integer, found))
    if not are_numbers or not 0 < len(found) <= MAX_LAYERS:
        raise source.error(_IDS, f"{show(found)} is not a list of numbers of layers")
    shift = 0 if source is file else 1
    for number in found:
        if not 0 <= number + shift < count:  # what the last layer gives is computed for few tokens only
            raise source.error(
                _IDS, f"{show(number)}, and the model has {count} layers: allowed are {-shift} to {count - 1 - shift}"
            )
    if len(set(found)) < len(found):
        raise source.error(_IDS, f"{show(found)} names a layer twice")
    return tuple(number + shift for number in found)


def _flag(key: str, file: ModelFile, own: ModelFile, *, is_needed: bool = False) -> bool:
    """Read a flag from either section; it is false if it is absent, unless it `is_needed`."""
    section = file if file.has(key) else own
    return section.get(key, bool) if is_needed else section.get(key, bool, False)


def _draft_ids(
    file: ModelFile,
    target: ModelConfig,
    offsets: TensorInfo | None,
    is_drafted: TensorInfo | None,
    *,
    is_random: bool,
) -> tuple[int, ...] | None:
    """Read which of the target's tokens the head drafts; None: all of them. If it `is_random`, they are spread over
    the vocabulary."""
    key = "draft_vocab_size"
    count = file.positive(key, target.vocab_size)
    if count > target.vocab_size:
        raise file.error(key, f"{count:,} is more than the model's {target.vocab_size:,} tokens")
    if is_random:
        return None if count == target.vocab_size else tuple(i * target.vocab_size // count for i in range(count))
    if offsets is None:
        if count < target.vocab_size:
            raise file.error(key, f"{count:,} of {target.vocab_size:,} tokens, and no tensor d2t says which")
        return None
    import numpy as np

    ids = _integers(offsets, (count,)) + np.arange(count)
    if not (np.diff(ids) > 0).all() or ids[0] < 0 or ids[-1] >= target.vocab_size:
        raise offsets.error(
            f"gives no ascending tokens below {target.vocab_size:,}; use a head of this model, or download it again"
        )
    if is_drafted is not None:
        named = np.flatnonzero(_integers(is_drafted, (target.vocab_size,)))
        if not np.array_equal(named, ids):
            raise LoadError(
                f"{is_drafted.file}: tensors {offsets.name} and {is_drafted.name} name different tokens; download the "
                "head again"
            )
    return tuple(ids.tolist())


def _integers(info: TensorInfo, shape: tuple[int, ...]) -> np.ndarray:
    """Read a tensor of integers or booleans."""
    if info.shape != shape or info.dtype not in _INTEGERS:
        raise info.error(
            f"has shape {list(info.shape)} in {info.dtype}; expected {list(shape)} in {' or '.join(_INTEGERS)}"
        )
    assert info.stored is not None, "it was read from a header"
    import numpy as np

    dtype = np.dtype(_INTEGERS[info.dtype])
    if info.num_bytes != shape[0] * dtype.itemsize:
        raise LoadError(f"{info.file}: corrupt: tensor {info.name} has {info.num_bytes:,} bytes; download it again")
    try:
        with open_regular(info.file) as file:
            file.seek(info.stored.offset)
            values = np.frombuffer(file.read(info.num_bytes), dtype)
    except OSError as error:
        raise unreadable(info.file, error) from None
    return values.astype(np.int64)
