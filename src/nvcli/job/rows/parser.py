"""Turns each row of the input into a `Job` or the typed error of that row. Never raises because of a row.

Only the values of nvcli's own keys become objects. What is passed through stays the JSON that it is, because objects
made of it could take thirty times the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from nvcli.core.job_config import PROMPT_KEY
from nvcli.core.validation import InvalidValue, list_some, show
from nvcli.errors import RowError
from nvcli.job.job import Caller, Job, JobId, JobResult, RowContext, RowForm, failed
from nvcli.job.line_splitter import DroppedLine, Line, too_long
from nvcli.job.rows.bad_json import explain_bad_json, explain_bad_utf8, explain_bad_value
from nvcli.job.rows.conversation import CONVERSATION_KEYS
from nvcli.job.rows.image_values import named_images, with_named_images
from nvcli.job.rows.native_row import (
    KEYS_OF_KIND,
    KNOWN_KEYS,
    NO_IDS,
    RowDefaults,
    RowKeys,
    known_form,
    native_id,
    native_job,
)
from nvcli.job.rows.openai_row import OWN_KEYS as OPENAI_KEYS
from nvcli.job.rows.openai_row import looks_like_openai, openai_form, openai_id, openai_job, openai_model
from nvcli.job.rows.plain_values import plain_value
from nvcli.job.rows.prompt_rules import PromptKind, PromptRules
from nvcli.job.rows.raw_values import (
    MAX_LEVELS,
    MarkedLine,
    NestedTooDeep,
    as_json,
    became_null,
    check_json,
    decode,
    decode_nested,
    decode_row,
    decode_within,
    is_deeper,
    is_null,
    mark_nonfinite,
)
from nvcli.job.rows.row_ids import RowIdentity, SeenIds, id_decoder, is_escaped
from nvcli.job.rows.row_warnings import RowRemark, RowWarnings
from nvcli.job.rows.task_rows import PROMPT_ONLY, TaskRows


def no_adapter(key: str | None, name: object, adapters: Collection[str]) -> str:
    """Return the message for a `name` that no adapter has."""
    return f"`{key}` is {show(name)}, which is no adapter; allowed: {list_some(sorted(adapters), 12)}"


class Cells(dict[str, str]):
    """The cells of one row by the names of their columns, without the empty ones."""


class PageRow(dict[str, Any]):
    """A page of a PDF file: its columns, and its image."""

    def __init__(
        self, columns: dict[str, Any], key: str, *, image: dict[str, Any] | None = None, problem: RowError | None = None
    ) -> None:
        """`image` is a part as `job.rows.conversation` reads them, or there is a `problem`. `key` tells whether it is
        the page of an earlier run, whose file has the same bytes."""
        super().__init__(columns)
        self.key, self.image, self.problem = key, image, problem


Row = Line | str | dict[str, Any] | Cells | PageRow | RowError
"""A row as read: a line of JSON, a line of text, the values of a table's row, the cells of a CSV record, a page of a
PDF file, or the error of a row that cannot be read."""

_SHOWN_BYTES = 60
"""Bytes of a line that messages show."""


class RowParser:
    """Parses rows, and remembers the ids it has seen."""

    def __init__(
        self,
        sampling_defaults: Mapping[str, Any],
        keys: RowKeys | None = None,
        rules: PromptRules | None = None,
        *,
        keep: Callable[[Any], Any] = as_json,
        keep_input: bool = False,
        caller: Caller | None = None,
        task: TaskRows | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        """`sampling_defaults` are valid as SamplingParams; a row's own keys go over them.

        `keep` turns a value that is passed through into what `RowContext.extra` holds. With `keep_input`, keys that say
        something to nvcli are passed through as all others are. `caller` waits for all these rows. `task` is what is
        made of them in place of answers. `adapters` are the names that rows may have under the key of
        adapters.
        """
        self._keep = keep
        self._keep_input = keep_input
        self._caller = caller
        self.keys = keys or RowKeys()
        self.rules = rules or PromptRules()
        # A template reads columns, whatever their names.
        prompts = () if self.rules.has_template else self.keys.prompts
        self._own_keys = self.keys.beside_prompt.union(prompts)
        self._task, self._adapters = task, adapters
        if task is not None:
            self._own_keys = self._own_keys - {self.keys.sampling} | task.keys
        # Beside a prompt they are columns like others.
        self._conversation_keys = self._own_keys.union(() if self.rules.has_template else CONVERSATION_KEYS)
        self._knows_forms = (
            not self.rules.has_template and self.keys.are_defaults and self._own_keys.isdisjoint(KNOWN_KEYS)
        )
        """Whether rows without a prompt may have a well-known form, because the job names no keys."""
        self._messages_key = self.keys.messages
        self._is_plain = not self.rules.has_template and self.keys.deciding is None and not self.keys.names_prompt
        """Whether a row with only the usual key of prompts has a plain prompt."""
        self.warnings = RowWarnings(self.rules.columns | self._own_keys)
        self.kinds: set[PromptKind] = set()
        """Kinds of prompts seen so far."""
        own = self.keys
        self._json_keys = (own.prompt_token_ids, own.sampling, own.chat_template_kwargs, *CONVERSATION_KEYS)
        """Keys of native rows whose lists and objects may be JSON text, as Parquet outputs hold them; so may messages,
        which are decoded where they are read."""
        self._defaults = RowDefaults(sampling_defaults)
        self._seen = SeenIds()
        self._decode_id = self._decode_own = None
        own_keys = self._conversation_keys | KNOWN_KEYS if self._knows_forms else self._conversation_keys
        if self.keys.id not in OPENAI_KEYS and not any(map(is_escaped, own_keys)):
            self._decode_id, self._decode_own = id_decoder(self.keys.id), id_decoder(self.keys.id, own_keys)

    def has_prompt(self, columns: Collection[str]) -> bool:
        """Tell by a row's keys whether this job finds a prompt in it."""
        if self.rules.has_template and self.rules.columns.issubset(columns):
            return True
        return "body" in columns or any(key in columns for key in self.keys.prompts)

    def finds_prompt(self, row: Row) -> bool:
        """Tell whether a row that can be read has something where this job looks for prompts. Raises RowError."""
        given, _ = self._values_of(row)
        return self.has_prompt([key for key, value in given.items() if not is_null(value)])

    def parse(self, row: Row, *, index: int, where: str, defaults: RowDefaults | None = None) -> Job | JobResult:
        """Parse one row. `where` names its line in messages. `defaults` replace those of all rows."""
        return self._parse(row, index, where, self.warnings, defaults or self._defaults)

    def failed(self, error: RowError, *, index: int, where: str) -> JobResult:
        """Return the result of a row that could not be parsed at all, so that its id is unknown."""
        name = self._seen.name(index)
        return failed(RowContext(id=name, is_named=True, index=index, line=where, caller=self._caller), error)

    def _parse(self, row: Row, index: int, where: str, warnings: RowWarnings, defaults: RowDefaults) -> Job | JobResult:
        form = RowForm.NATIVE if self._task is None else self._task.form
        context = RowContext(id="", is_named=True, index=index, line=where, form=form, caller=self._caller)
        try:
            given, marked = self._values_of(row)
            is_native = "url" not in given and "body" not in given  # as in most rows, or:
            if not is_native:
                has_prompt = any(not is_null(given.get(key)) for key in self.keys.prompts)
                is_native = has_prompt or not looks_like_openai(given)
            kind, own_keys = self._kind_and_keys(row, given) if is_native else (None, OPENAI_KEYS)
            is_json = isinstance(row, (bytes, Cells))
            values = _own_values(given, own_keys) if is_json else _own_objects(given, own_keys, self.keys)
            if marked is not None:
                given = marked.with_nulls(given)
            left_out = own_keys if not self._keep_input else own_keys & {"id" if is_native else "custom_id"}
            if len(values) < len(given) or self._keep_input:
                context.extra = {key: self._keep(value) for key, value in given.items() if key not in left_out}
            extra = context.extra
            if marked is not None or (
                isinstance(row, dict) and any(became_null(row[key], extra[key]) for key in extra)
            ):
                warnings.add(RowRemark.NONFINITE, where)
            if is_native:
                row_id = native_id(values.get(self.keys.id), self.keys.id)
            else:
                if "body" in values:
                    values["body"] = _decoded(values["body"], "body")
                context.form = openai_form(values) if self._task is None else self._task.openai_form
                context.model = openai_model(values)
                row_id = openai_id(values)
            if extra and self._task is None:
                keys = extra.keys() - own_keys if self._keep_input else extra
                warnings.add_keys(keys, where, is_native=is_native)
            if row_id is None:
                context.id = self._seen.name(index)
            else:
                context.id, context.is_named = row_id, False
                if not self._seen.add(row_id):
                    raise _repeated(row_id, is_native)
            page = row if isinstance(row, PageRow) else None
            if page is not None and page.problem is not None:
                raise page.problem
            image = None if page is None else page.image
            return self._job(context, given, values, kind, is_native, warnings, defaults, image)
        except (RowError, InvalidValue) as error:
            if not context.id and context.is_named:
                context.id = self._seen.name(index)
            return failed(context, error if isinstance(error, RowError) else RowError("invalid_value", error.message))

    def _job(
        self,
        context: RowContext,
        given: Mapping[str, Any],
        values: dict[str, Any],
        kind: PromptKind | None,
        is_native: bool,
        warnings: RowWarnings,
        defaults: RowDefaults,
        image: dict[str, Any] | None,
    ) -> Job:
        """Make the job of a row. `values` are those of nvcli's own keys, and `image` is the row's own image beside
        them. Raises RowError and InvalidValue."""
        task, rules = self._task, self.rules
        if is_native:
            for key in self._json_keys:
                if key in values:
                    values[key] = _decoded(values[key], key)
            key = self.keys.sampling
            sampling = PROMPT_ONLY if task else defaults.sampling(values.get(key, {}), under=key)
            job = native_job(
                values,
                context,
                self.keys,
                rules,
                given,
                kind,
                sampling,
                task=None if task is None else task.task_of(values, given),
                becomes_message=kind in rules.chat,
                image=image,
            )
        elif task is not None:
            job = task.openai_job(values, context)
        else:
            job = openai_job(values, context, defaults, rules)
            if context.form is RowForm.COMPLETION and job.prompt_token_ids is None:
                kind = PromptKind.OTHER_TEXT
        if self._adapters:
            default = None if self.keys.adapter in given else defaults.adapter  # null says that there is none
            job = self._with_adapter(job, values, default, is_native=is_native)
        if kind is not None and image is None and self.keys.image not in values:  # else it is a message anyway
            self.kinds.add(kind)
            if self.keys.image is not None:
                warnings.add(RowRemark.NO_IMAGE, context.line)
        if job.messages is None:
            if rules.is_for_conversations:
                warnings.add(RowRemark.NO_CONVERSATION, context.line)
            if warnings.start and job.prompt is not None and job.prompt.startswith(warnings.start):
                warnings.add(RowRemark.STARTS_TWICE, context.line)
        elif task is None and job.messages[-1]["role"] == "assistant" and not job.says_what_follows:
            warnings.add(RowRemark.ANSWERED, context.line)
        if job.chat_template_kwargs:
            warnings.add_variables(job.chat_template_kwargs, context.line)
        return job

    def _kind_and_keys(self, row: Row, given: Mapping[str, Any]) -> tuple[PromptKind | None, frozenset[str]]:
        """Return the kind of a native row's text prompt, and the keys of the row that mean something to nvcli."""
        if self._is_plain and self._messages_key not in given and not is_null(given.get(PROMPT_KEY)):
            return PromptKind.PROMPT, self._own_keys  # most rows
        kind = self._kind_of(row, given)
        return kind, self._keys_of_native(given, kind)

    def _with_adapter(self, job: Job, values: Mapping[str, Any], default: str | None, *, is_native: bool) -> Job:
        """Return the job with the LoRA adapter that the row names, or else with the default one. OpenAI rows name
        one as their model, and have none where that is no adapter's name. Raises RowError."""
        key = self.keys.adapter
        name = values.get(key, default) if is_native and key is not None else job.context.model
        if name is None or (not is_native and name not in self._adapters):
            return job
        if not isinstance(name, str) or name not in self._adapters:
            raise RowError("invalid_value", no_adapter(key, name, self._adapters))
        return msgspec.structs.replace(job, adapter=1 + self._adapters.index(name))

    def _kind_of(self, row: Row, given: Mapping[str, Any]) -> PromptKind | None:
        """Return the kind of a native row's text prompt; None if it has none."""
        if self.rules.has_template:
            return PromptKind.PROMPT if self.rules.prompt_template is not None else None
        keys = self.keys
        if isinstance(row, str):
            return PromptKind.OTHER_TEXT if keys.names_prompt else PromptKind.PROMPT
        if keys.deciding == keys.messages and not is_null(given.get(keys.messages)):
            return None
        if keys.prompt is not None and not is_null(given.get(keys.prompt)):
            return PromptKind.PROMPT
        if not self._knows_forms or any(not is_null(given.get(key)) for key in keys.prompts):
            return None
        return known_form(given)

    def _keys_of_native(self, given: Mapping[str, Any], kind: PromptKind | None) -> frozenset[str]:
        """Return the keys of a native row that mean something to nvcli."""
        if kind is not None and kind in KEYS_OF_KIND:
            own_keys = self._conversation_keys if kind is PromptKind.CONVERSATIONS else self._own_keys
            return own_keys | KEYS_OF_KIND[kind]
        own_keys = self._own_keys if is_null(given.get(self.keys.messages)) else self._conversation_keys
        deciding = self.keys.deciding
        if deciding is None or self.rules.has_template or is_null(given.get(deciding)):
            return own_keys
        if deciding == self.keys.prompt:
            own_keys = self._own_keys
        return own_keys.difference(key for key in self.keys.prompts if key != deciding)

    def identify(self, row: Row, *, index: int, is_good: bool = False) -> RowIdentity:
        """Return and reserve the id of a row that this run does not answer.

        The id is the one that `parse` would take: rows after it get the same ids and errors as in the whole job.
        `is_good` says that the row's answer is no error, which makes it quicker.
        """
        row_id = self._quick_id(row, is_good)
        if row_id is msgspec.UNSET:
            return RowIdentity(self._seen.name(index), is_named=True, is_repeated=False)
        if isinstance(row_id, str | int):
            return RowIdentity(row_id, is_named=False, is_repeated=not self._seen.add(row_id))
        # The run that answers the row tells the user of it.
        parsed = self._parse(row, index, "", RowWarnings(), self._defaults)
        is_repeated = isinstance(parsed, JobResult) and parsed.error is not None and parsed.error.type == "duplicate_id"
        return RowIdentity(parsed.context.id, is_named=parsed.context.is_named, is_repeated=is_repeated)

    def _quick_id(self, row: Row, is_good: bool) -> JobId | msgspec.UnsetType | None:
        """Return the id of a native row, UNSET if it has none, or None if the row must be parsed to know.

        Of a row that may be at fault, all values of nvcli's own keys are decoded: where one cannot be, it loses its id.
        """
        key, value = self.keys.id, None
        if isinstance(row, bytes) and self._decode_id is not None and self._decode_own is not None:
            try:
                if not (is_good or row.isascii()):
                    row.decode()
                own = self._decode_id(row) if is_good else self._decode_own(row)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
            if own.custom_id is not msgspec.UNSET:
                return None
            if not is_good and (own.body is not msgspec.UNSET or is_deeper(row, MAX_LEVELS)):
                return None
            value = None if own.id is msgspec.UNSET else own.id
        elif is_good and isinstance(row, str | dict):
            given = row if isinstance(row, dict) else {}
            if "custom_id" in given:
                return None
            value = given.get(key)
        else:
            return None
        try:
            row_id = native_id(value, key)
        except RowError:
            row_id = None
        return msgspec.UNSET if row_id is None else row_id

    def _values_of(self, row: Row) -> tuple[Mapping[str, Any], MarkedLine | None]:
        """Return the values of a row by key, as JSON or objects, and the marked line if some hold NaN or Infinity.

        Raises RowError.
        """
        if isinstance(row, (bytes, DroppedLine)):  # quicker than a union
            return _split_line(row)
        if isinstance(row, Cells):
            return _values_of_cells(row, self.keys), None
        if isinstance(row, dict):
            return row, None
        if isinstance(row, str):
            return {self.keys.line: row}, None
        raise row


def _split_line(line: Line) -> tuple[dict[str, msgspec.Raw], MarkedLine | None]:
    """Return the values of a line by key, as JSON, and the marked line if it holds NaN or Infinity.

    Raises RowError.
    """
    if isinstance(line, DroppedLine):
        raise too_long()
    try:
        if not line.isascii():
            line.decode()  # texts that stay JSON are not decoded
        raws = decode_row(line)
    except UnicodeDecodeError as error:
        raise RowError("invalid_json", explain_bad_utf8(line, error.reason)) from None
    except RecursionError:
        raise RowError("invalid_json", str(NestedTooDeep())) from None
    except msgspec.ValidationError:
        raise _not_an_object(line) from None
    except msgspec.DecodeError as error:
        marked = mark_nonfinite(line)
        if marked is None:
            raise RowError("invalid_json", explain_bad_json(line, str(error))) from None
        return marked.with_null_values(_split_line(marked.line)[0]), marked
    if is_deeper(line, MAX_LEVELS):
        raise RowError("invalid_json", str(NestedTooDeep()))
    if b"\n" in line:  # an item of an array: copied, its values stand on one line of the output
        raws = {key: msgspec.Raw(bytes(value).replace(b"\n", b" ")) for key, value in raws.items()}
    return raws, None


def _own_values(given: Mapping[str, Any], own_keys: frozenset[str]) -> dict[str, Any]:
    """Return the values of nvcli's own keys as objects, without those that are null. Raises RowError."""
    values = {}
    for key, value in given.items():
        if key in own_keys:
            try:
                decoded = decode(value) if isinstance(value, msgspec.Raw) else value
            except msgspec.DecodeError:  # it is JSON, with a number or a character that we cannot hold
                raise RowError("invalid_json", explain_bad_value(bytes(value), key)) from None
            if decoded is not None:
                values[key] = decoded
    return values


def _own_objects(given: Mapping[str, Any], own_keys: frozenset[str], keys: RowKeys) -> dict[str, Any]:
    """Return the objects of nvcli's own keys as plain values, without those that are null, and with images as texts
    that name them. Raises RowError."""
    own = {key: value for key, value in given.items() if key in own_keys and not is_null(value)}
    if keys.image in own:
        own[keys.image] = named_images(own[keys.image], keys.image)
    if keys.messages in own:
        own[keys.messages] = with_named_images(own[keys.messages])
    return {key: plain_value(value, key) for key, value in own.items()}


def _decoded(value: Any, key: str) -> Any:
    """Return the value of a key, decoded if it is a list or an object as JSON text. Raises RowError."""
    try:
        return decode_nested(value)
    except msgspec.DecodeError as error:
        raise RowError("invalid_json", f"`{key}` is {show(value)}, which is not JSON: {error}") from None


def _repeated(row_id: JobId, is_native: bool) -> RowError:
    way_out = NO_IDS if is_native else ""
    return RowError("duplicate_id", f"the id {show(row_id)} is the id of an earlier row; ids must differ{way_out}")


def _not_an_object(line: bytes) -> RowError:
    """Return the error of a line that is JSON other than an object, or turns out not to be JSON."""
    try:
        decode_within(line, check_json)
    except NestedTooDeep as error:
        return RowError("invalid_json", str(error))
    except msgspec.DecodeError as error:
        return RowError("invalid_json", explain_bad_json(line, str(error)))
    text = line.strip()[:_SHOWN_BYTES].decode(errors="ignore")
    shown = text if len(text) < _SHOWN_BYTES else f"{text[:-1]}…"
    return RowError("not_an_object", f'expected an object with keys, such as {{"prompt": …}}, got {shown}')


def _values_of_cells(cells: Cells, keys: RowKeys) -> dict[str, Any]:
    """Return the values of a row: JSON where nvcli's own keys hold lists and objects, and texts elsewhere.

    Raises RowError for a cell that should hold JSON and does not.
    """
    values: dict[str, Any] = dict(cells)
    json_keys = [keys.messages, keys.prompt_token_ids, keys.sampling, keys.chat_template_kwargs]
    if keys.messages in cells:
        json_keys += CONVERSATION_KEYS
    for key in ["body"] if looks_like_openai(cells) else json_keys:
        if key in cells:
            values[key] = _json_of(cells[key], key)
    return values


def _json_of(text: str, key: str) -> msgspec.Raw:
    try:
        return decode_within(text.strip().encode(), check_json)
    except NestedTooDeep as error:
        raise RowError("invalid_json", f"`{key}` is {error}") from None
    except msgspec.DecodeError:
        raise RowError(
            "invalid_json", f"the cell of `{key}` is {show(text)}, which is not JSON, as this column must be"
        ) from None
