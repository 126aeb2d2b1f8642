"""VisionTower: images to the embeddings of their tokens (`VisionConfig`).

It is held to transformers' towers (`modeling_qwen2_5_vl.py`, `modeling_qwen3_vl.py`, `modeling_siglip.py`,
`modeling_pixtral.py`, `modeling_glm4v.py`, `modeling_internvl.py`, `modeling_gemma4.py`). Shapes: P patches, H hidden
size, N tokens, O the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.core.prompt_image import TileGrid
from nvcli.kernels.patch_attention import Segments, make_segments
from nvcli.kernels.patch_types import Runs
from nvcli.models.parallel import BuildContext
from nvcli.models.vision.distance_attention import DistanceAttention
from nvcli.models.vision.early_merger import EarlyMerger
from nvcli.models.vision.image_processor import ImageProcessor
from nvcli.models.vision.merger import BorderedMerger, EndedMerger, TableMerger, make_deep_merger, make_merger
from nvcli.models.vision.patch_convolution import PatchConvolution
from nvcli.models.vision.patch_grid import PatchGrid, patch_grid
from nvcli.models.vision.query_encoder import QueryEncoder
from nvcli.models.vision.tower_attention import TowerAttention
from nvcli.models.vision.tower_parts import Linear, Norm, Scale, Weights, activate_and_multiply
from nvcli.models.vision.vision_config import TOWER, VisionConfig, turned_by_axis


class VisionTower(nn.Module):
    """The tower of a model, which every rank of the first stage holds whole."""

    def __init__(self, build: BuildContext, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.batch_invariant = build.batch_invariant
        self.patch_embed = Linear(build, f"{TOWER}.patch_embed.proj")
        self.class_token = Weights(build, f"{TOWER}.cls_token") if config.has_class_token else None
        self.registers = Weights(build, f"{TOWER}.registers") if config.num_registers else None
        self.positions = Weights(build, f"{TOWER}.pos_embed") if config.num_positions else None
        self.patch_norm, self.first_norm, self.last_norm = (
            Norm(build, f"{TOWER}.{name}_norm", config.eps) if is_there else None
            for name, is_there in (
                ("patch", config.has_patch_norm),
                ("first", config.has_first_norm),
                ("last", config.has_last_norm),
            )
        )
        self.blocks = nn.ModuleList(
            _Block(build, f"{TOWER}.blocks.{number}", config, number) for number in range(config.depth)
        )
        self.early_merger = EarlyMerger(build, f"{TOWER}.early_merger", config) if config.early_merge > 1 else None
        self.encoder = None if config.encoder is None else QueryEncoder(build, f"{TOWER}.encoder", config.encoder)
        self.separator = None if config.encoder is None else Weights(build, f"{TOWER}.separator")
        self.newline = Weights(build, f"{TOWER}.newline") if config.has_newlines else None
        self.merger = make_merger(build, f"{TOWER}.merger", config)
        self.deepstack = nn.ModuleList(
            make_deep_merger(build, f"{TOWER}.deepstack_merger_list.{number}", config, output)
            for number, output in enumerate(config.deepstack)
        )

    def forward(self, images: Sequence[Tensor], processor: ImageProcessor) -> list[Tensor]:
        """Return the embeddings of each image's tokens, [N, outputs × O]: first those of the merger, then those of
        `deepstack` by their targets; N: `VisionConfig.num_tokens`. `images`: [height, width, 3] uint8, whole tokens
        high and wide, on the tower's device.

        Under `batch_invariant` each image is computed by itself, so that its bits depend on no other.
        """
        if self.batch_invariant and len(images) > 1:
            return [output for image in images for output in self([image], processor)]
        side = self.config.patch_size
        grids = [(image.shape[0] // side, image.shape[1] // side) for image in images]
        patches = torch.cat([self._patches(image, processor) for image in images])
        merge, latents = self.config.merge_size, self.config.merger.latents
        sizes = [rows * columns // merge**2 if latents is None else latents.count for rows, columns in grids]
        outputs = list(torch.split(self._compute(patches, patch_grid(self.config, grids)), sizes))
        if isinstance(self.merger, BorderedMerger | EndedMerger):
            begin, newline, end = self.merger.borders()
            for number, (output, (_, columns)) in enumerate(zip(outputs, grids, strict=True)):
                rows = output.view(-1, columns // merge, output.shape[1])
                ended = torch.cat([rows, newline.expand(len(rows), 1, -1)], dim=1)
                outputs[number] = torch.cat([begin, ended.flatten(0, 1), end])
        if self.separator is not None:
            behind = [self.separator.weight.expand(self.config.num_behind(rows // merge), -1) for rows, _ in grids]
            outputs = [torch.cat(parts) for parts in zip(outputs, behind, strict=True)]
        return outputs

    def in_rows(self, embeddings: Tensor, tiles: TileGrid) -> Tensor:
        """Return the embeddings of an image's tokens with those of the ends of rows (`pack_image_features`), from those
        of its tiles and the whole image; or with those of marks: [N, outputs × O] → [tokens, outputs × O]."""
        side = self.config.tile_tokens
        if isinstance(self.merger, TableMerger):
            return self.merger.with_marks(embeddings, side**2, tiles.columns)
        assert self.newline is not None
        whole, newline = embeddings[-(side**2) :], self.newline.weight.repeat(self.config.num_outputs)
        if not tiles.rows:
            return torch.cat([whole, newline[None]])
        cut = embeddings[: -(side**2)].view(tiles.rows, tiles.columns, side, side, -1).transpose(1, 2)
        table = cut.reshape(tiles.rows * side, tiles.columns * side, -1)
        rows, columns = tiles.kept
        top, left = (table.shape[0] - rows) // 2, (table.shape[1] - columns) // 2
        kept = table[top : top + rows, left : left + columns]
        if tiles.shown != tiles.kept:
            kept = F.interpolate(kept.permute(2, 0, 1)[None], tiles.shown, mode="bilinear")[0].permute(1, 2, 0)
        ends = newline.expand(len(kept), 1, -1)
        return torch.cat([whole, torch.cat([kept, ends], dim=1).flatten(0, 1)])

    def _patches(self, image: Tensor, processor: ImageProcessor) -> Tensor:
        """Cut an image into patches of scaled values, in the type of the weights: [P, values of a patch]."""
        config = self.config
        side, late, early = config.patch_size, config.late_merge, config.early_merge
        values = image.float().mul_(processor.factor)
        for channel, mean, std in zip(values.unbind(-1), processor.mean, processor.std, strict=True):
            channel.sub_(mean).div_(std)  # by numbers: copies of a tensor would wait for the GPU
        if config.centres_pixels:
            values.sub_(0.5).mul_(2)
        height, width, channels = values.shape
        rows, columns = height // config.token_pixels, width // config.token_pixels
        squares = values.to(self.patch_embed.weight.dtype).view(
            rows, late, early, side, columns, late, early, side, channels
        )
        # rows and columns of tokens, then of squares, then of patches, channel, pixels
        patches = squares.permute(0, 4, 1, 5, 2, 6, 8, 3, 7).reshape(-1, channels, side, side)
        num_frames = max(1, config.temporal_patch_size)
        if config.has_last_channels:
            return patches.permute(0, 2, 3, 1).reshape(-1, config.patch_values)
        frames = torch.stack([patches] * num_frames, dim=1 if config.has_first_frames else 2)
        return frames.reshape(-1, config.patch_values)

    def _compute(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        config, device = self.config, patches.device
        squares = config.merge_size**2
        order = _on_device(grid.order, device)
        if order is not None:
            patches = patches.view(len(order), -1)[order].view(patches.shape)
        x, windows, images, others = self._embed(patches, grid), grid.windows, grid.images, self._others()
        angles = None if config.rope is None else self._angles(grid, device)
        if others is not None:
            if angles is not None:
                still = torch.ones(len(others), 2, device=device) * torch.tensor([1.0, 0.0], device=device)
                still = still.repeat_interleave(angles.shape[1] // 2, dim=1)
                angles, _ = _with_others(angles, images, still)
            x, images = _with_others(x, images, others)
        if self.first_norm is not None and config.norms_positions:
            x = self.first_norm(x)
        heads = config.num_heads, config.hidden_size // config.num_heads
        whole = make_segments(images, heads, x.dtype, device)
        windowed = make_segments(windows, heads, x.dtype, device) if config.window_tokens else whole
        deep: dict[int, Tensor] = {}
        deep_layers = {output.layer for output in config.deepstack}
        neighbours = _on_device(grid.neighbours, device)
        delta: Tensor | None = None  # what a layer adds to `x`, together with the norm of the sum
        for number, block in enumerate(self.blocks):
            delta = block(x, delta, angles, whole if number in config.full_layers else windowed, neighbours)
            merges = self.early_merger is not None and number == config.early_layer
            if number in deep_layers or merges or number + 1 == len(self.blocks):
                x += delta
                delta = None
            deep |= self._deep(x, number)
            if self.early_merger is not None and merges:
                count = config.early_merge**2
                x = self.early_merger(x, make_segments(((0, len(x) // count, count),), heads, x.dtype, device))
                images = tuple((first // count, parts, size // count) for first, parts, size in images)
                whole = windowed = make_segments(images, heads, x.dtype, device)
        if others is not None:
            x = torch.cat([part[:, len(others) :].flatten(0, 1) for part in _by_segment(x, images)])
        x = x if self.last_norm is None else self.last_norm(x)
        reads = [_on_device(read, device) for read in grid.reads]
        read = images if config.merger.latents is not None else reads
        own = self.merger(x, read) if read else self.merger(x)
        if self.encoder is not None:
            own = self.encoder(own, tuple((first // squares, count, size // squares) for first, count, size in images))
        merged = torch.cat([own, *(deep[target] for target in sorted(deep))], dim=1)
        assert config.merger.latents is not None or len(merged) * squares == len(patches)
        inverse = _on_device(grid.inverse, device)
        return merged if inverse is None else merged[inverse]

    def _deep(self, x: Tensor, layer: int) -> dict[int, Tensor]:
        """Return what deep outputs make of a layer's results, [P, H], by their targets: [N, O] each."""
        outputs = zip(self.config.deepstack, self.deepstack, strict=True)
        return {output.target: merge(x) for output, merge in outputs if output.layer == layer}

    def _embed(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        """Return what the first layer reads of patches: [P, values of a patch] → [P, H]."""
        x: Tensor = self.patch_embed(patches if self.patch_norm is None else self.patch_norm(patches))
        device, positions = patches.device, self.positions
        if self.first_norm is not None and not self.config.norms_positions:
            x = self.first_norm(x)
        if positions is None:
            return x
        if self.config.interpolation == "resampled":
            return x + self._resampled(grid, positions.weight).to(x.dtype)
        if self.config.interpolation == "bicubic":
            side = round(self.config.num_positions**0.5)
            table = positions.weight.float().view(1, side, side, -1).permute(0, 3, 1, 2)
            middles = _on_device(grid.middles, device)
            assert middles is not None
            places = middles.flip(-1).view(1, -1, 1, 2)  # columns come first
            found = F.grid_sample(table, places, mode="bicubic", align_corners=False, padding_mode="border")
            return x + found[0, :, :, 0].T.to(x.dtype)
        taps, weights = _on_device(grid.taps, device), _on_device(grid.tap_weights, device)
        assert taps is not None
        assert weights is not None
        table, others = positions.weight.view(-1, x.shape[-1]), self.config.num_other_positions
        table = table[: len(table) - others] if self.config.has_last_class_position else table[others:]
        return x + F.embedding_bag(taps, table.float(), per_sample_weights=weights, mode="sum").to(x.dtype)

    def _resampled(self, grid: PatchGrid, table: Tensor) -> Tensor:
        """Return the learned positions of the patches of square images: [P, H] float32."""
        parts = []
        for first, count, size in grid.images:
            side = isqrt(size)
            own = table.float().view(1, *table.shape[-3:]).permute(0, 3, 1, 2)
            if side != own.shape[-1]:
                own = F.interpolate(own, (side, side), mode="bicubic", antialias=True)
            places = _on_device(grid.places[first : first + count * size], table.device)
            assert places is not None
            parts.append(own[0, :, places[:, 0], places[:, 1]].T)
        return torch.cat(parts)

    def _others(self) -> Tensor | None:
        """Return the tokens beside patches: the class token with its position, or registers: [tokens, H]."""
        if self.class_token is not None:
            assert self.positions is not None
            position = self.positions.weight[-1 if self.config.has_last_class_position else 0]
            return (self.class_token.weight.flatten() + position)[None]
        return None if self.registers is None else self.registers.weight

    def _angles(self, grid: PatchGrid, device: torch.device) -> Tensor:
        """Return cosines and then sines of the patches' rows and columns: [P, head size] float32."""
        config = self.config
        half = config.hidden_size // config.num_heads // 2
        places = _on_device(grid.places, device)
        assert places is not None
        if config.rope == "thirds":  # the first one stands still: an image is a single frame, number 0
            count = turned_by_axis(2 * half)
            frequencies = config.rope_theta ** -(torch.arange(count, dtype=torch.float32, device=device) / count)
            turned = (places.float()[:, :, None] * frequencies).flatten(1)
            angles = F.pad(turned, (count, half - 3 * count))
            return torch.cat([angles.cos(), angles.sin()], dim=1)
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
        later = exponents + 1 / half if config.rope == "staggered" else exponents
        frequencies = 1.0 / config.rope_theta ** torch.stack([exponents, later])
        angles = ((places.float() + config.first_place)[:, :, None] * frequencies).flatten(1)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


def _by_segment(x: Tensor, runs: Runs) -> list[Tensor]:
    """Return the vectors of each run of segments: [segments, size, H] each."""
    return [x[first : first + count * size].view(count, size, -1) for first, count, size in runs]


def _with_others(x: Tensor, images: Runs, others: Tensor) -> tuple[Tensor, Runs]:
    """Put tokens before the patches of each image, or tile: → [patches and these tokens, H], and their runs."""
    parts: list[Tensor] = []
    runs: list[tuple[int, int, int]] = []
    start = 0
    for part in _by_segment(x, images):
        count, size, _ = part.shape
        parts.append(torch.cat([others.expand(count, -1, -1), part], dim=1).flatten(0, 1))
        runs.append((start, count, size + len(others)))
        start += len(parts[-1])
    return torch.cat(parts), tuple(runs)


def _on_device(array: np.ndarray | None, device: torch.device) -> Tensor | None:
    if array is None:
        return None
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class _Block(nn.Module):
    """A layer of attention, or of convolutions, with its MLP."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig, number: int) -> None:
        super().__init__()
        self.config = config
        convolves = number in config.conv_layers
        self.convolution = PatchConvolution(build, f"{path}.conv") if convolves else None
        self.norm1, self.norm2 = (Norm(build, f"{path}.{name}", config.eps) for name in ("norm1", "norm2"))
        self.attention: TowerAttention | DistanceAttention | None = None
        if config.distance_window:
            is_whole = number in config.full_layers
            self.attention = DistanceAttention(build, f"{path}.attn", config, is_whole=is_whole)
        elif not convolves:
            self.attention = TowerAttention(build, f"{path}.attn", config)
        self.results = nn.ModuleList(
            Scale(build, f"{path}.scale{number}")
            if config.has_layer_scales
            else Norm(build, f"{path}.result_norm{number}", config.eps)
            for number in ((1, 2) if config.has_layer_scales or config.has_result_norms else ())
        )
        up, down = config.mlp_names
        self.up = Linear(build, *(f"{path}.mlp.{name}" for name in up), pads_rows=True)
        self.down = Linear(build, f"{path}.mlp.{down}", pads_columns=True)

    def forward(
        self, x: Tensor, delta: Tensor | None, angles: Tensor | None, segments: Segments, neighbours: Tensor | None
    ) -> Tensor:
        """Return what is to be added to `x`, [P, H], after `delta` and what attention gives were, in place."""
        mixed = self.norm1(x, delta)
        if self.attention is not None:
            mixed = self.attention(mixed, angles, segments)
        elif self.convolution is not None:
            mixed = self.convolution(mixed, neighbours)
        inner, kind = self.norm2(x, self._result(mixed, 0)), self.config.activation
        if self.config.is_gated:
            inner = self.up(inner)
            inner = activate_and_multiply(inner, kind, self.config.limit)
        else:
            inner = self.up.activated(inner, kind)
        return self._result(self.down(inner), 1)

    def _result(self, x: Tensor, number: int) -> Tensor:
        """Scale or norm what attention (number 0) or the MLP (1) gives, where the tower does."""
        result: Tensor = self.results[number](x) if self.results else x
        return result
