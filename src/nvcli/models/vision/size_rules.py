"""The sizes to which image processors bring images, as their files say it: a function for each kind, from the file and
the tower to a rule. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt
from typing import Literal

from nvcli.core.validation import show
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_size import (
    AreaRule,
    BudgetRule,
    CountRule,
    EdgeRule,
    FilledRule,
    MiddleRule,
    PatchRule,
    ShapeRule,
    SizeRule,
)
from nvcli.models.vision.tile_size import (
    CanvasRule,
    FramedRule,
    GridRule,
    LargeRule,
    QuarterRule,
    SliceRule,
    SplitRule,
    TileRule,
    WideRule,
)
from nvcli.models.vision.vision_config import VisionConfig
from nvcli.models.vision.window_size import WindowRule

Channels = tuple[float, float, float]
CLIP_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)
_MOST_TILES = 64
_MOST_SIDE = 4096
"""The most pixels of a side from which tiles are cut."""
_GRIDS_OF_FEW = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_GRIDS_OF_MANY = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
"""`image_grid_pinpoints` of processors that leave them out."""
_LONGEST, _FIXED = "patch_limit_on_one_side", "fixed_output_tokens"
"""Keys of Kimi K2.5."""


def area_rule(
    least: int, most: int, frames: int = 1, enlarges: Literal["", "floor", "round"] = "", merge: int = 2
) -> Callable[[JsonFile, VisionConfig], SizeRule]:
    """Return what reads the limits of an area, with these defaults, and that of `merge_size`. `frames`: how often an
    image's pixels count."""

    def read(file: JsonFile, vision: VisionConfig) -> SizeRule:
        for key, wanted, default in (("patch_size", vision.patch_size, 14), ("merge_size", vision.merge_size, merge)):
            if (found := file.get(key, int, default)) != wanted:
                raise file.error(key, f"is {found}, and the model's is {wanted}")
        file.only(patch_expand_factor=1)
        edges = _object(file, "size")
        limited = file.replacing(
            min_pixels=file.values.get("min_pixels") or edges.values.get("shortest_edge") or least,
            max_pixels=file.values.get("max_pixels") or edges.values.get("longest_edge") or most,
        )
        return AreaRule(
            side=vision.token_pixels,
            min_pixels=ceil_div(limited.positive("min_pixels"), frames),
            max_pixels=limited.positive("max_pixels") // frames,
            has_row_ends=vision.has_row_ends,
            border=vision.border,
            enlarges=enlarges,
        )

    return read


def edge_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    if file.values.get("do_center_crop"):
        raise file.error("do_center_crop", "true is not supported: leave it out")
    size = _object(file, "size")
    longest = size.positive("longest_edge") if size.values else 1024
    return EdgeRule(side=vision.token_pixels, longest=longest)


def count_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    patch, kernel = file.positive("patch_size", 16), file.positive("pooling_kernel_size", 3)
    if patch * kernel != vision.token_pixels:
        raise file.error("patch_size", f"{patch} × {kernel} is not {vision.token_pixels}, the pixels of a token")
    count = file.positive("max_soft_tokens", 280)
    if count not in _TOKEN_COUNTS or count > vision.longest_side:
        raise file.error(
            "max_soft_tokens",
            f"{count} is not supported; supported: {', '.join(map(str, _TOKEN_COUNTS))}, "
            f"if the tower has positions for as many in a row ({vision.longest_side})",
        )
    return CountRule(side=vision.token_pixels, most=count)


_TOKEN_COUNTS = (70, 140, 280, 560, 1120)


def square_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    if file.values.get("do_pan_and_scan"):
        raise file.error("do_pan_and_scan", "true is not supported: crops of images are not read; supported: false")
    return TileRule(side=vision.token_pixels, tile=_tile(file, vision, 224))


def tile_rule(file: JsonFile, vision: VisionConfig, *, cuts_always: bool = True) -> SizeRule:
    """`cuts_always`: images are cut whatever the file says, as InternVL's (`images_kwargs` in transformers)."""
    if not cuts_always and not file.get("crop_to_patches", bool, False):
        return TileRule(side=vision.token_pixels, tile=_tile(file, vision, 384))
    least, most = file.positive("min_patches", 1), file.positive("max_patches", 12)
    if not least <= most <= _MOST_TILES:
        raise file.error("max_patches", f"{most:,} is not supported; supported: from {least} to {_MOST_TILES}")
    return TileRule(side=vision.token_pixels, tile=_tile(file, vision, 384), least=least, most=most)


def marked_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    rule = tile_rule(file, vision, cuts_always=False)
    assert isinstance(rule, TileRule)
    if file.get("use_covering_area_grid", bool, True):
        rule = replace(rule, least=1, fits="area")
    return replace(rule, is_marked=True)


def quarter_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    assert vision.merger.latents is not None
    size, most = _object(file, "size"), isqrt(vision.num_positions) * vision.patch_size
    shortest, longest = size.positive("shortest_edge", 378), size.positive("longest_edge", 980)
    if not vision.patch_size <= shortest <= longest <= most:
        raise file.error("size", f"is {shortest} to {longest}; supported: from {vision.patch_size} to {most}")
    return QuarterRule(
        side=vision.token_pixels,
        tokens=vision.merger.latents.count,
        shortest=shortest,
        longest=longest,
        is_cut=file.get("do_image_splitting", bool, False),
    )


def page_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(fine_route=False, crop_to_patches=True)
    least, most, more = file.positive("min_patches", 1), file.positive("max_patches", 32), file.get(_MORE, int, 0)
    for key, count in (("max_patches", most), *([(_MORE, more)] if more else [])):
        if not least <= count <= _MOST_TILES:
            raise file.error(key, f"{count:,} is not supported; supported: from {least} to {_MOST_TILES}")
    scale, ratio, most_ratio = (
        file.get(key, float, 0.0) for key in ("dense_max_scale", "dense_min_aspect", "dense_max_aspect")
    )
    wide = WideRule(most=more, scale=scale, least_ratio=ratio, most_ratio=most_ratio) if more else None
    return TileRule(
        side=vision.token_pixels, tile=_tile(file, vision, 512), least=least, most=most, longest=_MARKED, wide=wide
    )


_MORE, _MARKED = "dense_max_patches", 16
"""A key, and the most rows and columns of tiles for which Granite Docling has marks."""


def scaled_tile_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    most = file.positive("max_patches", 12) if file.get("crop_to_patches", bool, True) else 1
    if most > _MOST_TILES:
        raise file.error("max_patches", f"{most:,} is not supported; supported: up to {_MOST_TILES}")
    return TileRule(side=vision.token_pixels, tile=_tile(file, vision, 512), most=most, fits="scale")


def canvas_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(resize_to_max_canvas=False)
    most = file.positive("max_patches", 16)
    if most > _MOST_TILES:
        raise file.error("max_patches", f"{most:,} is not supported; supported: up to {_MOST_TILES}")
    return CanvasRule(side=vision.token_pixels, tile=_tile(file, vision, 336), most=most)


def window_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(vision_patch_size=vision.patch_size, downsampler_stride=vision.merge_size)
    size = _object(file, "size")
    whole, side = size.positive("height", 728, most=_MOST_SIDE), vision.token_pixels
    size.only(width=whole)
    tile = file.positive("patch_size", 504, most=_MOST_SIDE)
    for key, length in (("size", whole), ("patch_size", tile)):
        if length % side:
            raise file.error(key, f"{length} is not a multiple of {side}, the pixels of a token")
    return WindowRule(side=side, whole=whole, tile=tile, longest=file.positive("max_image_size", 3024, most=_MOST_SIDE))


def framed_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    # the processor cuts into so many tiles whatever the file says (`images_kwargs` in transformers)
    assert vision.encoder is not None
    tile, edge = (count * vision.token_pixels for count in vision.encoder.sides)
    file.with_defaults({"tile_size": 768}).only(tile_size=tile)
    size = _object(file, "size").with_defaults({"height": 1024, "width": 1024})
    size.only(height=edge, width=edge)
    colour = channels(file, key := "background_color", (127.0, 127.0, 127.0))
    if not all(0 <= value <= 255 for value in colour):
        raise file.error(key, f"{show(file.values[key])} is no colour: numbers are from 0 to 255")
    red, green, blue = map(int, colour)
    return FramedRule(
        side=vision.token_pixels,
        edge=edge,
        tiles=TileRule(side=vision.token_pixels, tile=tile, least=2, most=6),
        frame=(red, green, blue),
        behind=vision.num_behind(edge // vision.token_pixels),
    )


def split_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    tile, longest = (
        _object(file, key).positive("longest_edge", default)
        for key, default in (("max_image_size", 364), ("size", 4 * 364))
    )
    if tile // vision.patch_size != vision.tile_tokens * vision.merge_size:
        wanted = vision.tile_pixels
        raise file.error("max_image_size", f"is {tile}, and the tower's images are {wanted} × {wanted}")
    if longest > _MOST_SIDE:
        raise file.error("size", f"is {longest:,}; supported: up to {_MOST_SIDE:,}")
    return SplitRule(
        side=vision.token_pixels, tile=tile, longest=longest, is_cut=file.get("do_image_splitting", bool, True)
    )


def middle_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    size, crops = _object(file, "size"), file.values.get("do_center_crop")
    wanted = vision.tile_pixels
    edge = size.positive("shortest_edge", 224) if size.has("shortest_edge") or not size.values else None
    if edge is None and not crops:
        return TileRule(side=vision.token_pixels, tile=wanted, margin=_margin(file, vision))
    crop = _object(file, "crop_size")
    sides = [edge, *(crop.positive(key, 224) for key in ("height", "width"))]
    if crops is False or sides != [wanted] * 3:
        raise file.error("crop_size", f"is not the size of the tower's images, {wanted} × {wanted}")
    return MiddleRule(side=vision.token_pixels, edge=wanted)


def grid_rule(file: JsonFile, vision: VisionConfig, *, squares: bool = False) -> SizeRule:
    wanted, side = vision.tile_pixels, vision.token_pixels
    size = _object(file, "size")
    key = "shortest_edge" if size.has("shortest_edge") else "height"
    tile = size.positive(key, 384 if squares else 336)
    if size.positive("width", tile) != tile or tile // side != vision.tile_tokens:
        raise file.error("size", f"is {tile}, and the tower's images are {wanted} × {wanted}")
    key = "image_grid_pinpoints"
    sizes = file.values[key] if file.has(key) else _GRIDS_OF_MANY if squares else _GRIDS_OF_FEW
    counts = range(1, _MOST_TILES + 1)
    known = {str([rows * tile, columns * tile]): (rows, columns) for rows in counts for columns in counts}
    grids = tuple(known.get(str(each), (0, 0)) for each in sizes) if isinstance(sizes, list) else ()
    if not grids or not all(0 < rows * columns <= _MOST_TILES for rows, columns in grids):
        raise file.error(key, f"is no list of sizes of up to {_MOST_TILES} tiles of {tile} × {tile}")
    red, green, blue = (int(255 * mean) for mean in channels(file, "image_mean", CLIP_MEAN))
    return GridRule(
        side=side,
        tile=wanted,
        margin=tile - wanted,
        grids=grids,
        most_tiles=vision.most_tiles,
        square=(red, green, blue) if squares else None,
    )


def _margin(file: JsonFile, vision: VisionConfig) -> int:
    """Return the pixels of a side of the file's square images that fill no token of the tower's."""
    size = _object(file, "size")
    sides, wanted = [size.positive(key) for key in ("height", "width")], vision.tile_pixels
    if sides[0] != sides[1] or not 0 <= sides[0] - wanted < vision.token_pixels:
        raise file.error("size", f"is {sides[0]} × {sides[1]}, and the tower's images are {wanted} × {wanted}")
    return sides[0] - wanted


def large_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    side, patch = vision.token_pixels, vision.patch_size
    for key, wanted, default in (("encoder_patch_size", patch, 16), ("downsample_factor", vision.merge_size, 2)):
        if (found := file.get(key, int, default)) != wanted:
            raise file.error(key, f"is {found}, and {wanted} in config.json")
    least, most = file.positive("min_image_tokens", 64), file.positive("max_image_tokens", 256)
    whole = AreaRule(side=side, min_pixels=least * side**2, max_pixels=most * side**2, enlarges="side")
    fewest, largest = file.positive("min_tiles", 2), file.positive("max_tiles", 10)
    if not file.get("do_image_splitting", bool, True) or largest == 1:
        return whole
    if not fewest <= largest <= _MOST_TILES:
        raise file.error("max_tiles", f"{largest:,} is not supported; supported: from {fewest} to {_MOST_TILES}")
    tile = file.positive("tile_size", 512)
    if tile % side:
        raise file.error("tile_size", f"{tile} is not a multiple of {side}, the pixels of a token")
    return LargeRule(
        side=side,
        whole=whole,
        tiles=TileRule(side=side, tile=tile, least=fewest, most=largest),
        patch=patch,
        most_uncut=whole.max_pixels * file.positive_number("max_pixels_tolerance", 2.0),
        has_whole=file.get("use_thumbnail", bool, True),
    )


def slice_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(
        patch_size=vision.patch_size,
        downsample_mode=f"{vision.merge_size**2}x",
        use_image_id=True,
        small_image_upsize="always",
    )
    most = file.positive("max_slice_nums", 9) if file.get("slice_mode", bool, True) else 1
    if most > _MOST_TILES:
        raise file.error("max_slice_nums", f"{most:,} is not supported; supported: up to {_MOST_TILES}")
    edge = file.positive("scale_resolution", 448, most=_MOST_SIDE)
    return SliceRule(side=vision.token_pixels, edge=edge, most=most)


def patch_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(patch_size=vision.patch_size, downsample_ratio=1 / vision.merge_size)
    least, most = file.positive("min_num_patches", 1024), file.positive("max_num_patches", 13_312)
    room = (file.positive("max_model_len", 16_384) - 4) * vision.merge_size**2
    if not least <= most <= room:
        raise file.error("max_num_patches", f"{most:,} is not supported; supported: from {least:,} to {room:,}")
    return PatchRule(side=vision.token_pixels, merge=vision.merge_size, least=least, most=most)


def filled_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(patch_size=vision.patch_size, merge_size=vision.merge_size)
    if file.has(_FIXED):
        raise file.error(_FIXED, "is not supported: leave it out")
    size = _object(file, "size")
    longest = size.positive("max_height", 512)
    size.only(max_width=longest)
    if file.has(_LONGEST):
        longest = file.positive(_LONGEST)
    most = file.positive("max_patches", 16_384)
    return FilledRule(side=vision.token_pixels, merge=vision.merge_size, most=most, longest=longest)


def budget_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(patch_size=vision.patch_size, merge_size=vision.merge_size, patch_expand_factor=1)
    least, most = file.positive("min_image_tokens", 16), file.positive("max_image_tokens", 8000)
    if least > most:
        raise file.error("max_image_tokens", f"{most:,} is less than `min_image_tokens`, {least:,}")
    return BudgetRule(side=vision.token_pixels, least=least, most=most)


def shape_rule(file: JsonFile, vision: VisionConfig) -> SizeRule:
    file.only(
        patch_size=vision.patch_size, merge_size=vision.merge_size, temporal_patch_size=vision.temporal_patch_size
    )
    return ShapeRule(side=vision.token_pixels, most=file.positive("max_image_tokens", 4096))


def _tile(file: JsonFile, vision: VisionConfig, default: int) -> int:
    """Read the side of a square to which images are brought; it is the tower's."""
    size, wanted = _object(file, "size"), vision.tile_pixels
    found = [size.positive(key) if size.values else default for key in ("height", "width")]
    if found != [wanted, wanted]:
        raise file.error("size", f"is {found[0]} × {found[1]}, and the tower's images are {wanted} × {wanted}")
    return wanted


def _object(file: JsonFile, key: str) -> JsonFile:
    """Return a section of the file, which may be absent."""
    value = file.values.get(key)
    return file.with_values(value if isinstance(value, dict) else {}, f"{file.section}{key}.")


def channels(file: JsonFile, key: str, default: Channels) -> Channels:
    """Read a number for each channel. Raises LoadError."""
    value = file.values.get(key, list(default))
    if not isinstance(value, list) or len(value) != len(default) or not all(isinstance(v, int | float) for v in value):
        raise file.error(key, f"{show(value)} is not a list of {len(default)} numbers")
    red, green, blue = map(float, value)
    return red, green, blue
