"""VisionConfig: the description of a vision tower. Torch-free.

One description serves the towers of all families: attention layers over the patches of an image, and a merger that
makes the decoder's embeddings of their results. `tower.py` computes what it says, and the files beside this one read it
from config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.tensor_spec import FUSED
from nvcli.models.vision.image_text import ImageText

TOWER = "visual"
"""The first part of the names of a tower's tensors."""
CHANNELS = 3
NUM_MARKS = 5
"""Vectors of a merger's table that stand around and between the tokens of tiles."""
HALVING = 3
"""Patches of the side of the square that a convolution reads which halves their grid."""
QKV = FUSED["qkv"]
"""The last parts of the names of the projections before attention."""
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""The last parts of the names of a projection's bounds."""

ProcessorKind = Literal[
    "qwen2_vl",
    "minimax_m3",
    "gemma3",
    "gemma4",
    "pixtral",
    "glm46v",
    "hunyuan_vl",
    "deepseek_ocr2",
    "got_ocr",
    "got_ocr2",
    "granite_docling",
    "paddleocr_vl",
    "idefics3",
    "lfm2_vl",
    "cohere2_vision",
    "clip",
    "llava_next",
    "llava_onevision",
    "minicpmv4_6",
    "nemotron_h_omni",
    "kimi_k25",
    "glm5_next",
    "llama4",
    "step3p7",
    "muse_glimmer",
    "video_llama_3",
    "ovis2",
    "idefics2",
]
"""The image processors of transformers, by the first part of their names."""
Interpolation = Literal[
    "corners",
    "borders",
    "faded",
    "enlarged",
    "antialiased",
    "bicubic",
    "resampled",
    "nearest",
    "shares",
    "cropped",
    "axes",
    "turns",
]


MergerKind = Literal[
    "squares",
    "linear",
    "pool",
    "project",
    "patches",
    "gated",
    "bordered",
    "ended",
    "placed",
    "convolved",
    "queries",
    "table",
    "latents",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentsConfig:
    """Layers in which learned latents read the patches of an image and each other."""

    count: int
    """The latents, and the tokens of an image, whatever its size."""
    depth: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MergerConfig:
    """The way from the square of patches that make up a token to its embedding."""

    kind: MergerKind
    """squares: their vectors side by side go through an MLP; linear: they are projected; pool: their mean is normed and
    projected; project: likewise, with a norm that has no weights; patches: they are normed and merged before an MLP;
    gated: they are merged and normed before a gated MLP; bordered: they are normed and merged, then projected twice and
    normed, and learned vectors stand around them and after their rows; ended: they are normed, merged to all that they
    were, and projected, and learned vectors stand after their rows; placed: they are normed and projected,
    and the places of tokens in their tile are added, then normed, projected and normed; convolved: two convolutions
    that halve the grid and double the vectors are projected; queries: their means with learned vectors attend to each
    other and to the patches of their window, in a layer after whose blocks norms are, and are projected; table: they
    are projected and normed to numbers whose softmax weighs the vectors of a table, which has others for marks;
    latents: a gated MLP's results are read by learned latents, which become an image's tokens."""
    size: int
    """The size between the two projections of its MLP, or the last two; convolved: of the result of the second
    convolution, 0 if it is double that of the first; table: its vectors that are weighed; linear, pool, project,
    ended: 0."""
    neck_size: int = 0
    """The size to which a projection and a convolution that keeps the grid, each with a norm, bring patches before
    `convolved`, whose convolutions then have no biases; 0: they stay as they are."""
    is_gated: bool = False
    """Whether the second half of the first projection of `squares` is a gate (SwiGLU)."""
    activation: Literal["gelu", "relu2"] = "gelu"
    """The activation of the MLP of `squares` without a gate; relu2: the square of what is above 0."""
    activates_result: bool = False
    """Whether that activation follows the MLP, too."""
    result_size: int | None = None
    """The size of what the MLP of `squares` gives, which is projected once more; None: it is the decoder's."""
    patch_result_size: int | None = None
    """The size to which an MLP brings each patch before `squares` puts them side by side; None: they stay as they
    are."""
    has_norm: bool = True
    """Whether `squares` has a norm."""
    by_channel: bool = False
    """Whether `squares` puts the numbers of one channel side by side, and not those of one patch."""
    norms_squares: bool = False
    """Whether that norm is over all patches of a token together."""
    has_bias: bool = True
    """Whether its projections have biases."""
    norm: Literal["rms", "layer", "rms from 1"] = "layer"
    """`rms from 1`: an RMS norm whose weights are stored as differences from 1."""
    eps: float = 1e-6
    layer_eps: float = 1e-6
    """The epsilon of the norms of the layer of `queries`, and of that before it."""
    num_heads: int = 0
    """The heads of the layer of `queries`."""
    scale: float = 1.0
    """The factor of the mean of `project`."""
    is_standardised: bool = False
    """Whether a learned shift is subtracted from the scaled mean, and the difference multiplied by learned factors."""
    latents: LatentsConfig | None = None
    """The layers of `latents`; None: the merger is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEncoderConfig:
    """Layers behind the merger in which learned queries read its tokens, and become those of the decoder."""

    hidden_size: int
    depth: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    eps: float
    rope_theta: float
    sides: tuple[int, ...]
    """The tokens of a side of the square images for which there are queries. Behind the tokens of the largest, which
    are whole images, stands a learned vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepOutput:
    """The results of a layer of the tower, which are merged, too, and added to the residual stream behind the first
    layer."""

    layer: int
    """The tower's layer."""
    target: int
    """The decoder's layer before which it is added, from 1 on."""
    patch: int | None = None
    """The patch of a token's square whose vector its queries are made of, where the merger has queries; None: their
    mean."""


def deep_outputs(layers: Sequence[int]) -> tuple[DeepOutput, ...]:
    """Return the outputs of these layers, of which the decoder's first layers get one each, in the tower's order."""
    in_order = sorted(layers)
    return tuple(DeepOutput(layer=layer, target=1 + in_order.index(layer)) for layer in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A tower of attention layers over the patches of an image, and the way of its results into the decoder."""

    names: TowerNames
    """How files name its tensors."""
    processor: ProcessorKind
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int = 0
    """Heads of keys and values; 0: as many as of queries."""
    patch_size: int
    """Pixels of a patch's side."""
    temporal_patch_size: int = 0
    """Frames of a patch, in all of which an image is repeated; 0: weights have no axis of frames."""
    has_last_channels: bool = False
    """Whether the numbers of a patch are pixel by pixel, and not channel by channel."""
    has_first_frames: bool = False
    """Whether they are frame by frame, and not channel by channel."""
    has_flat_patches: bool = False
    """Whether files hold the projection of patches as a matrix, although they are channel by channel."""
    merge_size: int
    """Patches of the side of the square that becomes one token."""
    early_merge: int = 1
    """Patches of the side of the squares that attend among themselves after `early_layer`, each of which is one patch
    for the layers after that; it divides `merge_size`. 1: there are none."""
    early_layer: int = 0
    merger: MergerConfig
    out_size: int
    """The hidden size of the decoder."""
    norm: Literal["rms", "layer"] = "layer"
    eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]
    is_gated: bool = False
    """Whether the MLP multiplies an activated gate with a second projection."""
    limit: float = 0.0
    """Bound of both before that, of the gate from above alone, where layers and a merger `gated` have `silu`; 0: there
    is none."""
    centres_pixels: bool = False
    """Whether the values of pixels, from 0 to 1, become those from -1 to 1."""
    has_patch_bias: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    """Whether the projection after attention has a bias."""
    mlp_bias: bool = True
    qk_norm: Literal["head", "all"] | None = None
    """An RMS norm of queries and keys, by head, where their rotation computes it too, or of all heads together."""
    norms_values: bool = False
    """Whether values are normed by head, too, as their `qk_norm` is, without weights, and scores are not scaled."""
    has_bounds: bool = False
    """Whether learned bounds clamp what each projection of a layer reads, and what it gives."""
    has_result_norms: bool = False
    """Whether the results of attention and MLP are normed."""
    has_layer_scales: bool = False
    """Whether the results of attention and MLP are multiplied by learned factors."""
    has_patch_norm: bool = False
    """Whether the numbers of patches are normed before anything else."""
    has_first_norm: bool = False
    """Whether patches are normed before the first layer."""
    norms_positions: bool = False
    """Whether that norm is of patches with their positions, and of the class token."""
    has_last_norm: bool = False
    """Whether patches are normed after the last layer."""
    has_class_token: bool = False
    """Whether a token of its own is attended to with the patches, and dropped after the last layer."""
    has_flat_class_token: bool = False
    """Whether files hold it as a vector, and not as a row of a matrix."""
    has_last_class_position: bool = False
    """Whether its position is the last of the table, and not the first."""
    num_registers: int = 0
    """Tokens without positions that are attended to likewise."""
    rope: Literal["same", "columns", "halves", "turns", "staggered", "thirds"] | None = None
    """Rotary positions of rows and columns: with the same frequencies (columns: in files, columns come before rows;
    halves: files have columns in the first half of a head, and rows in the second; turns: in them, columns and rows
    take turns; thirds: they turn the second and the last third of what could be turned, and frames the first), or
    taking turns in one list of them. Tokens beside patches are not turned."""
    first_place: int = 0
    """The number of the first row and column there."""
    has_paired_rows: bool = False
    """Whether files have the numbers of a head that are turned together beside each other."""
    rope_theta: float = 10_000.0
    window_tokens: int = 0
    """Tokens of the side of the windows to which attention is limited; 0: there are none."""
    conv_layers: tuple[int, ...] = ()
    """The layers that convolve gated patches with those around them, in place of attention."""
    conv_size: int = 0
    """Patches of the side of the square that such a convolution reads; odd."""
    full_layers: tuple[int, ...] = ()
    """The layers that attend to the whole image where others have windows."""
    distance_window: int = 0
    """Patches of the side of the windows, filled up with zeros, to which attention is limited whose scores depend on
    learned distances of rows and columns; 0: they do not. In `full_layers` they do across the whole image, or tile."""
    tile_tokens: int = 0
    """Tokens of the side of the squares, one below the other, of which an image consists, and to which attention is
    limited; 0: images are of any size."""
    has_newlines: bool = False
    """Whether a learned vector stands at the end of each row of the tokens of an image's tiles."""
    most_tiles: int = 0
    """`GridRule.most_tiles`"""
    num_positions: int = 0
    """Entries of the table of learned positions, a square that is interpolated to the image's grid, or a table for each
    axis; 0: there is none."""
    has_square_table: bool = False
    """Whether files hold them as rows of a square."""
    has_unused_position: bool = False
    """Whether files hold another entry before them, which nothing reads."""
    interpolation: Interpolation = "corners"
    """corners: bilinear, with the corners of the grid on those of the table; borders: bilinear, with their borders on
    each other; faded: like borders, over zeros around the table, and of the turned grid; enlarged: like borders, as if
    the grid were a tenth of a patch larger; antialiased: like borders, over more entries where the grid is smaller;
    bicubic: likewise; resampled: bicubic over more
    entries where the grid is smaller, with borders on each other; nearest: the entry of a patch's first pixel; shares:
    likewise, as float32 has it; cropped:
    like borders, as if the grid were a square of its longer side; axes: none, the entries of a column and a row are
    added; turns: likewise, columns and rows taking turns in one table."""
    encoder: QueryEncoderConfig | None = None
    deepstack: tuple[DeepOutput, ...] = ()
    """In the order of the mergers' numbers in files."""
    axes: tuple[int, ...] = ()
    """For each of the decoder's rotary frequencies, which of a token's positions turns it: 0 (time), 1 (height), 2
    (width) or 3 (image). Frequencies after the last entry are turned by time. Empty: tokens have one position, images
    or not."""
    numbers_images: bool = False
    """Whether a token's positions are those of `numbered_positions`."""
    canvas_marks: tuple[int, ...] = ()
    """The ids of the tokens that mark images and slices and end rows of slices, if images and slices have places on one
    canvas (`canvas_positions`); empty: they have none."""
    attends_both_ways: Literal["", "windows", "all", "prompts"] = ""
    """The decoder's layers in which the tokens of an image attend to all of it, also after them: none, those with a
    window, or all. prompts: all, and so do all tokens of a prompt that has images."""
    image_token_id: int
    """The id that stands in the prompt for each token of an image."""
    text: ImageText | None = None
    """How images are written into prompts; None: each becomes its tokens, and nothing else."""

    @property
    def patch_values(self) -> int:
        """The numbers of a patch."""
        return CHANNELS * max(1, self.temporal_patch_size) * self.patch_size**2

    @property
    def late_merge(self) -> int:
        """Patches of the side of the square that the merger makes one token."""
        return self.merge_size // self.early_merge

    @property
    def token_pixels(self) -> int:
        """Pixels of the side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def tile_pixels(self) -> int:
        """Pixels of the side of a tile, as far as they fill tokens."""
        return self.tile_tokens * self.token_pixels

    def distance_side(self, *, is_whole: bool) -> int:
        """Return the patches of the side of the squares in which scores depend on distances."""
        return isqrt(self.num_positions) if is_whole else self.distance_window

    @property
    def num_outputs(self) -> int:
        """Vectors of `out_size` that a token gets: its embedding, and those of deepstack layers."""
        return 1 + len(self.deepstack)

    @property
    def position_shape(self) -> tuple[int, ...]:
        """The shape of the table of learned positions, without its last dimension."""
        count = self.num_positions
        if self.has_square_table:
            return isqrt(count), isqrt(count)
        by_axis = {"axes": (2, count), "turns": (count, 2)}
        return by_axis.get(self.interpolation, (count + self.num_other_positions,))

    @property
    def num_other_positions(self) -> int:
        """Entries of the table before those of patches."""
        return int(self.has_class_token or self.has_unused_position)

    @property
    def has_row_ends(self) -> bool:
        """Whether learned vectors stand after each row of an image's tokens."""
        return self.merger.kind in ("bordered", "ended")

    @property
    def border(self) -> int:
        """The learned vectors before the first row, and after the last."""
        return int(self.merger.kind == "bordered")

    def num_tokens(self, rows: int, columns: int) -> int:
        """Return the vectors that the tower gives for an image of this many rows and columns of tokens, or of patches
        that latents read."""
        if self.merger.latents is not None:
            return self.merger.latents.count
        return rows * (columns + self.has_row_ends) + 2 * self.border + self.num_behind(rows)

    def num_behind(self, rows: int) -> int:
        """Return the learned vectors behind the tokens of an image with this many rows of them."""
        return int(self.encoder is not None and rows == self.encoder.sides[-1])

    @property
    def smallest_side(self) -> int:
        """The tokens of a side of the smallest square image."""
        return self.tile_tokens or (1 if self.encoder is None else self.encoder.sides[0])

    @property
    def longest_side(self) -> int:
        """The most tokens of an image's side, as far as a table of positions for each axis goes; 0: any number."""
        return self.num_positions // self.merge_size if self.interpolation in ("axes", "turns") else 0

    @property
    def has_whole_prompts(self) -> bool:
        """Whether all tokens of a prompt that has images attend to each other."""
        return self.attends_both_ways == "prompts"

    def is_whole_in(self, window: int | None) -> bool:
        """Whether images are attended both ways in the decoder's layers with this window."""
        return (
            self.attends_both_ways == "all"
            or self.has_whole_prompts
            or (self.attends_both_ways == "windows" and window is not None)
        )

    @property
    def mlp_names(self) -> tuple[tuple[str, ...], str]:
        """The names of an MLP's projections: those from the hidden size, and that back to it."""
        return (("gate_proj", "up_proj"), "down_proj") if self.is_gated else (("linear_fc1",), "linear_fc2")


def turned_by_axis(size: int) -> int:
    """Return how many pairs of a head's numbers each of three axes turns (`thirds`)."""
    return size // 6
