"""Makes a `Job` of each row of the input, or the typed error of that row. Never raises for what a row holds.

Only the values of nvcli's own keys become objects. What is passed through stays the JSON that it is, because objects
made of it could take thirty times the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from nvcli.errors import RowError
from nvcli.jobs.job import Caller, Job, JobId, JobResult, RowContext, RowForm, failed
from nvcli.jobs.line_splitter import DroppedLine, Line, too_long
from nvcli.jobs.rows.bad_json import explain_bad_json, explain_bad_utf8, explain_bad_value
from nvcli.jobs.rows.cells import Cells, values_of_cells
from nvcli.jobs.rows.conversation_options import CONVERSATION_KEYS
from nvcli.jobs.rows.known_forms import KEYS_OF_KIND, KNOWN_KEYS, known_form
from nvcli.jobs.rows.native_row import RowDefaults, RowKeys, native_id, native_job
from nvcli.jobs.rows.nesting import MAX_LEVELS, is_deeper
from nvcli.jobs.rows.nonfinite import MarkedLine, became_null, mark_nonfinite
from nvcli.jobs.rows.openai_row import OWN_KEYS as OPENAI_KEYS
from nvcli.jobs.rows.openai_row import looks_like_openai, openai_form, openai_id, openai_job, openai_model
from nvcli.jobs.rows.plain_values import plain_value
from nvcli.jobs.rows.prompt_forms import PromptKind
from nvcli.jobs.rows.prompt_rules import PromptRules
from nvcli.jobs.rows.raw_values import as_json, decode, is_null
from nvcli.jobs.rows.row_warnings import RowWarnings
from nvcli.jobs.rows.seen_ids import SeenIds
from nvcli.jobs.rows.task_rows import TaskRows
from nvcli.validation import show

Row = Line | str | Cells | dict[str, Any] | RowError
"""A row as it is read: a line of JSON, a line of text, the cells of a CSV record, the values of a table's row, or the
error of what cannot be read as a row."""

_SHOWN_BYTES = 60
"""A message shows so much of a line."""


_USUAL_KIND = PromptKind.PROMPT


class RowIdentity(NamedTuple):
    """The id of a row and where it is from."""

    id: JobId
    is_named: bool
    """Whether the id is a name that the row was given, because it brought none."""
    is_repeated: bool
    """Whether an earlier row has the id."""

    @property
    def name(self) -> str | None:
        """The name that the row was given; None if it brought an id."""
        return str(self.id) if self.is_named else None

    @property
    def own_id(self) -> JobId | None:
        """The id that the row brought; None if it brought none."""
        return None if self.is_named else self.id


class RowParser:
    """Parses rows. It holds the keys of rows, what the job says for all of them, and the ids that were seen."""

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
    ) -> None:
        """`sampling_defaults` are valid as SamplingParams; a row's own keys go over them.

        `keep` turns a value that is passed through into what `RowContext.extra` holds. With `keep_input`, keys that say
        something to nvcli are passed through as all others are. `caller` waits for all these rows. `task` is what is
        made of them in place of answers.
        """
        self._keep = keep
        self._keep_input = keep_input
        self._caller = caller
        self.keys = keys or RowKeys()
        self.rules = rules or PromptRules()
        # A template reads columns, whatever their names.
        prompts = () if self.rules.has_template else self.keys.prompts
        self._own_keys = self.keys.beside_prompt.union(prompts)
        self._task = task
        if task is not None:
            self._own_keys = self._own_keys - {self.keys.sampling} | task.keys
        # Beside a prompt they are columns like others.
        self._conversation_keys = self._own_keys.union(() if self.rules.has_template else CONVERSATION_KEYS)
        self._knows_forms = (
            not self.rules.has_template and self.keys.are_defaults and self._own_keys.isdisjoint(KNOWN_KEYS)
        )
        """Whether rows without a prompt may be of a well-known form: the job names no other keys."""
        self._prompt_key, self._messages_key = self.keys.prompt, self.keys.messages
        self._is_plain = not self.rules.has_template and self.keys.deciding is None and not self.keys.names_prompt
        """Whether the prompt of a row with no other is the text under its key."""
        self.warnings = RowWarnings(self.rules.columns | self._own_keys)
        self._sent_as_messages = frozenset(kind for kind in PromptKind if self.rules.chat.includes(kind))
        self.kinds: set[PromptKind] = set()
        """The kinds of prompts that rows had so far."""
        self._defaults = RowDefaults(sampling_defaults)
        self._seen = SeenIds()
        self._decode_ids = _ids_decoder(self.keys.id).decode
        own_keys = self._conversation_keys | KNOWN_KEYS if self._knows_forms else self._conversation_keys
        self._decode_own = _own_decoder(self.keys.id, own_keys).decode

    def has_prompt(self, columns: Collection[str]) -> bool:
        """Tell whether a row with these keys is one whose prompt this job reads, as far as the keys tell."""
        if self.rules.has_template and self.rules.columns.issubset(columns):
            return True
        return "body" in columns or any(key in columns for key in self.keys.prompts)

    def parse(self, row: Row, *, index: int, where: str, defaults: RowDefaults | None = None) -> Job | JobResult:
        """Parse one row. `where` names its line in messages. `defaults` take the place of those of all rows."""
        return self._parse(row, index, where, self.warnings, defaults or self._defaults)

    def failed(self, error: RowError, *, index: int, where: str) -> JobResult:
        """Return the result of a row that could not be parsed at all. Its id is not known."""
        name = self._seen.name(index)
        return failed(RowContext(id=name, is_named=True, index=index, line=where, caller=self._caller), error)

    def _parse(self, row: Row, index: int, where: str, warnings: RowWarnings, defaults: RowDefaults) -> Job | JobResult:
        row_id: JobId | None = None
        is_named = False
        form = RowForm.NATIVE if self._task is None else self._task.form
        model = None
        extra: dict[str, msgspec.Raw] = {}
        try:
            given, marked = self._values_of(row)
            is_native = not looks_like_openai(given) or any(not is_null(given.get(key)) for key in self.keys.prompts)
            prompt_key = self._prompt_key
            own_of = _own_objects if isinstance(row, (dict, str)) else _own_values
            kind: PromptKind | None
            own_keys, kind = self._own_keys, _USUAL_KIND
            is_usual = is_native and self._is_plain and prompt_key in given and self._messages_key not in given
            values = own_of(given, own_keys) if is_usual else {}
            if not is_usual or prompt_key not in values:
                kind = self._kind_of(row, given) if is_native else None
                own_keys = self._keys_of_native(given, kind) if is_native else OPENAI_KEYS
                values = own_of(given, own_keys)
            if marked is not None:
                given = marked.with_nulls(given)
            left_out = own_keys if not self._keep_input else own_keys & {"id" if is_native else "custom_id"}
            if len(values) < len(given) or self._keep_input:
                extra = {key: self._keep(value) for key, value in given.items() if key not in left_out}
            if marked is not None or (
                isinstance(row, dict) and any(became_null(row[key], extra[key]) for key in extra)
            ):
                warnings.add_nonfinite(where)
            if is_native:
                row_id = native_id(values, self.keys)
                if extra and self._task is None:
                    warnings.add_keys(extra.keys() - own_keys if self._keep_input else extra, where)
            else:
                form = openai_form(values) if self._task is None else self._task.openai_form
                model = openai_model(values)
                row_id = openai_id(values)
            is_named = row_id is None
            if row_id is None:
                row_id = self._seen.name(index)
            elif not self._seen.add(row_id):
                way_out = "; to have no ids read: --id-field none, with --overwrite" if is_native else ""
                raise RowError(
                    "duplicate_id", f"the id {show(row_id)} is the id of an earlier row; ids must differ{way_out}"
                )
            place = RowContext(
                id=row_id,
                is_named=is_named,
                index=index,
                line=where,
                extra=extra,
                form=form,
                model=model,
                caller=self._caller,
            )
            if is_native:
                job = native_job(
                    values,
                    place,
                    self.keys,
                    defaults,
                    self.rules,
                    given,
                    kind,
                    becomes_message=bool(self._sent_as_messages) and kind in self._sent_as_messages,
                )
                if self._task is not None:
                    job = self._task.job(job, values, given)
            elif self._task is not None:
                job = self._task.openai_job(values, place)
            else:
                job = openai_job(values, place, defaults, self.rules)
                if form is RowForm.COMPLETION and job.prompt_token_ids is None:
                    kind = PromptKind.OTHER_TEXT
            if kind is not None:
                self.kinds.add(kind)
            if job.messages is None:
                if self.rules.is_for_conversations:
                    warnings.add_prompt(where)
            elif self._task is None and job.messages[-1]["role"] == "assistant" and not job.says_what_follows:
                warnings.add_answered(where)
            return job
        except RowError as error:
            if row_id is None:
                is_named = True
                row_id = self._seen.name(index)
            place = RowContext(
                id=row_id,
                is_named=is_named,
                index=index,
                line=where,
                extra=extra,
                form=form,
                model=model,
                caller=self._caller,
            )
            return failed(place, error)

    def _kind_of(self, row: Row, given: Mapping[str, Any]) -> PromptKind | None:
        """Return the kind of a native row's prompt; None for other prompts than texts, and where there is none."""
        if self.rules.has_template:
            return PromptKind.PROMPT if self.rules.prompt_template is not None else None
        keys = self.keys
        if keys.deciding == keys.messages and not is_null(given.get(keys.messages)):
            return None
        if not is_null(given.get(keys.prompt)):
            return PromptKind.OTHER_TEXT if isinstance(row, str) and keys.names_prompt else PromptKind.PROMPT
        if not self._knows_forms or any(not is_null(given.get(key)) for key in keys.prompts):
            return None
        return known_form(given)

    def _keys_of_native(self, given: Mapping[str, Any], kind: PromptKind | None) -> frozenset[str]:
        """Return the keys under which a native row says something to nvcli."""
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
        """Return the id of a row that this run does not answer, and take it.

        The id is the one that `parse` would take: rows after it get the same ids and errors as in the whole job.
        `is_good` says that the row's answer is no error, which makes it quicker.
        """
        row_id = self._id_of(row) if is_good else self._own_id(row)
        if row_id is msgspec.UNSET:
            return RowIdentity(self._seen.name(index), is_named=True, is_repeated=False)
        if isinstance(row_id, str | int) and not isinstance(row_id, bool):
            return RowIdentity(row_id, is_named=False, is_repeated=not self._seen.add(row_id))
        parsed = self._parse(
            row, index, "", RowWarnings(), self._defaults
        )  # the run that answers the row tells the user of it
        is_repeated = isinstance(parsed, JobResult) and parsed.error is not None and parsed.error.type == "duplicate_id"
        return RowIdentity(parsed.place.id, is_named=parsed.place.is_named, is_repeated=is_repeated)

    def _own_id(self, row: Row) -> JobId | msgspec.UnsetType | None:
        """Return the id that a native row brings, or UNSET where it brings none; None where it takes parsing to know.

        All values of nvcli's own keys are decoded: where one cannot be, the row loses its id.
        """
        if not isinstance(row, bytes) or self.keys.id in OPENAI_KEYS:
            return None
        try:
            if not row.isascii():
                row.decode()
            own = self._decode_own(row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if own.custom_id is not msgspec.UNSET or own.body is not msgspec.UNSET or is_deeper(row, MAX_LEVELS):
            return None
        try:
            row_id = None if own.id is msgspec.UNSET else native_id({self.keys.id: own.id}, self.keys)
        except RowError:
            row_id = None
        return msgspec.UNSET if row_id is None else row_id

    def _values_of(self, row: Row) -> tuple[Mapping[str, Any], MarkedLine | None]:
        """Return the values of a row by key, as JSON or as objects, and the line in which they are marked where some
        hold NaN or Infinity. Raises RowError."""
        if isinstance(row, bytes | DroppedLine):
            return _split_line(row)
        if isinstance(row, dict):
            return row, None
        if isinstance(row, str):
            return {self.keys.prompt: row}, None
        if isinstance(row, RowError):
            raise row
        return values_of_cells(row, self.keys, max_levels=MAX_LEVELS), None

    def _id_of(self, row: Row) -> Any:
        """Return the id of a good row, or UNSET for a native row without one; None where it takes parsing to know."""
        if isinstance(row, Cells):
            row = dict(row.texts)
        elif isinstance(row, str):
            return msgspec.UNSET
        if isinstance(row, dict):
            return None if "custom_id" in row else row.get(self.keys.id, msgspec.UNSET)
        try:
            ids = self._decode_ids(row) if isinstance(row, bytes) else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # another row than the one that was answered
        if ids is None or ids.custom_id is not msgspec.UNSET:
            return None
        return msgspec.UNSET if self.keys.id == "custom_id" or ids.id is None else ids.id


class _Ids(msgspec.Struct):
    """The keys of a row that may hold its id. Unlike the text of the row, they tell whatever way they are escaped."""

    id: Any = msgspec.UNSET
    custom_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _ids_decoder(id_key: str) -> msgspec.json.Decoder[Any]:
    """Return a decoder of `_Ids` with `id` under another key."""
    if id_key == "custom_id":  # a row that has it is parsed
        return msgspec.json.Decoder(_Ids)
    fields = [("id", Any, msgspec.UNSET), ("custom_id", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)]
    return msgspec.json.Decoder(msgspec.defstruct("_IdsUnder", fields, rename={"id": id_key}))


def _own_decoder(id_key: str, own_keys: frozenset[str]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of all of nvcli's own keys, and of two that tell OpenAI rows.

    Its objects have the row's `id`, `custom_id` and `body`, unless the id's key is one of the latter; UNSET stands for
    keys that a row does not have.
    """
    names = {"custom_id": "custom_id", "body": "body", "id": id_key}
    if id_key in OPENAI_KEYS:
        del names["id"]
    names |= {f"own_{number}": key for number, key in enumerate(own_keys.difference(names.values()))}
    return msgspec.json.Decoder(
        msgspec.defstruct("_OwnValues", [(name, Any, msgspec.UNSET) for name in names], rename=names)
    )


_decode_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode


def _split_line(line: Line) -> tuple[dict[str, msgspec.Raw], MarkedLine | None]:
    """Return the values of a line by key, as JSON, and the line in which NaN and Infinity are marked if it has them.

    Raises RowError.
    """
    if isinstance(line, DroppedLine):
        raise too_long()
    try:
        if not line.isascii():
            line.decode()  # texts that stay JSON are not decoded
        raws = _decode_raws(line)
    except UnicodeDecodeError as error:
        raise RowError("invalid_json", explain_bad_utf8(line, error.reason)) from None
    except RecursionError:
        raise _nested_too_deep() from None
    except msgspec.ValidationError:
        raise _no_object(line) from None
    except msgspec.DecodeError as error:
        marked = mark_nonfinite(line)
        if marked is None:
            raise RowError("invalid_json", explain_bad_json(line, str(error))) from None
        return _split_line(marked.line)[0], marked
    if is_deeper(line, MAX_LEVELS):
        raise _nested_too_deep()
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


def _own_objects(given: Mapping[str, Any], own_keys: frozenset[str]) -> dict[str, Any]:
    """Return the objects of nvcli's own keys as plain values, without those that are null. Raises RowError."""
    own = ((key, value) for key, value in given.items() if key in own_keys and value is not None)
    return {key: plain_value(value, key) for key, value in own}


def _no_object(line: bytes) -> RowError:
    """Return the error of a line that is some other JSON than an object, or no JSON after its beginning."""
    try:
        _check_json(line)
    except RecursionError:
        return _nested_too_deep()
    except msgspec.DecodeError as error:
        return RowError("invalid_json", explain_bad_json(line, str(error)))
    if is_deeper(line, MAX_LEVELS):
        return _nested_too_deep()
    return RowError("not_an_object", f'expected an object with keys, such as {{"prompt": …}}, got {_show_json(line)}')


def _show_json(line: bytes) -> str:
    text = line.strip()[:_SHOWN_BYTES].decode(errors="ignore")
    return text if len(text) < _SHOWN_BYTES else f"{text[:-1]}…"


def _nested_too_deep() -> RowError:
    return RowError("invalid_json", f"nested too deep; allowed: {MAX_LEVELS} levels of objects and lists")
