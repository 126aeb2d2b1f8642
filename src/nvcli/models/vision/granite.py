"""The tower of Granite 4 Vision (SigLIP, https://arxiv.org/abs/2303.15343), as config.json spells it. Torch-free.

Several of its layers give the decoder tokens, which are added to the residual stream before layers of it. Queries make
these of windows of patches: queries of the squares' means, and of each patch of the squares by itself.
"""

from __future__ import annotations

import re

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.siglip import SQUARES, siglip_sizes
from nvcli.models.vision.vision_config import TOWER, DeepOutput, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import image_token, read_tiles

_SQUARE = 2
_HEAD = 64
"""The size of a head of queries."""
_MAP, _TARGETS = "deepstack_layer_map", "spatial_target_layers"
_LAYERS, _SPATIAL = "layerwise_projectors", "spatial_projectors"
_RENAMED = (
    ("qformer.layernorm.", "first_norm."),
    ("qformer.encoder.layer.0.", ""),
    *((f"attention.attention.{name}.", f"attn.{name[0]}_proj.") for name in ("query", "key", "value")),
    ("attention.output.dense.", "attn.proj."),
    ("attention.output.LayerNorm.", "attn.norm."),
    ("intermediate_query.dense.", "linear_fc1."),
    ("output_query.dense.", "linear_fc2."),
    ("output_query.LayerNorm.", "last_norm."),
    ("out_linear.", "projection."),
)


def read_granite_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Granite 4 Vision."""
    config.only(vision_feature_select_strategy="full", use_spatial_sampling=True, spatial_stride=_SQUARE)
    vision.only(model_type="siglip_vision_model")
    key = "qformer_config"
    queries = config.object(key) if config.has(key) else config.with_values({}, f"{key}.")
    queries.only(num_hidden_layers=1, cross_attention_frequency=1, use_qformer_text_input=False, hidden_act="gelu")
    sizes = siglip_sizes(vision, text)
    tiles = read_tiles(vision, sizes["patch_size"], _SQUARE, default=224)
    rate = config.get("downsample_rate", str)
    whole = re.fullmatch(r"(\d{1,4})/(\d{1,4})", rate)
    tokens, patches = map(int, whole.groups()) if whole else (0, 0)
    if not tokens or patches != _SQUARE * tokens or tiles["tile_tokens"] % tokens:
        problem = "is not supported: windows must divide a tile, and have one token for each 2 × 2 patches"
        raise config.error("downsample_rate", f"{show(rate)} {problem}")
    if sizes["hidden_size"] % _HEAD:
        raise vision.error("hidden_size", f"{sizes['hidden_size']} is not a multiple of {_HEAD}")
    deep, projectors = _outputs(config, text, sizes["depth"])
    paths = {first: f"{TOWER}.deepstack_merger_list.{number}." for number, first in enumerate(projectors[1:])}
    paths[projectors[0]] = f"{TOWER}.merger."
    return VisionConfig(
        names=TowerNames(
            prefixes=(
                *((f"{first}.query", f"{path}queries.weight") for first, path in paths.items()),
                *((f"{first}.image_positions", f"{path}places.weight") for first, path in paths.items()),
                *((f"{first}.", path) for first, path in paths.items()),
                ("image_newline", f"{TOWER}.newline.weight"),
                *SQUARES.prefixes,
            ),
            renamed=(*_RENAMED, *SQUARES.renamed),
            left=(*SQUARES.left, f"{TOWER}.last_norm."),
        ),
        processor="llava_next",
        merger=MergerConfig(
            kind="queries",
            size=queries.positive("intermediate_size", 3072),
            layer_eps=queries.positive_number("layer_norm_eps", 1e-12),
            num_heads=sizes["hidden_size"] // _HEAD,
        ),
        has_newlines=True,
        window_tokens=tokens,
        full_layers=tuple(range(sizes["depth"])),
        deepstack=deep,
        image_token_id=image_token(config, 32_000),
        **tiles,
        **{**sizes, "has_last_norm": False},
    )


def _outputs(config: JsonFile, text: JsonFile, depth: int) -> tuple[tuple[DeepOutput, ...], list[str]]:
    """Read the deep outputs, and how files name what makes the tokens' embeddings and what makes each of them."""
    pairs, count = config.values.get(_MAP), text.positive("num_hidden_layers")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise config.error(_MAP, f"{show(pairs)} is not a list of pairs of layers")
    source, targets = config.get("spatial_vision_layer", int, -1), config.values.get(_TARGETS) or [12, 15, 18, 21]
    if not isinstance(targets, list) or len(targets) != _SQUARE**2:
        raise config.error(_TARGETS, f"{show(targets)} is not a list of {_SQUARE**2} layers")
    found = [(f"{_LAYERS}.{number}", *pair, None) for number, pair in enumerate(pairs)]
    found += [(f"{_SPATIAL}.{number}", source, target, number) for number, target in enumerate(targets)]
    outputs: list[DeepOutput] = []
    names: list[str] = []
    for name, given, target, patch in found:
        if type(given) is not int or type(target) is not int:
            raise config.error(_MAP, f"{show(given)} and {show(target)} are not numbers of layers")
        layer = given + depth if given < 0 else given - 1
        first = any(target == output.target for output in outputs)
        if not 0 <= layer < depth or not 0 <= target < count or first:
            problem = f"layer {given} of the tower's {depth} for layer {target} of the decoder's {count} "
            raise config.error(_MAP, problem + "is not there, or not the first for it")
        outputs.append(DeepOutput(layer=layer, target=target, patch=patch))
        names.append(name)
    embedding = DeepOutput(layer=depth - 1, target=0)
    if embedding not in outputs:
        raise config.error(_MAP, "has not the tower's last layer for the decoder's first, layer 0")
    names.insert(0, names.pop(outputs.index(embedding)))
    return tuple(output for output in outputs if output != embedding), names
