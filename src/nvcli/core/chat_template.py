"""Chat templates of a job: a template file in place of the model's, and the variables for a template.

Loads no tokenizer and renders nothing, so that errors come before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcli.core.system.regular_file import read_regular
from nvcli.core.validation import shorten
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    import jinja2.nodes
    import jinja2.parser
    import jinja2.runtime

MAX_TEMPLATE_BYTES = 10_000_000
"""Maximum size of a chat template's file in bytes."""

_RESERVED = (
    *("self", "messages", "conversation", "chat_template", "tokenize", "sanitize_control_tokens", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Parameters of transformers' `apply_chat_template`, which cannot be variables of a template."""

_FOR_THE_RENDERER = ("add_generation_prompt", "continue_final_message")
"""Variables that affect the prompt even if the template does not use them."""


def reserved_variable(variables: Mapping[str, Any]) -> str | None:
    """Return an error message for the first name that cannot be a variable of a chat template; None if all can."""
    name = next((name for name in variables if name in _RESERVED), None)
    return name and f"`{shorten(name)}` cannot be a variable of a chat template; remove it"


def read_chat_template(path: Path) -> str:
    """Read a chat template from a file. Raises ConfigError if it cannot be read or is not a Jinja template."""
    try:
        text = read_regular(path, most_bytes=MAX_TEMPLATE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the chat template {path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error.strerror}") from None
    if (problem := syntax_problem(text)) is not None:
        raise ConfigError(f"the chat template {path}{problem}")
    return text


def syntax_problem(text: str) -> str | None:
    """Return what is wrong with a template that is not Jinja, as it follows the file's name; None: it is Jinja."""
    import jinja2

    try:
        _parse(text)
    except jinja2.TemplateSyntaxError as error:
        return f":{error.lineno}: not a Jinja template: {error.message}"
    except RecursionError:
        return ": nested too deeply"
    return None


def unknown_variables(template: str, variables: Iterable[str]) -> list[str]:
    """Return the variables that have no effect on a chat template, because it does not use them.

    Empty if the template cannot be parsed: rendering it reports that.
    """
    known = _variables_of(template)
    if known is None:
        return []
    return [name for name in variables if name not in known and name not in _FOR_THE_RENDERER]


@lru_cache(maxsize=4)
def _variables_of(template: str) -> Set[str] | None:
    """Return the variables that a chat template uses; None if it cannot be parsed."""
    import jinja2
    import jinja2.meta

    try:
        tree = _parse(template)
        assert tree.environment is not None  # that of `_parse`
        names = jinja2.meta.TrackingCodeGenerator(tree.environment)
        names.optimizer = None  # it computes constants
        names.visit(tree)
    except (jinja2.TemplateError, RecursionError):
        return None
    return names.undeclared_identifiers


def _parse(text: str) -> jinja2.nodes.Template:
    """Return the syntax tree of a chat template. Raises jinja2.TemplateSyntaxError and RecursionError.

    Its outputs are no constants for who walks it, because jinja would compute them, such as `"a" * 10**10`.
    """
    import jinja2
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        """The tag that transformers puts around the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    @jinja2.pass_context
    def as_is(context: jinja2.runtime.Context, value: object) -> object:
        """Return an output as it is; as it might depend on the context, outputs are no constants."""
        return value

    tags: list[str | type[jinja2.ext.Extension]] = [Generation, "jinja2.ext.loopcontrols"]
    return jinja2.Environment(extensions=tags, autoescape=False, finalize=as_is).parse(text)
