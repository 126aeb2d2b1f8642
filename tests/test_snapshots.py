"""Snapshots of what users and their programs rely on: options, keys, fields of JSON, exit codes and error types.

Each test compares what the program has with a file in tests/snapshots, a line for each thing. A change that is meant is
written there with `pytest tests/test_snapshots.py --update-snapshots`, and read in the diff.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from unittest.mock import Mock

import msgspec
import pytest
import typer.main

import nvcli.tools.bench.report
import nvcli.tools.check.report
import nvcli.tools.doctor.report
import nvcli.tools.profile.report
import nvcli.tools.quality.report
from marked_model import give_marks
from nvcli import errors
from nvcli.cli import main as cli
from nvcli.cli.messages import Interrupted
from nvcli.core.config import SECTIONS, RunConfig
from nvcli.core.system.standard_streams import OutputGone
from nvcli.job.job import (
    RETRYABLE_ERRORS,
    Choice,
    ClassifyAnswer,
    EmbedAnswer,
    ErrorInfo,
    JobResult,
    RowContext,
    RowForm,
    ScoreAnswer,
)
from nvcli.job.output.manifest import Manifest, save_manifest
from nvcli.job.own_files import manifest_path
from nvcli.job.progress.run_status import RunStatus
from nvcli.job.report.data import Report
from nvcli.job.rows.output_row import OutputForm, output_row
from nvcli.models.families import listing
from nvcli.models.families.catalogue import FAMILIES
from nvcli.tools.bench.bench import BenchResult
from nvcli.tools.bench.file_workload import FileWorkload
from nvcli.tools.check.check import CheckReport
from nvcli.tools.doctor.findings import Section
from nvcli.tools.profile.profile import MemoryProfile
from nvcli.tools.quality.compare import QualityReport

Snapshot = Callable[[str, Iterable[str]], None]
SOURCES = Path(nvcli.__file__).parent


# Options


class ShownOptions(contextlib.nullcontext[None]):
    """A formatter of help that keeps the text of each option as it is shown, with its default, under its group."""

    width = 1000

    def __init__(self) -> None:
        super().__init__()
        self.group = ""
        self.texts: dict[str, tuple[str, str]] = {}

    def section(self, title: str) -> ShownOptions:
        self.group = title
        return self

    def write_dl(self, rows: Iterable[tuple[str, str]]) -> None:
        self.texts |= {name: (self.group, text) for name, text in rows}


OF_TYPER = {"--help", "--install-completion", "--show-completion"}
"""Options whose help is not ours."""


def option_lines() -> Iterator[str]:
    """Describe every command: its texts, and its arguments and options with their groups."""
    program = typer.main.get_command(cli.app)
    root = typer.Context(program, info_name="nvcli", help_option_names=["-h", "--help"])
    commands = {"nvcli": program, **{f"nvcli {name}": each for name, each in program.commands.items()}}  # type: ignore[attr-defined]
    for name, command in commands.items():
        context = root if command is program else typer.Context(command, parent=root, info_name=name)
        shown = ShownOptions()
        command.format_options(context, shown)
        yield name
        for text in filter(None, (command.short_help, command.help, command.epilog)):
            yield from (f"    | {line}".rstrip() for line in inspect.cleandoc(text).replace("\b\n", "").splitlines())
        groups: dict[str, list[str]] = {}
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            assert record is not None, f"{parameter.name} is hidden"
            is_argument = parameter.param_type_name == "argument"
            group, text = shown.texts[parameter.metavar if is_argument else record[0]]
            groups.setdefault(group, []).append(parameter_line(parameter, text))
        for group, lines in groups.items():
            yield f"  {group}"
            yield from sorted(lines)


def parameter_line(parameter: Any, text: str) -> str:
    """Describe an argument or option. One with a value of its own has a word for it, others are switches."""
    names = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []
    words = [", ".join(sorted(names)), "" if getattr(parameter, "is_flag", False) else parameter.metavar]
    words += ["(required)" if parameter.required else ""]
    words += ["(several)" if parameter.nargs == -1 or getattr(parameter, "multiple", False) else ""]
    return f"    {' '.join(filter(None, words))}{'' if OF_TYPER & {*names} else f': {text}'}"


def test_commands_and_options(snapshot: Snapshot) -> None:
    snapshot("options.txt", option_lines())


# Keys of the configuration


def key_lines(kind: type[msgspec.Struct], components: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Describe the keys of a part of the configuration: allowed values, and the default."""
    for key, schema in components[kind.__name__]["properties"].items():
        path = f"{prefix}{key}"
        if not prefix and key in SECTIONS:
            yield from key_lines(SECTIONS[key], components, f"{path}.")
            continue
        nested: list[str] = []
        allowed = values_of(schema, nested)
        yield f"{path}: {allowed}" + (f" = {json.dumps(schema['default'])}" if "default" in schema else "")
        for name in nested:
            yield from key_lines(types.SimpleNamespace(__name__=name), components, f"{path}.")  # type: ignore[arg-type]


def values_of(schema: Mapping[str, Any], nested: list[str]) -> str:
    """Describe the values that a schema allows. The names of structs among them are added to `nested`."""
    if "$ref" in schema:
        nested.append(schema["$ref"].rpartition("/")[2])
        return "object"
    if "anyOf" in schema:
        return " | ".join(sorted(values_of(each, nested) for each in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    limits = "".join(f" {sign} {schema[name]}" for name, sign in LIMITS.items() if name in schema)
    inner = schema.get("items") or schema.get("additionalProperties")
    return f"{schema.get('type', 'any')}{limits}{f' of {values_of(inner, nested)}' if inner else ''}"


LIMITS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
    "minLength": "length >=",
    "maxLength": "length <=",
    "minItems": "items >=",
    "maxItems": "items <=",
}
"""Keywords of JSON Schema that bound a value."""


def test_keys_of_the_configuration(snapshot: Snapshot) -> None:
    _, components = msgspec.json.schema_components([RunConfig, *SECTIONS.values()])
    snapshot("keys.txt", key_lines(RunConfig, components))


# Arguments of Python programs


def signature_lines(path: Path, names: Sequence[str]) -> Iterator[str]:
    """Describe functions and the public methods of classes as they are written; Ray need not be there."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and (not each.name.startswith("_") or each.name == "__init__"):
                    yield f"{node.name}.{signature(each)}"
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            yield signature(node)


def signature(function: ast.FunctionDef) -> str:
    returned = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return f"{function.name}({ast.unparse(function.args)}){returned}"


def test_arguments_of_python_programs(snapshot: Snapshot) -> None:
    files = {
        "llm/llm.py": ("LLM", "Answers", "AnswerStream"),
        "llm/answer.py": ("Answer",),
        "ray/stage.py": ("generate",),
    }
    snapshot(
        "signatures.txt", (line for file, names in files.items() for line in signature_lines(SOURCES / file, names))
    )


# Fields of JSON


def field_lines(values: Iterable[Any]) -> list[str]:
    """Describe the fields of JSON values that have one form: where each stands, and the types that it has."""
    found: dict[str, set[str]] = {}
    for value in values:
        add_fields(value, "", found)
    parents = {path.removesuffix("[]") if path.endswith("[]") else path.rpartition(".")[0] for path in found}
    return [
        f"    {path}: {' | '.join(sorted(kinds))}"
        for path, kinds in found.items()
        if not (path in parents and kinds in ({"object"}, {"array"}))  # what it holds says so
    ]


TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
ANY = "{any}"
"""A value that stands for one of any type."""


def add_fields(value: Any, path: str, found: dict[str, set[str]]) -> None:
    found.setdefault(path, set()).add("any" if value == ANY else TYPES[type(value)])
    if isinstance(value, dict):
        is_by_text = path.endswith("top_logprobs[]") and all(isinstance(each, float) for each in value.values())
        for key, each in value.items():
            add_fields(each, f"{path}.{'{text}' if is_by_text else key}".removeprefix("."), found)
    elif isinstance(value, list):
        for each in value:
            add_fields(each, f"{path}[]", found)


def sample(kind: Any, *, other: bool = False) -> Any:
    """Make a value of a type with one value for everything in it. A union has its first member, or as `other` its last.

    Mappings by text have the key `{name}`.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return sample(arguments[0], other=other)
    if origin in (Union, types.UnionType):
        return sample(arguments[-1 if other else 0], other=other)
    if origin is Literal:
        return arguments[0]
    if origin in (list, Sequence):
        return [sample(arguments[0], other=other)]
    if origin is tuple:
        return tuple(sample(each, other=other) for each in arguments if each is not ...)
    if origin in (dict, Mapping):
        keys = get_args(arguments[0]) if get_origin(arguments[0]) is Literal else ["{name}"]
        return {key: sample(arguments[1], other=other) for key in keys}
    if kind is msgspec.UnsetType:
        return msgspec.UNSET
    if kind in (Any, object):
        return ANY
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
        hints = get_type_hints(kind)
        names = getattr(kind, "__struct_fields__", None) or [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: sample(hints[name], other=other) for name in names})
    return {str: "text", bool: True, int: 1, float: 1.0, bytes: b"", type(None): None}[kind]


def both(kind: Any) -> list[Any]:
    """Make two values of a type that have all its fields and types between them."""
    return [sample(kind), sample(kind, other=True)]


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def saved_manifest(manifest: Manifest, folder: Path) -> str:
    save_manifest(folder / "out.jsonl", manifest)
    return manifest_path(folder / "out.jsonl").read_text()


def test_fields_of_reports(snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made values go through the functions that write them, so that no field depends on a job or a machine."""
    versions = dict.fromkeys(nvcli.tools.bench.report.installed_versions(), "text")
    monkeypatch.setattr(nvcli.tools.bench.report, "installed_versions", lambda: versions)
    benches = [*both(BenchResult), dataclasses.replace(sample(BenchResult), workload=sample(FileWorkload))]
    texts: dict[str, list[str]] = {
        "the manifest": [saved_manifest(each, tmp_path) for each in both(Manifest)],
        "generate --report FILE.json": [as_json(each) for each in both(Report)],
        "generate --progress-file": [as_json(each) for each in both(RunStatus)],
        "check --json": [nvcli.tools.check.report.format_json(each) for each in both(CheckReport)],
        "bench --json": [nvcli.tools.bench.report.format_json(each) for each in benches],
        "profile-memory --json": [nvcli.tools.profile.report.format_json(each) for each in both(MemoryProfile)],
        "compare-quality --json": [nvcli.tools.quality.report.format_json(each) for each in both(QualityReport)],
        "doctor --json": [nvcli.tools.doctor.report.format_json([each]) for each in both(Section)],
        "models --json": [listing.format_families_json(FAMILIES)],
    }
    snapshot(
        "report_fields.txt",
        (line for name, each in texts.items() for line in [name, *field_lines(map(json.loads, each))]),
    )


# Output rows


class Made(NamedTuple):
    """What one job of the built-in model wrote."""

    rows: dict[str, Any]
    """Output rows by id."""
    manifest: Any
    report: Any
    progress: Any


QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"const": {}}}}]
LOGPROBS = {"logprobs": 2, "min_tokens": 4, "prompt_logprobs": 1, "return_token_ids": True}
INPUT_ROWS: list[dict[str, Any]] = [
    {"id": "an answer", "prompt": "What is 3 + 4?"},
    {"id": "an error", "prompt": 5},
    {"id": "columns of the input", "prompt": "3", "note": {"a": 1}, "usage": 2},
    {"id": "several answers", "prompt": "What is 3 + 4?", "sampling": {"n": 2, "best_of": 3}},
    {"id": "logprobs", "prompt": "What is 3 + 4?", "sampling": LOGPROBS},
    {
        "id": "a thought and a call",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "sampling": {"thinking_budget": 2, "max_tokens": 200},
    },
]


def openai(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": f"/v1/{url}", "body": {"max_tokens": 4, **body}}


OPENAI_ROWS = [
    openai(
        *("chat: an answer", "chat/completions"),
        messages=QUESTION,
        logprobs=True,
        top_logprobs=2,
        thinking_budget=0,
        min_tokens=4,
    ),
    openai(
        *("chat: a thought and a call", "chat/completions"),
        messages=QUESTION,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=200,
        thinking_budget=2,
    ),
    openai("chat: an error", "chat/completions", messages=5),
    openai("completion: an answer", "completions", prompt="3 + 4", logprobs=2, n=2),
    openai("completion: an error", "completions", prompt=None),
]
RESPONSE = {"custom_id": "response: an answer", "url": "/v1/responses", "body": {"input": "3 + 4"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("job")
    model = give_marks(folder / "model")
    rows = [*INPUT_ROWS, *OPENAI_ROWS, RESPONSE]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ["-m", str(model), "--max-tokens", "4", "-c", "none", "--set", "device=cpu"]
    options += ["--report", str(folder / "report.json"), "--progress-file", str(folder / "progress.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["nvcli", "generate", str(folder / "in.jsonl"), *options])
        assert cli._run() == 1, "some rows are errors on purpose"
    lines = (folder / "in.out.jsonl").read_text().splitlines()
    files = [manifest_path(folder / "in.out.jsonl"), folder / "report.json", folder / "progress.json"]
    answers = {row.get("custom_id", row["id"]): row for row in map(json.loads, lines)}
    return Made({name: answers[name] for name in map(name_of, rows)}, *(json.loads(file.read_text()) for file in files))


def name_of(row: Mapping[str, Any]) -> str:
    name: str = row.get("id") or row["custom_id"]
    return name


def task_rows() -> Iterator[tuple[str, list[Any]]]:
    """Make the rows of tasks that generate nothing, and one with all that a choice can have."""
    forms = [
        ("score: an answer", RowForm.SCORE, both(ScoreAnswer)),
        ("score: an error", RowForm.SCORE, [None]),
        ("embed: an answer", RowForm.EMBEDDING, both(EmbedAnswer)),
        ("embed: an error", RowForm.EMBEDDING, [None]),
        ("embeddings: an answer", RowForm.OPENAI_EMBEDDING, both(EmbedAnswer)),
        ("classify: an answer", RowForm.CLASSES, both(ClassifyAnswer)),
        ("classify: an error", RowForm.CLASSES, [None]),
    ]
    for name, form, answers in forms:
        error = None if answers[0] else ErrorInfo(type="aborted", message="")
        context = RowContext(id="a", index=0, line="line 1", form=form)
        results = [JobResult(context=context, answer=answer, error=error) for answer in answers]
        yield name, [json.loads(as_json(output_row(result, OutputForm()))) for result in results]
    for name, form in (("all of a choice", RowForm.NATIVE), ("chat: all of a choice", RowForm.CHAT)):
        context = RowContext(id="a", index=0, line="line 1", form=form)
        results = [JobResult(context=context, choices=[choice]) for choice in both(Choice)]
        yield name, [json.loads(as_json(output_row(result, OutputForm(text_field="answer")))) for result in results]


def test_fields_of_output_rows(snapshot: Snapshot, made: Made) -> None:
    kinds = [*((name, [row]) for name, row in made.rows.items()), *task_rows()]
    snapshot("row_fields.txt", (line for name, rows in kinds for line in [name, *field_lines(rows)]))


def test_facts_that_an_output_depends_on(snapshot: Snapshot, made: Made) -> None:
    snapshot("manifest_facts.txt", field_lines([made.manifest["facts"]]))


def test_a_job_writes_the_fields_of_the_snapshot(made: Made) -> None:
    for kind, value in ((Manifest, made.manifest), (Report, made.report), (RunStatus, made.progress)):
        assert list(value) == list(json.loads(as_json(sample(kind))))


# Errors


def test_exit_codes(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each way in which a command ends, with what it says. The meaning of codes for users is in options.txt."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.NvcliError)]
    ends: list[BaseException] = [kind("why") for kind in kinds if kind is not errors.RowError]
    ends += [typer.Exit(1), Interrupted("why"), OutputGone(), RuntimeError("why")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["nvcli", "models"])
    lines = [f"without an error: {cli._run()}"]
    for end in ends:
        with monkeypatch.context() as patch:
            patch.setattr(listing, "format_families", Mock(side_effect=end))
            code = cli._run()
        said = capsys.readouterr().err.splitlines() or [""]
        lines.append(f"{type(end).__name__}: {code} {said[-1]}".rstrip())
    monkeypatch.setattr(sys, "argv", ["nvcli", "models", "--no-such-option"])
    lines.append(f"a wrong command line: {cli._run()}")
    snapshot("exit_codes.txt", lines)


def error_types() -> set[str]:
    """The types that errors of rows are made with anywhere in the program."""
    found = {errors.INTERNAL_ERROR}
    texts = (path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    for text in filter(re.compile(r"\b(RowError|Failure)\(").search, texts):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("RowError", "Failure") and node.args:
                found |= texts_of(node.args[0])
    return found


def texts_of(node: ast.expr) -> set[str]:
    if isinstance(node, ast.IfExp):
        return texts_of(node.body) | texts_of(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) else set()


def test_error_types(snapshot: Snapshot) -> None:
    """Each with the status of OpenAI's rows, and whether `--retry-errors` tries again."""
    lines = []
    for kind in sorted(error_types()):
        context = RowContext(id="a", index=0, line="line 1", form=RowForm.CHAT)
        row = output_row(JobResult(context=context, error=ErrorInfo(type=kind, message="")), OutputForm())
        lines.append(f"{kind}: {row['response']['status_code']}{', tried again' * (kind in RETRYABLE_ERRORS)}")
    snapshot("error_types.txt", lines)
