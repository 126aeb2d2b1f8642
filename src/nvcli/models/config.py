"""ModelConfig: what nvcli needs to know about a checkpoint, read from config.json and generation_config.json.

With `generation_config.py` it is the one place that knows how transformers' versions spell these files. Torch-free and
cheap to import. Everything that cannot be served is refused here, by name, before any process is started or weight is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from nvcli.core.config_types import FOUR_BITS, KeptWeights
from nvcli.core.task_config import Classifier
from nvcli.core.validation import show
from nvcli.errors import ConfigError
from nvcli.kernels.weight_formats import AFFINE_GROUPS, FP8_ALIGNMENT, FP8_BLOCK, FP8Scaling, StoredGroups
from nvcli.models.checkpoint_layout import PLAIN_LAYOUT
from nvcli.models.classifier import read_classifier
from nvcli.models.config_overrides import NO_OVERRIDES, check_overrides, with_overrides
from nvcli.models.draft_head_config import DraftHeadConfig
from nvcli.models.families.catalogue import CLASSIFIER, find_family
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.generation_config import GENERATION_CONFIG_FILE, eos_token_ids, generation_defaults, not_applied
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import PREDICTION, DecoderConfig, LayerConfig
from nvcli.models.mixers.mixer import Block, Mixer, Piece, Ranks
from nvcli.models.quantisation.formats import read_quantisation
from nvcli.models.quantisation.kept import problems_of_cut_groups, stored_groups
from nvcli.models.quantisation.modelopt import QUANTISATION_FILE
from nvcli.models.quantisation.module_names import name_patterns
from nvcli.models.quantisation.quantisation import Quantisation
from nvcli.models.tensor_spec import StoredDtype
from nvcli.models.unsupported import describe_unsupported
from nvcli.models.vision.vision_config import VisionConfig
from nvcli.models.vision.vision_file import vision_section
from nvcli.worker.distributed.stage import Stage

CONFIG_FILE = "config.json"
_TEXT, _VISION, _TIED = "text_config", "vision_config", "tie_word_embeddings"
_LIST_OF_MODELS = "`nvcli models` lists what is supported"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shapes and settings of a decoder-only model: of the whole model, not of one rank."""

    architecture: str
    decoder: DecoderConfig
    vocab_size: int
    hidden_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: StoredDtype
    """The type that the weights are stored in, or are meant to be used in."""
    eos_token_ids: tuple[int, ...]
    """The end-of-sequence ids of both files, each once."""
    generation_defaults: Mapping[str, Any] = field(hash=False)
    """Sampling defaults of generation_config.json, under `SamplingParams`' names; see `generation_config.py`. They are
    not checked: a run may ignore them (`generation_config: none`)."""
    not_applied: Mapping[str, Any] = field(hash=False)
    """Keys of generation_config.json that choose tokens in transformers and have no effect here, with their values."""
    expert_parallel: bool = False
    """Whether each rank of a layer holds some experts whole (`enable_expert_parallel`) rather than a part of every
    expert."""
    attention_dp: bool = False
    """Whether each rank of a layer computes the attention of other requests, with all heads (`enable_attention_dp`),
    rather than some heads of all requests."""
    stores_wide_routers: bool = False
    """Whether the checkpoint stores the routers of experts in float32 (`stored_tensors.py`)."""
    quantisation: Quantisation | None = None
    """How the checkpoint's linear layers or experts are quantised; None if they are not."""
    quantization: KeptWeights = "none"
    """How ranks keep the weights of linear layers: in the run's type, in FP8, or in the 4 bits of the checkpoint."""
    has_head: bool = True
    """Whether the checkpoint has an LM head. Bare decoders and classifiers have none and generate no tokens."""
    classifier: Classifier | None = None
    """The classes that the checkpoint's head tells apart; None: it is no classifier."""
    vision: VisionConfig | None = None
    """The vision tower that the checkpoint brings; None: it brings none that is computed."""
    has_tower: bool = False
    """Whether the run reads images, by that tower."""
    draft_head: DraftHeadConfig | None = None
    """The head by which the run drafts tokens; None: it uses none."""

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """Each layer's config, in layer order."""
        return self.decoder.layers

    @property
    def mixers(self) -> tuple[tuple[Mixer, ...], ...]:
        """The token mixers of each layer, and of the draft head's layers after them: the layers of the KV cache."""
        of_head = () if self.draft_head is None else self.draft_head.mixers
        return (*(layer.mixers for layer in self.layers), *((mixer,) for mixer in of_head))

    @property
    def both_ways(self) -> bool:
        """Whether the tokens of a prompt attend to those after them, so that the model gives no next tokens."""
        return self.decoder.both_ways

    @property
    def most_chosen(self) -> int:
        """The most keys that a token attends to in layers where they are chosen for it; 0: there are none."""
        return max((mixer.most_chosen or 0 for of_layer in self.mixers for mixer in of_layer), default=0)

    @property
    def fp8_scaling(self) -> FP8Scaling:
        """Scaling of weights that ranks keep in FP8: per block if the checkpoint has blocks, otherwise per row, as
        those of experts in MXFP4 have it in any case."""
        blocks = self.quantisation is not None and self.quantisation.weight_block == (FP8_BLOCK, FP8_BLOCK)
        return "block" if blocks else "channel"

    @property
    def has_fp8_beside(self) -> bool:
        """Whether the checkpoint has experts in MXFP4 beside other layers in FP8, which ranks then keep, too."""
        return self.quantisation is not None and self.quantisation.has_fp8_beside

    @property
    def stored_groups(self) -> StoredGroups:
        """How the checkpoint groups its 4-bit weights. Raises ConfigError if it has none or ranks cannot keep them."""
        return stored_groups(self.quantisation, self.quantization, has_experts=self.has_experts)

    @property
    def keeps_head(self) -> bool:
        """Whether ranks keep the LM head, or the embedding that it is tied to, in the 4 or 8 bits of the checkpoint.

        Qwen3-8B's in Q6_K takes an H200 192 µs in place of 302 for a row, which is 3.6 % of a step, as long as one in
        bfloat16 for 128 rows, 166 µs more for 256, which is 0.7 % of a step, and five eighths of the memory.
        """
        if self.quantisation is None or self.quantization not in FOUR_BITS or self.decoder.layout.is_headless:
            return False
        return self.quantisation.has_head and not self.quantisation.has_column_order

    @property
    def has_experts(self) -> bool:
        return any(layer.routing is not None for layer in self.decoder.layer_kinds)

    def attention_ranks(self, size: int) -> int:
        """Return the number of ranks, out of `size`, that share the heads of a request."""
        return 1 if self.attention_dp else size

    def ranks(self, size: int, block: Block) -> Ranks:
        """Return how `size` ranks share a block of a layer."""
        size = self.attention_ranks(size) if isinstance(block, Mixer) else size
        return Ranks(size=size, expert_parallel=self.expert_parallel)

    @property
    def rounds_inputs(self) -> bool:
        """Whether linear layers round each row of their input to 8 bits."""
        return self.quantisation is not None and self.quantisation.rounds_inputs

    def with_quantization(self, quantization: KeptWeights) -> ModelConfig:
        """Return the model with its weights kept in `quantization`. Raises ConfigError if the checkpoint lists its
        unquantised layers by patterns that cannot be used, or lacks the 4-bit weights that ranks are to keep."""
        if quantization != "none" and self.quantisation is not None:
            name_patterns(self.quantisation.left_alone)
        if quantization != "none" and self.rounds_inputs:
            raise ConfigError(
                f"`quantization` is {quantization}, and the layers of this checkpoint round their input to 8 bits, for "
                "which their weights are kept as they are: use quantization: none"
            )
        if quantization in FOUR_BITS:
            stored_groups(self.quantisation, quantization, has_experts=self.has_experts)
        return replace(self, quantization=quantization)

    def leaves_alone(self, module: str) -> bool:
        """Whether the checkpoint lists a module of the decoder as not quantised. Of GGUF's affine types it lists what
        cannot be kept in them, but in FP8."""
        if self.quantisation is None or (self.quantisation.numbers == "affine" and self.quantization == "fp8"):
            return False
        return self._is_listed(module, self.quantisation.left_alone)

    def groups_of(self, modules: Iterable[str]) -> StoredGroups:
        """Return how the checkpoint groups the 4-bit weights of modules that are kept in the same way. Raises
        ConfigError if ranks cannot keep them."""
        groups, modules = self.stored_groups, tuple(modules)
        if self.quantisation is None or groups.kind != "affine":
            return groups
        wide, narrow = (
            any(self._is_listed(module, names) for module in modules)
            for names in (self.quantisation.wide, self.quantisation.narrow_groups)
        )
        return StoredGroups(kind="affine in 8 bits" if wide else "affine", size=AFFINE_GROUPS[narrow])

    def _is_listed(self, module: str, names: tuple[str, ...]) -> bool:
        """Whether a list of a quantised checkpoint has a module of the decoder."""
        assert self.quantisation is not None
        layout = PLAIN_LAYOUT if self.quantisation.names_decoder else self.decoder.layout
        return any(map(name_patterns(names).match, layout.stored_modules(module)))

    def with_mtp(self) -> ModelConfig:
        """Return the model with the head for multi-token prediction that its checkpoint brings. Raises ConfigError if
        it brings none."""
        head = self.decoder.mtp
        if head is None:
            raise ConfigError(
                f"`speculation.method` (--speculate) is mtp, and this model ({self.architecture}) has no head for "
                "multi-token prediction: use lookup, or leave it out"
            )
        return replace(self, draft_head=head, decoder=replace(self.decoder, layout=head.layout(self.decoder.layout)))

    def for_length(self, max_model_len: int) -> ModelConfig:
        """Return the model as runs of at most this many tokens compute it."""
        return replace(self, decoder=self.decoder.for_length(max_model_len))

    def with_tower(self) -> ModelConfig:
        """Return the model with its vision tower. Raises ConfigError if it has none."""
        if self.vision is None:
            raise ConfigError(f"`images` is always, and this model ({self.architecture}) reads no images; leave it out")
        decoder = replace(self.decoder, layout=replace(self.decoder.layout, has_tower=True))
        return replace(self, has_tower=True, decoder=decoder)

    def headless(self) -> ModelConfig:
        """Return the model as runs without an LM head need it: one in the files is ignored, and the embedding takes its
        place, which needs no memory. Hidden states are not scaled for it."""
        layout, prediction = replace(self.decoder.layout, is_headless=True), self.decoder.prediction_head
        if prediction is not None and self.classifier is None:
            layout, prediction = replace(layout, left=(*layout.left, f"{PREDICTION}.")), None
        decoder = replace(self.decoder, layout=layout, has_head_bias=False, logit_scale=1.0, prediction_head=prediction)
        return replace(self, tie_word_embeddings=True, decoder=decoder)

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError if the model cannot be sharded over `size` ranks."""
        if problems := self._problems_of_cut(size):
            possible = [n for n in range(1, 17) if self.divides_by(n)]
            way_out = "" if self.quantization == "none" else "; or quantization: none"
            raise ConfigError(
                f"tensor_parallel_size {size} does not fit this model: {'; '.join(problems)}. "
                f"Possible: {', '.join(map(str, possible)) or 'none'}{way_out}"
            )

    def check_pipeline_parallel(self, size: int) -> None:
        """Raise ConfigError if the model has fewer layers than stages, or its layers cannot be split into stages."""
        first_only = None
        if self.decoder.layer_inputs is not None:
            first_only = "each layer of this model has an input of its own, which only the first stage could compute"
        elif self.decoder.keeps_embeddings:
            first_only = "layers of this model read the embeddings of tokens, which only the first stage has"
        elif self.decoder.has_loops:
            first_only = "layers of this model go back to what an earlier one was given, which its stage has"
        if size > 1 and first_only is not None:
            raise ConfigError(f"pipeline_parallel_size (--pp) is {size}, and {first_only}: leave it out, or use --tp")
        if size > 1 and any(layer.mixer.reads_kv_of is not None for layer in self.decoder.layer_kinds):
            raise ConfigError(
                f"pipeline_parallel_size (--pp) is {size}, and later layers of this model read the keys and values of "
                "earlier ones, which are in another stage: leave it out, or use --tp"
            )
        most = self.num_layers // (1 + self.decoder.has_shortcuts)
        stages = (self.decoder.stage_layers(Stage(index, size)) for index in range(size if size <= most else 0))
        mixers = ([self.layers[number].mixer for number in stage] for stage in stages)
        firsts = (next((mixer for mixer in of_stage if mixer.most_chosen), None) for of_stage in mixers)
        if any(first is not None and first.reads_earlier_choice for first in firsts):
            raise ConfigError(
                f"pipeline_parallel_size (--pp) is {size}, and a layer would attend to keys that an earlier stage has "
                "chosen: choose another number, leave it out, or use --tp"
            )
        if size > most:
            what = "pairs of layers" if self.decoder.has_shortcuts else "layers"
            raise ConfigError(
                f"pipeline_parallel_size (--pp) is {size}, and this model has {most} {what}, of which each stage needs "
                f"one: lower it to {most} or less"
            )

    def check_batch_invariant(self) -> None:
        """Raise ConfigError if a token's results cannot be made bitwise identical in every batch."""
        blocks = (block for layer in self.decoder.layer_kinds for block in layer.blocks)
        problems = [block.batch_dependence for block in blocks if block.batch_dependence is not None]
        if self.decoder.num_streams > 1:
            problems.append("residual streams whose shares may round otherwise where there are other numbers of rows")
        if self.rounds_inputs:
            problems.append("layers that round their input to 8 bits")
        if self.quantization != "none":
            problems.append(
                f"weights kept in {self.quantization}, whose products depend on the batch (`quantization`: none keeps "
                "plain ones)"
            )
        if problems:
            raise ConfigError(
                f"`batch_invariant` is true, and this model ({self.architecture}) has "
                f"{', and '.join(dict.fromkeys(problems))}: set `batch_invariant` to false"
            )

    def divides_by(self, size: int) -> bool:
        """Whether the model can be sharded over `size` ranks."""
        return not self._problems_of_cut(size)

    def _problems_of_cut(self, size: int) -> list[str]:
        """Return the reasons why the model cannot be sharded over `size` ranks; empty if it can."""
        problems: list[str] = []
        if size > 1 and self.rounds_inputs:
            problems.append("its layers round rows to 8 bits by their largest number, of which ranks have parts")
        for layer in self.decoder.layer_kinds:
            shared = [(block, self.ranks(size, block)) for block in layer.blocks]
            for block, ranks in shared:
                problems += block.check(ranks)
            pieces = [piece for block, ranks in shared if not problems for piece in block.pieces(ranks)]
            if self.quantization == "fp8" and not problems:
                problems += self._problems_of_fp8(pieces)
            elif self.quantization in FOUR_BITS and not problems:
                problems += problems_of_cut_groups(self.stored_groups, self.hidden_size, pieces, size)
                if self.has_fp8_beside:
                    problems += self._problems_of_fp8([piece for piece in pieces if not piece.is_of_experts])
        for block in self.draft_head.blocks if self.draft_head is not None and not problems else ():
            problems += (f"{problem} in the head that drafts" for problem in block.check(self.ranks(size, block)))
        return list(dict.fromkeys(problems))

    def _problems_of_fp8(self, pieces: list[Piece]) -> Iterator[str]:
        """Yield the FP8 weights whose pieces would not be whole blocks, or would be too narrow for FP8 units."""
        for piece in pieces:
            unit, what = FP8_ALIGNMENT, f"multiples of {FP8_ALIGNMENT}"
            if self.fp8_scaling == "block" and not (piece.is_of_experts and self.has_fp8_beside):
                unit, what = FP8_BLOCK, f"blocks of {FP8_BLOCK} × {FP8_BLOCK}"
            if piece.length % unit:
                yield f"each rank's {piece.length:,} of {piece.projections} are not {what} in FP8"
        if self.hidden_size % FP8_ALIGNMENT:  # its last block may be incomplete
            yield f"each rank's {self.hidden_size:,} of the hidden size are not multiples of {FP8_ALIGNMENT} in FP8"


def load_model_config(
    path: Path,
    *,
    expert_parallel: bool = False,
    attention_dp: bool = False,
    overrides: Mapping[str, Any] = NO_OVERRIDES,
) -> ModelConfig:
    """Read the config files of a checkpoint folder.

    `expert_parallel`, `attention_dp`: see `ModelConfig`. `overrides` replace values of config.json. Raises LoadError
    naming the file and the key, and ConfigError for an unsupported architecture, for expert parallelism in a model
    without experts, for attention by rows in a model that cannot have it, and for an override that changes nothing.
    """
    file = JsonFile.read(path / CONFIG_FILE)
    others = [JsonFile.read_if_present(path / name) for name in (GENERATION_CONFIG_FILE, QUANTISATION_FILE)]
    model = _read_model(with_overrides(file, overrides), *others)
    check_overrides(file, overrides, lambda changed: _read_model(changed, *others))
    if expert_parallel and not model.has_experts:
        raise ConfigError(
            f"`enable_expert_parallel` (--ep) is true, and this model ({model.architecture}) has no experts: leave it "
            "out"
        )
    if attention_dp:
        _check_attention_dp(model)
    return replace(model, expert_parallel=expert_parallel, attention_dp=attention_dp)


def _check_attention_dp(model: ModelConfig) -> None:
    """Raise ConfigError if the blocks after attention cannot be computed by other ranks than the attention."""
    layers = model.decoder.layer_kinds
    problem = None
    if model.decoder.layer_inputs is not None:
        problem = "inputs of each layer besides the residual stream"
    elif any(layer.is_parallel for layer in layers):
        problem = "MLPs that read what attention reads"
    elif any(layer.mlp is not None and layer.mlp.reads_stream for layer in layers):
        problem = "experts with norms of their own"
    if problem is not None:
        raise ConfigError(
            f"`enable_attention_dp` (--attention-dp) is true, and this model ({model.architecture}) has {problem}: "
            "leave it out"
        )


def _read_model(config: JsonFile, generation: JsonFile, modelopt: JsonFile) -> ModelConfig:
    """Read what the files say. Raises LoadError and ConfigError."""
    architecture, family = _family(config, lambda other: _read_model(other, generation, modelopt))
    key = f"{family.part}_config"
    part = (config.object(key) if family.part and config.has(key) else config).with_names(family.whole_keys)
    text = _text_config(part, family)
    quantisation = read_quantisation(config, text, modelopt, family.quantisations)
    decoder = family.read(ModelFile(text.path, text.values, text.section, text.changed, text.names_in_file))
    if not decoder.both_ways and (architecture in family.encoders or not text.get("is_causal", bool, True)):
        decoder = _with_both_ways(text, decoder)
    vision = None
    layout = replace(decoder.layout, is_part=text.section != "")
    if family.part:
        layout = replace(layout, starts=((f"{family.part}.", ""), *layout.starts))
    if family.read_vision is not None and part.values.get(_VISION) is not None:
        vision = family.read_vision(part, vision_section(part), text)
        layout = replace(layout, tower=vision.names)
    if quantisation is not None and quantisation.names_decoder:
        quantisation = quantisation.renamed(layout.decoder_name)
    vocab_size, eos_ids = text.positive("vocab_size"), eos_token_ids(generation, config, text)
    longest = text.positive("max_position_embeddings", least=2)  # a prompt and its answer
    model = ModelConfig(
        architecture=architecture,
        decoder=replace(decoder, layout=layout),
        vision=vision,
        vocab_size=vocab_size,
        hidden_size=text.positive("hidden_size"),
        tie_word_embeddings=_ties_embeddings(part, text, family),
        max_position_embeddings=min(longest, decoder.max_positions or longest),
        dtype=_dtype(config, part, text),
        eos_token_ids=eos_ids,
        generation_defaults=generation_defaults(generation, vocab_size, eos_ids),
        not_applied=not_applied(generation),
        quantisation=quantisation,
        has_head=architecture in family.architectures,
        classifier=read_classifier(config, text, decoder) if architecture.endswith(CLASSIFIER) else None,
    )
    return model if model.has_head else model.headless()


def _with_both_ways(text: JsonFile, decoder: DecoderConfig) -> DecoderConfig:
    """Return a decoder whose tokens attend to those after them, too. Raises LoadError for layers that cannot."""
    found = decoder.with_both_ways()
    if found is None:
        raise text.error("is_causal", "false is not supported for the layers of this model, which read earlier tokens")
    return found


def _family(config: JsonFile, read: Callable[[JsonFile], object]) -> tuple[str, Family]:
    """Return the architecture, and the family that it belongs to. Raises ConfigError if there is none.

    `read` reads a whole config.json.
    """
    names = config.values.get("architectures") or []
    if not isinstance(names, list) or not names:
        way_out = '--hf-overrides \'{"architectures": ["NAME"]}\' names one'
        raise config.error("architectures", f"{show(names)} names no architecture; {way_out}; {_LIST_OF_MODELS}")
    for name in names:
        family = find_family(name) if isinstance(name, str) else None
        if family is not None:
            return name, family
    name = show(names[0]).strip('"')
    raise ConfigError(
        f"{config.path}: `architectures`: {name} is not supported: {describe_unsupported(name, config, read)}; "
        f"{_LIST_OF_MODELS}"
    )


def _text_config(config: JsonFile, family: Family) -> JsonFile:
    """Return the settings of the text model: a section of their own if the checkpoint holds more than text."""
    found = config.values.get(_TEXT)
    if found is not None and not isinstance(found, dict):
        raise config.error(_TEXT, f"{show(found)} is not an object")
    name = config.names_in_file.get(_TEXT, _TEXT)
    text = config if found is None else config.with_values(found, f"{config.section}{name}.")
    return text.with_names(family.keys).with_defaults(family.defaults)


def _ties_embeddings(config: JsonFile, text: JsonFile, family: Family) -> bool:
    """Read `tie_word_embeddings`, preferably from the whole model's settings."""
    of_text = text.get(_TIED, bool, family.ties_embeddings)
    return config.get(_TIED, bool, of_text) or (family.ties_as_text and of_text)


def _dtype(*files: JsonFile) -> StoredDtype:
    """Read the type of the weights, from the first of the files that has it."""
    spelled = [(file, key) for file in files for key in ("dtype", "torch_dtype")]  # the latter is the older name
    config, key = next(((file, key) for file, key in spelled if file.values.get(key) is not None), spelled[0])
    name = config.get(key, str, "float32").removeprefix("torch.")
    for dtype in get_args(StoredDtype):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]
    raise config.error(key, f"{show(name)} is not supported; supported: {', '.join(get_args(StoredDtype))}")
