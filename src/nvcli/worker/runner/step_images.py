"""StepImages: brings the images of a step's requests from the engine's message to the tokens that stand for them.

A request arrives with its images, and its slot keeps where they are. A step whose chunks begin before the end of their
request's last image runs outside of graphs: the images in it are computed by the tower, unless they are kept from an
earlier step, and take the place of their tokens' embeddings; a head that drafts reads the embedding of the token after
each, and gets them likewise. All other steps only shift the positions of requests that
have images, on the device at fixed addresses, so that a graph holds it.

The tower (`image_encoder.py`) is in the first pipeline stage alone, where its results enter. Later stages get the
residual stream with them, and only need to know where images are: for positions, and for attention both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.image_tokens import ImageTokens
from nvcli.attention.whole_images import WholeImage, plan_both_ways
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import StepInput
from nvcli.core.prompt_image import PromptImage, end_of_images
from nvcli.kernels.step_tensors import StepRows
from nvcli.models.causal_lm import CausalLM
from nvcli.models.vision.positions import (
    ImageSpan,
    angle_positions,
    canvas_positions,
    numbered_positions,
    offset_behind,
)
from nvcli.sizing.images import image_buffer_bytes
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.image_encoder import ImageEncoder
from nvcli.worker.runner.memory import device_bytes
from nvcli.worker.runner.slot_table import SlotTable, unpack_ids
from nvcli.worker.runner.uploader import SlotNumbers, to_device


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a batch that read parts of images in place of their tokens."""

    rows: list[np.ndarray] = field(default_factory=list)
    parts: list[tuple[PromptImage, int, int]] = field(default_factory=list)
    """The part of an image that each of `rows` reads, in order: (image, first token of it, end)."""

    def add(self, images: Sequence[PromptImage], first: int, end: int, row: int) -> None:
        """Add the tokens of images from place `first` of their prompt, which `row` reads, to `end`."""
        for image in images:
            begin, stop = max(first, image.first), min(end, image.end)
            if begin < stop:
                places = np.arange(begin, stop)
                is_text = (places - image.first) % (image.columns + image.gap) >= image.columns
                self.rows.append(places[~is_text] - first + row)
                self.parts.append((image, image.num_before(begin), image.num_before(stop)))

    def vectors(self, found: Mapping[bytes, Tensor]) -> Tensor:
        """Return what they read, from the embeddings of images by digest: [N, H]."""
        return torch.cat([found[image.key][first:end] for image, first, end in self.parts])


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The chunks of a step that begin before the end of their request's last image."""

    rows: np.ndarray
    """The rows of their tokens in the batch."""
    positions: np.ndarray
    """[3, rows] int32, the time, height and width of each of these tokens, or [4, rows] with its image's number."""
    own: ImageRows
    """The tokens that stand for parts of images."""
    ahead: ImageRows
    """The tokens before those, at which a head reads them; empty if no head does."""
    whole: tuple[WholeImage, ...]
    """The images, or prompts, whose tokens attend to all of them; empty where none do."""


class StepImages:
    """The images of each slot, and those of the step that is about to run."""

    def __init__(
        self, config: EngineConfig, model: CausalLM, slots: SlotTable, group: TensorParallelGroup, device: torch.device
    ) -> None:
        """`model` reads images. Raises LoadError."""
        vision, tower, head = model.config.vision, model.vision, model.config.draft_head
        assert vision is not None
        self._vision, self._device = vision, device
        self._angle_positions = canvas_positions if vision.canvas_marks else angle_positions
        if vision.numbers_images:
            self._angle_positions = numbered_positions
        self._num_axes = len(self._angle_positions((), 0, 0))
        self._kinds = [
            (spec.window, spec.kv_group) for spec in model.attention_kinds if vision.is_whole_in(spec.window)
        ]
        """The kinds of the stage's layers that attend to images both ways."""
        self.encoder = None if tower is None else ImageEncoder(config, tower, group, device)
        """None in a stage without a tower."""
        self.num_bytes = 0 if tower is None else image_buffer_bytes(config, vision, device_bytes(device))
        """The most bytes of embeddings, kept ones and those of a step, for the plan of the memory."""
        self._plan: ImagePlan | None = None
        """The plan of the step that is about to run; None: its chunks have no images."""
        self._feeds_head = head is not None and head.reads_images
        self._ahead: ImageTokens | None = None
        """The images that the head reads in that step; None: none, or it has not begun."""
        self._images: dict[int, Sequence[PromptImage]] = {}
        """The images of the slots that have any."""
        self._offsets = SlotNumbers(len(slots.state.lengths), config.max_padded_tokens, slots.upload, device)
        """Offsets of the positions of each slot's tokens after its images."""

    def plan(self, step: StepInput) -> bool:
        """Take in the images of new slots, and plan the chunks that begin before the end of their request's last
        image. Return whether there are any."""
        self._plan, self._ahead = self._planned(step), None
        return self._plan is not None

    def _planned(self, step: StepInput) -> ImagePlan | None:
        for new in step.new_slots:
            if new.images:
                self._images[new.slot] = new.images
            else:
                self._images.pop(new.slot, None)
        if not self._images:
            return None
        counts = unpack_ids(step.num_tokens)
        starts = np.cumsum(counts) - counts
        rows: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        own, ahead = ImageRows(), ImageRows()
        whole: list[WholeImage] = []
        vision = self._vision
        slots, ends = unpack_ids(step.slots).tolist(), unpack_ids(step.seq_lens).tolist()
        for row in range(step.num_decodes, len(slots)):
            images = self._images.get(slots[row], ())
            first, end = ends[row] - int(counts[row]), ends[row]
            if not images or first >= max(images[-1].whole[1], end_of_images(images)):
                continue
            if vision.axes:
                rows.append(np.arange(starts[row], starts[row] + counts[row]))
                positions.append(self._angle_positions(_spans(images), first, end))
            start = int(starts[row])
            own.add(images, first, end, start)
            for begin, stop in dict.fromkeys(image.whole for image in images) if vision.attends_both_ways else ():
                if (begin := max(begin, first)) < min(stop, end):
                    assert stop <= end, "a chunk ends inside an image"
                    whole.append(WholeImage(start + begin - first, stop - begin, row, begin))
            if self._feeds_head:
                ahead.add(images, first + 1, end + 1, start)
        if not own.parts and not ahead.parts and not rows and not whole:
            return None
        nothing = np.empty(0, dtype=np.int64)
        return ImagePlan(
            np.concatenate([nothing, *rows]),
            np.concatenate(positions, axis=1) if positions else nothing.reshape(self._num_axes, 0),
            own,
            ahead,
            tuple(whole),
        )

    def apply(self, step: StepInput) -> None:
        """Record the offsets of new slots on the device, where images shift positions."""
        if self._vision.axes and not self._vision.numbers_images:
            of_slots = {new.slot: new.images for new in step.new_slots}
            self._offsets.set(
                {
                    slot: offset_behind(self._angle_positions, _spans(images), end_of_images(images)) if images else 0
                    for slot, images in of_slots.items()
                }
            )

    def prepare(self, rows: StepRows, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with the positions of its tokens, and the embeddings of images in place of those of their
        tokens. Can run in a CUDA graph without a plan."""
        if self._vision.axes:
            batch = replace(batch, angle_positions=self._positions(rows, batch))
        plan = self._plan
        if plan is None or not (plan.own.parts or plan.ahead.parts or plan.whole):
            return batch
        found: Mapping[bytes, Tensor] | None = None
        if self.encoder is not None:
            found = self.encoder.embeddings(image for image, _, _ in (*plan.own.parts, *plan.ahead.parts))
        if plan.ahead.parts:
            self._ahead = self._image_tokens(plan.ahead, found)
        if not plan.own.parts and not plan.whole:
            return batch
        whole = plan_both_ways(plan.whole, self._kinds, batch) if plan.whole else {}
        return replace(batch, images=replace(self._image_tokens(plan.own, found), whole=whole))

    def prepare_head(self, rows: StepRows, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with what a head reads of it besides tokens, in a step that `prepare` has seen."""
        if self._vision.axes:
            batch = replace(batch, angle_positions=self._positions(rows, batch))
        return batch if self._ahead is None else replace(batch, images=self._ahead)

    def positions_behind(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """Return the positions by which tokens of slots are rotated that are after all images: [R] each; None: as they
        are."""
        return (positions + self._offsets.of_slots[slots]).clamp_(min=0) if self._vision.axes else None

    def _image_tokens(self, of: ImageRows, found: Mapping[bytes, Tensor] | None) -> ImageTokens:
        """Make the tokens of a batch that read these parts of images, with their embeddings by digest; None: the stage
        has no embeddings."""
        rows = to_device(np.concatenate([np.empty(0, dtype=np.int64), *of.rows]), self._device)
        if found is None or not of.parts:
            return ImageTokens(rows, None)
        own, *deep = torch.split(of.vectors(found), self._vision.out_size, dim=1)
        return ImageTokens(rows, own, tuple(deep))

    def _positions(self, rows: StepRows, batch: ForwardBatch) -> Tensor:
        """Return the positions by which tokens are rotated: [T], or [3 or 4, T] where chunks begin before the end of
        their request's last image."""
        plan, offsets = self._plan, self._offsets.of_tokens(rows, batch.num_tokens)
        positions = torch.add(batch.positions, offsets).clamp_(min=0)  # padding has the offset of some slot
        if plan is None:
            return positions
        by_axis = positions.repeat(self._num_axes, 1)
        by_axis[:, to_device(plan.rows, self._device)] = to_device(plan.positions, self._device)
        return by_axis

    def take_note(self) -> str:
        """Return nothing: images have nothing to tell."""
        return ""


def _spans(images: Sequence[PromptImage]) -> list[ImageSpan]:
    return [
        ImageSpan(image.first, image.rows, image.columns, image.border, image.slices, image.marks) for image in images
    ]
