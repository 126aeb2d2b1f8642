"""RowImages: prepares the images of rows in processes of their own, and puts their tokens into prompts.

A conversation holds an image as a part `{"type": "image", "image": …}` (`job.rows.conversation`). The chat template
puts one token there, which becomes as many as the image has. In the prompt that the engine gets they are numbers made
of the image's digest: prompts with other images never begin alike, and nothing that compares prompts has to know.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b, shake_128
from itertools import chain, islice, takewhile, zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from nvcli.core.byte_sizes import counted
from nvcli.core.messages import pack
from nvcli.core.prompt_image import MAX_PROMPT_IMAGES, PromptImage
from nvcli.core.validation import shorten, show
from nvcli.errors import CapacityError, RowError
from nvcli.job.images.image_fetch import invalid_image
from nvcli.job.images.image_parts import images_of_row, with_all_pages
from nvcli.job.images.image_process import PageCount, Question
from nvcli.job.images.image_processes import AHEAD, ImageProcesses
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.pdf_page import PdfPage
from nvcli.job.images.pixel_memory import PixelMemory, Pixels
from nvcli.job.input.pdf_source import PdfFile
from nvcli.job.job import Job, JobResult
from nvcli.job.rows.conversation import DETAIL, IMAGE
from nvcli.job.rows.pdf_part import DPI, FILE, PAGE
from nvcli.models.vision.image_processor import ImageProcessor
from nvcli.models.vision.image_size import AreaRule
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.tile_size import GridRule

LOW_DETAIL_PIXELS = 512 * 512
"""The most pixels of an image of low `detail`, as OpenAI's models get it."""
_SIGN, _LARGEST = 1 << 31, (1 << 30) - 1
_DIGEST_TOKENS = 64
"""Tokens whose numbers say which image it is; with the number of tokens they are as good as its digest."""


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt."""

    images: list[PromptImage]
    """Images, or their tiles and wholes where there is text between these."""
    pixels: tuple[Pixels, ...]
    """Their pixels, which stay in memory as long as this object."""
    num_tokens: tuple[int, ...]
    """The tokens of each, with those of its tiles."""
    token_id: int

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.pixels)

    def packed(self, ids: Sequence[int]) -> bytes:
        """Return the prompt `ids` as `Request.prompt_ids` has it."""
        numbers = array("i", ids)
        for image in self.images:
            size = image.end - image.first
            words = array("I", shake_128(image.key).digest(4 * min(size, _DIGEST_TOKENS)))
            signed = array("i", [(word & _LARGEST) - _SIGN for word in words])
            numbers[image.first : image.end] = (signed * (size // len(signed) + 1))[:size]
            for place in range(image.first + image.columns, image.end if image.gap else 0, image.columns + image.gap):
                numbers[place : place + image.gap] = array("i", ids[place : place + image.gap])
        return pack(numbers)


class RowImages:
    """Prepares images. Used by one thread; `close` may be called by any."""

    def __init__(
        self,
        processor: ImageProcessor,
        token_id: int,
        folders: ImageFolders,
        text: ImageText | None = None,
        *,
        whole_prompts: bool = False,
        canvas_marks: Sequence[int] = (),
    ) -> None:
        """`token_id` stands for an image in rendered conversations, once it is written as `text` says; None: chat
        templates write it. `whole_prompts`: all tokens of a prompt attend to each other. `canvas_marks`:
        `VisionConfig.canvas_marks`"""
        self._whole_prompts, self._canvas_marks = whole_prompts, canvas_marks
        self._processor, self._token_id, self._folders, self._text = processor, token_id, folders, text
        self.processes = ImageProcesses()
        self._memory = PixelMemory()
        self._known: WeakValueDictionary[Any, Pixels] = WeakValueDictionary()
        """Pixels that some row still holds, by what was read."""
        self._begun: dict[int, tuple[dict[str, Any], Future[Pixels | RowError]]] = {}
        """The images being prepared, by the `id` of their part, which is kept so that no other object gets that id."""

    def portions(self, rows: Sequence[Job | JobResult]) -> Iterator[Sequence[Job | JobResult]]:
        """Split a batch of rows so that each part has few images, whose preparation begins a part ahead."""
        parts: list[list[Job | JobResult]] = [[]]
        num_images = 0
        for row in with_all_pages(rows, self._count_pages, self.processes.threads):
            parts[-1].append(row)
            num_images += len(images_of_row(row))
            if num_images >= AHEAD * self.processes.count:
                parts.append([])
                num_images = 0
        for part, following in zip_longest(parts, parts[1:], fillvalue=()):
            for row in (*part, *following):
                self._begin(images_of_row(row))
            if part:
                yield part
            for row in part:
                self._drop(images_of_row(row))

    def _begin(self, images: Sequence[dict[str, Any]]) -> None:
        """Begin to prepare those images of a row that were not begun before."""
        for image in images[:MAX_PROMPT_IMAGES]:
            if id(image) not in self._begun:
                self._begun[id(image)] = image, self.processes.threads.submit(self._read_one, image, len(images) == 1)

    def _drop(self, images: Sequence[dict[str, Any]]) -> None:
        for image in images:
            self._begun.pop(id(image), None)

    def read(self, rows: Sequence[Sequence[dict[str, Any]]]) -> list[list[Pixels] | RowError]:
        """Prepare the images of rows (`images_of_row`); the first one that cannot be read is its row's error.

        Raises WorkerError if no process can be started, and CapacityError if there is no memory for pixels.
        """
        for images in rows:
            self._begin(images)
        found: list[list[Pixels] | RowError] = []
        for images in rows:
            if len(images) > MAX_PROMPT_IMAGES:
                found.append(
                    RowError("invalid_image", f"{len(images):,} images in a row; allowed: {MAX_PROMPT_IMAGES}")
                )
                continue
            own = [self._begun[id(image)][1].result() for image in images]
            error = next((each for each in own if isinstance(each, RowError)), None)
            found.append(error or [each for each in own if isinstance(each, Pixels)])
        for images in rows:
            self._drop(images)
        return found

    def write(self, text: str, pixels: Sequence[Pixels]) -> str | RowError:
        """Return a rendered conversation with its images written as the model's processor does."""
        if self._text is None:
            return text
        parts = text.split(self._text.written)
        if len(parts) - 1 != len(pixels):
            return _other_count(len(parts) - 1, len(pixels))
        side = self._processor.rule.side
        spelled = [
            self._text.spelled(each.fit.height // side, each.fit.grid, number, has_whole_first=each.fit.has_whole_first)
            for number, each in enumerate(pixels)
        ]
        return self._text.joined("".join(chain.from_iterable(zip(parts, [*spelled, ""], strict=True))))

    def expand(self, ids: Sequence[int], pixels: Sequence[Pixels]) -> tuple[list[int], PromptImages]:
        """Return a written prompt with all tokens of its images, and where they are. Raises RowError if it has not
        one token for each image, or for each of its tiles, or for each row of its tokens."""
        places = [place for place, token in enumerate(ids) if token == self._token_id]
        gap = int(self._text is not None and self._text.between != "")
        of_images = [list(self._pictures(each)) for each in pixels]
        pictures = list(chain(*of_images))
        if len(places) != sum(each.rows if gap else 1 for each in pictures):
            raise _other_count(len(places), len(pixels))
        num_tokens = tuple(sum(each.num_tokens for each in image) for image in of_images)
        expanded: list[int] = []
        images: list[PromptImage] = []
        start, runs = 0, iter(places)
        for picture in pictures:
            for number in range(picture.rows if gap else 1):
                place = next(runs)
                if number and place != start + gap:
                    raise RowError(
                        "chat_template_error",
                        "the model's tokenizer has no token of its own for the end of a row of an image's tokens",
                    )
                expanded += ids[start:place]
                if not number:
                    images.append(msgspec.structs.replace(picture, first=len(expanded), gap=gap))
                expanded += [self._token_id] * (picture.columns if gap else picture.num_tokens)
                start = place + 1
        expanded += ids[start:]
        if self._whole_prompts:
            images = [msgspec.structs.replace(image, whole_prompt=len(expanded)) for image in images]
        if self._canvas_marks:
            self._place(
                images, [(each.fit.grid, len(own)) for each, own in zip(pixels, of_images, strict=True)], expanded
            )
        return expanded, PromptImages(images, tuple(pixels), num_tokens, self._token_id)

    def _place(self, images: list[PromptImage], grids: Iterable[tuple[tuple[int, int], int]], ids: list[int]) -> None:
        """Note in the first of the pictures of each image what belongs to its canvas. `grids`: the rows and columns of
        slices of each image, and the number of its pictures."""
        first = 0
        for grid, count in grids:
            behind = islice(ids, images[first + count - 1].end, None)
            marks = sum(1 for _ in takewhile(self._canvas_marks.__contains__, behind))
            images[first] = msgspec.structs.replace(images[first], slices=grid, marks=marks)
            first += count

    def bare_prompt(self, pixels: Sequence[Pixels]) -> list[int]:
        """Return what `expand` takes for a prompt of these images alone, with nothing between rows."""
        return [self._token_id] * sum(1 for each in pixels for _ in self._pictures(each))

    def _pictures(self, pixels: Pixels) -> Iterator[PromptImage]:
        """Yield what the model reads of an image as images of their own, anywhere in a prompt: its tiles and the whole
        image where there is text between them, or all of it."""
        side, offset = self._processor.rule.side, pixels.offset
        if (tiles := pixels.fit.layout) is not None:
            count = tiles.num_tokens(pixels.fit.width // side)
            yield PromptImage(
                first=0, rows=1, columns=count, key=pixels.key, file=pixels.file, offset=offset, tiles=tiles
            )
            return
        rule = self._processor.rule
        parts = pixels.fit.pictures
        if self._text is None or not self._text.parts_tiles:
            parts = [(sum(height for height, _ in parts), pixels.fit.width)]
        for number, (height, width) in enumerate(parts):
            key = pixels.key
            if len(parts) > 1:
                key = blake2b(b"%d" % number, key=key, digest_size=16).digest()
            rows, columns = height // side, width // side + rule.has_row_ends
            patches = None
            if rule.tokens:
                patches, rows, columns = (rows, columns), 1, rule.tokens
            behind = pixels.fit.behind if number + 1 == len(parts) else 0
            yield PromptImage(
                first=0,
                rows=rows,
                columns=columns,
                border=rule.border,
                behind=behind,
                key=key,
                file=pixels.file,
                offset=offset,
                patches=patches,
            )
            offset += 3 * height * width

    def _read_one(self, part: dict[str, Any], is_alone: bool) -> Pixels | RowError:
        """Prepare an image, which may be its row's only one. Raises CapacityError and WorkerError, and InputChanged for
        a page of a changed input."""
        source, page = part[IMAGE], PdfPage(part[PAGE], part[DPI]) if PAGE in part else None
        file: PdfFile | None = part.get(FILE)
        try:
            found = self._folders.find(source) if file is None else Path(file.name)
            processor = with_limits(self._processor, part)
            if isinstance(processor.rule, GridRule) and not is_alone:
                processor = replace(processor, rule=replace(processor.rule, is_alone=False))
            known = (_identity(found), page, processor)
            if (pixels := self._known.get(known)) is not None:
                return pixels
            size = 3 * processor.rule.most_pixels
            offset = self._memory.reserve(size)
            prepared = self.processes.ask(Question(found, processor, self._memory.path, offset, page))
        except RowError as error:
            return error
        except OSError as error:  # the file is gone since it was found
            return invalid_image(source, f"cannot be read: {error.strerror}")
        finally:
            if file is not None:
                file.check_unchanged()
        if prepared.problem:
            self._memory.free(offset, size)  # where the process may have written before it was ended
        if prepared.has_no_memory:
            raise CapacityError(f"the image {show(shorten(source))}: {prepared.problem}")
        if prepared.problem and file is not None:
            return RowError("invalid_image", prepared.problem)
        if prepared.problem:
            return invalid_image(
                source, prepared.problem if page is None else f"page {page.number}: {prepared.problem}"
            )
        pixels = self._known[known] = Pixels(self._memory, offset, prepared.fit, prepared.key)
        return pixels

    def _count_pages(self, source: str) -> int | RowError:
        try:
            counted = self.processes.ask(PageCount(self._folders.find(source)))
        except RowError as error:
            return error
        return invalid_image(source, counted.problem) if counted.problem else counted.num_pages

    def close(self) -> None:
        """End the processes, even while they work. Pixels that rows hold stay. Idempotent."""
        self._folders.fetcher.close()
        self.processes.close()


def _other_count(found: int, num_images: int) -> RowError:
    return RowError(
        "chat_template_error",
        f"the rendered conversation has {counted(found, 'token')} for images, and the row "
        f"{counted(num_images, 'image')}; a text may have such a token spelled out, or the chat "
        "template may leave images out",
    )


def _identity(found: Path | bytes) -> Any:
    """Return a key that is equal for equal images."""
    if isinstance(found, bytes):
        return found
    stat = found.stat()
    return found, stat.st_mtime_ns, stat.st_size


def with_limits(processor: ImageProcessor, part: Mapping[str, Any]) -> ImageProcessor:
    """Return the processor with the limits of a part's own (`min_pixels`, `max_pixels`), or those of `detail`. Raises
    RowError."""
    rule = processor.rule
    if not isinstance(rule, AreaRule):
        if given := [key for key in ("min_pixels", "max_pixels") if key in part]:
            raise RowError("invalid_image", f"`{given[0]}` would have no effect on images of this model; leave it out")
        return processor
    if part.get(DETAIL) == "low" and "max_pixels" not in part:
        part = {**part, "max_pixels": max(LOW_DETAIL_PIXELS, rule.min_pixels)}
    least, most = part.get("min_pixels", rule.min_pixels), part.get("max_pixels", rule.max_pixels)
    if least == rule.min_pixels and most == rule.max_pixels:
        return processor
    most = min(most, rule.max_pixels)
    if not rule.side**2 <= most or least > most:
        raise RowError(
            "invalid_image",
            f"`min_pixels` is {least:,} and `max_pixels` {most:,}; allowed: {rule.side**2:,} or more, "
            "the smaller one first",
        )
    return replace(processor, rule=replace(rule, min_pixels=least, max_pixels=most))
