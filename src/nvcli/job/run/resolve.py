"""Resolves a job: the configuration, the files and the checkpoint become a `ResolvedJob`.

What is asked for (`row_settings.py`) says how rows are read; the first of them say what they need (`row_needs.py`); and
then the settings of the engines are chosen (`engine_settings.py`). Every choice is made and everything is checked that
can be without starting a process. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.core.validation import shorten
from nvcli.job.files import STREAM, check_inputs, check_output, choose_output, expand_inputs
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.pdf_files import count_pages_of_inputs
from nvcli.job.images.row_images import RowImages
from nvcli.job.input.fetch import fetch_inputs
from nvcli.job.input.known_input import KnownInput, is_repeatable, know_inputs
from nvcli.job.input.pdf_source import PdfFile
from nvcli.job.input.reader import RowDigests, RowReader
from nvcli.job.job import JobResult
from nvcli.job.output.manifest import Manifest, readable_manifest
from nvcli.job.planning.layout import without_useless_auto
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.prompt_rules import PromptKind, TextKinds, describe_kind
from nvcli.job.rows.row_digest import InputRows
from nvcli.job.rows.row_warnings import RowWarnings
from nvcli.job.run.adapter_modes import choose_modes
from nvcli.job.run.chat_choice import ChatChoice, keep_choice
from nvcli.job.run.default_sampling import check_default_sampling
from nvcli.job.run.device import device_of
from nvcli.job.run.engine_settings import ResolvedEngines, load_checkpoint, resolve_engines
from nvcli.job.run.feeder import Feeder, RowSource, portions
from nvcli.job.run.image_settings import check_reads_pdfs, image_processor, why_no_images
from nvcli.job.run.job_facts import job_facts
from nvcli.job.run.row_needs import RowNeeds, needs_of_rows
from nvcli.job.run.row_settings import RowSettings, read_row_settings
from nvcli.job.run.settings import SetterOf, unknown_setter
from nvcli.job.shard import WHOLE, Shard
from nvcli.job.text.chat_renderer import ChatRenderer
from nvcli.job.text.grammar_maker import GrammarMaker
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.special_tokens import start_of
from nvcli.job.text.tokenizer import Tokenizer, check_tokenizer_files
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.checkpoint import check_weight_files, is_hub_id, resolve_model

_NOT_SEEN = (
    "the model was loaded without its vision tower, as no image was seen when the run began (in the first rows of each "
    "input, and in files of text up to 256 MiB); set `images: always` (--set images=always) and answer the failed rows "
    "again"
)
"""Why a run that could read images reads none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel(RowSettings):
    """A model with its settings, ready to be started for rows from anywhere."""

    config: EngineConfig
    """The engine's configuration for this checkpoint, before a layout is chosen (`job.run.plan`)."""
    adapter: Adapter | None = None
    """The LoRA adapter that is merged into the weights; None: there is none."""
    row_adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """The LoRA adapters that rows choose, by name."""
    tokenizer: Tokenizer | None = None
    """The tokenizer, if a setting had to be looked up in it; None: not loaded yet."""
    inputs: tuple[str, ...] = ()
    """The input files by name, patterns expanded; `-` is standard input. Empty: the rows come from elsewhere."""

    @property
    def model_limits(self) -> ModelLimits:
        """The limits of the model and its configuration for a row."""
        return ModelLimits(
            max_model_len=self.config.max_model_len,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            usual_max_tokens=None if "max_tokens" in self.run.sampling else self.sampling_defaults.get("max_tokens"),
            on_too_long=self.run.job.on_too_long,
            special_tokens=self.run.job.special_tokens,
            reasoning_parser=self.run.job.reasoning_parser,
            tool_parser=self.run.job.tool_parser,
            embedding_size=self.config.embedding_size,
            why_no_images=why_no_images(self.run, self.model_path, self.model) or _NOT_SEEN,
        )

    def load_tokenizer(self, warnings: RowWarnings | None = None) -> Tokenizer:
        """Return the tokenizer, and load it if needed. Raises LoadError.

        `warnings` learn the chat template and the first tokens of prompts, and tell which variables of the job and of
        rows the template does not know, and which prompts spell out the tokens.
        """
        tokenizer = self.tokenizer or Tokenizer.load(self.model_path, chat_template=self.chat_template)
        if warnings is not None:
            self.tell_tokenizer(tokenizer, warnings)
        return tokenizer

    def tell_tokenizer(self, tokenizer: Tokenizer, warnings: RowWarnings) -> None:
        """Tell the `warnings` of a job's rows what the tokenizer does."""
        start = start_of(tokenizer) if self.run.job.special_tokens == "allow" else ""
        warnings.add_tokenizer(tokenizer.chat_template or "", self.run.job.chat_template_kwargs, start)

    def chat_renderer(self) -> ChatRenderer:
        """Return a renderer of conversations, to be closed by the caller."""
        return ChatRenderer(self.model_path, chat_template=self.chat_template)

    def grammar_maker(self) -> GrammarMaker:
        """Return a maker of grammars for structured answers, to be closed by the caller."""
        return GrammarMaker(self.model_path, vocab_size=self.model.vocab_size, end_ids=self.model.eos_token_ids)

    def row_images(self) -> RowImages | None:
        """Return the preparer of rows' images, to be closed by the caller; None: the run reads none."""
        if not self.config.max_image_tokens:
            return None
        assert self.model.vision is not None
        vision = self.model.vision
        processor = image_processor(self.run, self.model_path, vision)
        return RowImages(
            processor,
            vision.image_token_id,
            self.image_folders,
            vision.text,
            whole_prompts=vision.has_whole_prompts,
            canvas_marks=vision.canvas_marks,
        )

    @property
    def image_folders(self) -> ImageFolders:
        """The folders below which the images of rows may be."""
        return ImageFolders.of(self.inputs, self.run.job.media_roots, self.run.job.media_domains)

    def prepare(
        self, reader: RowReader, tokenizer: Tokenizer, *, has_grammars: bool = True
    ) -> Iterator[list[PreparedRow | JobResult]]:
        """Yield batches of rows as a run prepares them. Without grammars, rows that need one become errors."""
        with ExitStack() as stack:
            renderer = stack.enter_context(closing(self.chat_renderer()))
            grammars = stack.enter_context(closing(self.grammar_maker())) if has_grammars else None
            images = self.row_images()
            if images is not None:
                stack.enter_context(closing(images))
            preparer = Preparer(tokenizer, self.model_limits, renderer.render, grammars, images)
            for rows in reader.batches():
                for some in portions(rows, images):
                    yield preparer.prepare(some)

    def make_feeder(self, rows: RowSource, load_tokenizer: Callable[[], Tokenizer]) -> Feeder:
        """Make a feeder, which reads and tokenizes rows ahead of the replicas."""
        return Feeder(
            rows, load_tokenizer, self.model_limits, self.chat_renderer(), self.grammar_maker(), self.row_images()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob(ResolvedModel):
    """A job: which rows are answered, by which model, with which settings, into which output."""

    output: str
    """The output's name; `-` is standard output."""
    chat: TextKinds
    """The texts of rows that become user messages."""
    limit: int | None
    """Number of rows of the inputs to read; None: all."""
    shard: Shard | None
    """The shard of the rows to answer; None: all rows."""
    overwrite: bool
    """Whether the output starts over, whatever it holds."""
    can_continue: bool
    """Whether the inputs can be read again, so that another run may continue the output."""
    known_inputs: tuple[KnownInput, ...]
    """The inputs as they were when the job was resolved; empty if one of them cannot be read again."""
    pdfs: Mapping[str, PdfFile]
    """The inputs that are PDF files, by name."""
    manifest: Manifest
    """Everything the answers depend on, to be kept beside the output."""
    notes: tuple[str, ...] = ()
    """Lines for the user on how the output goes on."""
    first_kinds: frozenset[PromptKind] = frozenset()
    """Kinds of prompts among the first rows of the inputs, if these could be looked at."""

    def describe_kinds(self, kinds: Collection[PromptKind]) -> list[str]:
        """Return lines on how prompts of these kinds are sent."""
        name = "the text of `job.prompt_template`" if self.run.job.prompt_template is not None else None
        lines = [
            describe_kind(
                kind,
                self.chat,
                prompt=name or f"`{shorten(self.run.job.prompt_field)}`",
                has_chat_template=self.has_chat_template,
            )
            for kind in PromptKind
            if kind in kinds
        ]
        return [line for line in lines if line is not None]

    def make_reader(self, answered: AnsweredRows | None = None, digests: RowDigests | None = None) -> RowReader:
        """Make a reader of the inputs that skips `answered` rows.

        `digests` takes the digests of the rows.
        """
        return RowReader(
            self.inputs,
            self.make_parser(self.chat),
            limit=self.limit,
            answered=answered,
            known=self.known_inputs,
            check_columns=self.run.job.check_columns,
            shard=self.shard or WHOLE,
            digests=digests,
            pdfs=self.pdfs,
        )

    def identify_rows(self) -> InputRows:
        """Read the inputs and return the identities of their rows. Raises ConfigError and InputChanged."""
        return self.make_reader().identify_all()


def resolve_job(
    run: RunConfig,
    *,
    inputs: Sequence[str],
    output: str | None,
    limit: int | None = None,
    shard: Shard | None = None,
    overwrite: bool = False,
    weights: bool = True,
    gpus: Sequence[SmiGpu] | None = None,
    setter_of: SetterOf = unknown_setter,
) -> ResolvedJob:
    """Resolve a job, or a shard of it, from the names and settings that the user gave.

    Raises ConfigError and LoadError.

    `output` None: the output goes beside a single input file; `-` is standard input or output. Reads the checkpoint's
    small files, and samples of the inputs. `limit` counts all rows, not only those of the shard. `overwrite` says that
    what the output holds does not matter. `weights` false: the job is only looked at, so that the checkpoint needs no
    weights. `gpus` are those that the job is for (None: those here). `setter_of` names for messages what set each key
    of `run`.
    """
    names = expand_inputs(inputs, output)
    check_inputs(names)
    output = choose_output(names, output, shard)
    check_output(names, output)
    names = fetch_inputs(names)
    settings = _find_model(run, setter_of, weights=weights, gpus=gpus)
    check_reads_pdfs(settings.run, settings.model_path, settings.model, names)
    pdfs = count_pages_of_inputs(names)
    can_continue = is_repeatable(names)
    begun = None if overwrite or not can_continue else _facts_of(output)
    chat = _chat_choice(settings, partial(RowReader, names, pdfs=pdfs), begun)
    needs = RowNeeds()
    if can_continue and run.job.check_columns:
        needs = needs_of_rows(settings, chat.kinds, names, limit=limit, pdfs=pdfs)
    resolved = _with_engines(settings, needs, gpus=gpus)
    merged_adapters = choose_modes(
        run,
        resolved.config,
        resolved.row_adapters,
        resolved.model,
        lambda: RowReader(names, resolved.make_parser(chat.kinds), pdfs=pdfs),
        begun,
        limit=limit,
        can_count=can_continue,
    )
    config = msgspec.structs.replace(resolved.config, merged_adapters=merged_adapters)
    known_inputs = know_inputs(names) if can_continue else ()
    manifest = Manifest(
        created=int(time.time()),
        model=run.model,
        hub_id=run.model if is_hub_id(run.model) else None,
        facts=job_facts(
            run,
            config,
            resolved.sampling_defaults,
            chat_template=resolved.chat_template,
            weights=weights,
            shard=shard,
            task=resolved.task,
            chat=chat.fact,
        ),
        inputs=[_described(known, pdfs.get(known.name)) for known in known_inputs],
    )
    return ResolvedJob(
        **(_values(resolved) | {"config": config, "inputs": tuple(names)}),
        output=output,
        chat=chat.kinds,
        limit=limit,
        shard=shard,
        overwrite=overwrite,
        can_continue=can_continue,
        known_inputs=known_inputs,
        pdfs=pdfs,
        manifest=manifest,
        notes=() if chat.note is None else (chat.note,),
        first_kinds=needs.kinds,
    )


def _described(known: KnownInput, pdf: PdfFile | None) -> tuple[str, str]:
    """Return the name and the description of an input, as a manifest has them."""
    return known.name, known.description if pdf is None else f"{known.description}, {pdf.description}"


def _facts_of(output: str) -> Mapping[str, Any] | None:
    """Return the facts of an existing output; None if there is none, or it cannot be read."""
    manifest = None if output == STREAM else readable_manifest(Path(output))
    return None if manifest is None else manifest.facts


def _chat_choice(
    settings: RowSettings,
    make_reader: Callable[[RowParser], RowReader],
    begun: Mapping[str, Any] | None,
) -> ChatChoice:
    """Return which texts of the inputs become messages. Raises ConfigError. `begun` holds the output's facts, and
    `make_reader` makes a reader of the inputs."""

    def has_rows(kinds: TextKinds) -> bool:
        parser = settings.make_parser(frozenset())
        return any(not kinds.isdisjoint(parser.kinds) for _ in make_reader(parser).batches())

    return keep_choice(
        settings.run.job,
        settings.choose_chat(),
        begun,
        makes_messages=settings.has_chat_template and settings.task is None,
        has_rows=has_rows,
    )


def resolve_settings(run: RunConfig, *, setter_of: SetterOf = unknown_setter) -> ResolvedModel:
    """Resolve the model and the settings of a run whose rows come later. Raises ConfigError and LoadError.

    Reads the checkpoint's small files, and downloads a checkpoint that is not there. `setter_of` is as in
    `resolve_job`.
    """
    return _with_engines(_find_model(run, setter_of, weights=True), RowNeeds())


def _find_model(
    run: RunConfig, setter_of: SetterOf, *, weights: bool, gpus: Sequence[SmiGpu] | None = None
) -> RowSettings:
    """Find the model, and what the run says of rows. The arguments are those of `resolve_job`."""
    if run.enable_attention_dp:
        run = without_useless_auto(run, device=device_of(run), gpus=gpus)
    weights = weights and run.load_format == "auto"
    path = resolve_model(run.model, weights=weights, revision=run.revision, overrides=run.hf_overrides)
    settings = read_row_settings(run, path, load_checkpoint(run, path, setter_of), setter_of)
    check_tokenizer_files(path)
    if weights:
        check_weight_files(path)
    settings.choose_chat()  # which may be an error
    return settings


def _with_engines(settings: RowSettings, needs: RowNeeds, *, gpus: Sequence[SmiGpu] | None = None) -> ResolvedModel:
    """Choose the settings of the engines for rows with these needs. The rest is as in `resolve_job`."""
    run = settings.run
    engines = resolve_engines(run, settings.model_path, settings.model, gpus=gpus, reads_images=needs.images)
    if needs.grammars:
        engines = engines._replace(config=msgspec.structs.replace(engines.config, prepare_grammars=True))
    resolved = model_of_rows(settings, engines)
    if resolved.task is not None:
        return resolved
    tokenizer = check_default_sampling(run.sampling, resolved.model_limits, resolved.load_tokenizer, settings.setter_of)
    return replace(resolved, tokenizer=tokenizer)


def model_of_rows(settings: RowSettings, engines: ResolvedEngines) -> ResolvedModel:
    """Combine the settings of rows with the engines that answer them."""
    return ResolvedModel(**(_values(settings) | engines._asdict()))


def _values(settings: RowSettings) -> dict[str, Any]:
    return {each.name: getattr(settings, each.name) for each in fields(settings)}
