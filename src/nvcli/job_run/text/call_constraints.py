"""The grammars of answers that are held to tool calls: which a row needs, and what is wrong where there is none."""

from __future__ import annotations

from nvcli.errors import RowError
from nvcli.job_run.text.answer_reader import AnswerReader
from nvcli.job_run.text.call_grammars import CallableTool, callable_tools, write_call_grammar
from nvcli.job_run.text.grammar_maker import Grammar, GrammarMaker
from nvcli.job_run.text.tokenizer import Tokenizer
from nvcli.jobs.job import CallRule, Job, RowForm
from nvcli.jobs.rows.conversation_options import TOOL_CHOICE, TOOLS
from nvcli.structured import Structured


class CallConstraints:
    """Makes the grammars of answers that call tools, for one model."""

    def __init__(self, tokenizer: Tokenizer, reader: AnswerReader, grammars: GrammarMaker | None) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._grammars = grammars

    def grammar(self, job: Job, rule: CallRule) -> Grammar | None:
        """Return the grammar of a row's answer; None: the answer is free. Raises RowError.

        An answer that need not call is free where calls are not looked for, where it has a form already
        (`sampling.structured`), and where no end-of-sequence token ends it.
        """
        under = "" if job.place.form is RowForm.NATIVE else "body."
        name, sampling, form = f"`{under}{TOOL_CHOICE}`", job.sampling, self._reader.call_format
        if not rule.is_required and (form is None or sampling.structured is not None or sampling.ignore_eos):
            return None
        if form is None:
            raise RowError(
                "unsupported_parameter",
                f'{name} asks for a call, and how this model writes calls is not known; give "auto", or set '
                "`job.tool_parser`",
            )
        if sampling.structured is not None:
            raise RowError(
                "invalid_structured",
                f"{name} asks for a call, and the row for an answer of another form ({sampling.structured.form}); "
                "leave one of the two out",
            )
        if sampling.ignore_eos:
            raise RowError(
                "invalid_sampling",
                f"`ignore_eos` is true, and {name} asks for a call, which ends with an end-of-sequence token; leave "
                "one of the two out",
            )
        if self._grammars is None:
            raise RowError("unsupported_parameter", f"{name} is not supported here; leave it out")
        tools = callable_tools(job.tools, rule)
        try:
            text = write_call_grammar(
                form, tools, rule, chat_template=self._tokenizer.chat_template, token_id=self._tokenizer.token_id
            )
        except RecursionError:
            raise RowError("invalid_structured", f"`{under}{TOOLS}` are nested too deep for a grammar") from None
        try:
            return self._grammars.grammar(Structured(grammar=text), name=f"the grammar of `{under}{TOOLS}`")
        except RowError:
            self._find_fault(self._grammars, job, tools, f"{under}{TOOLS}")
            raise

    def _find_fault(self, grammars: GrammarMaker, job: Job, tools: list[CallableTool], name: str) -> None:
        """Raise the RowError of the first function whose schema cannot be used by itself."""
        numbers = {tool["function"]["name"]: number for number, tool in enumerate(job.tools)}
        for tool in tools:
            where = f"`{name}[{numbers[tool.name]}].function.parameters`"
            grammars.grammar(Structured(json_schema=tool.json_schema()), name=where)
