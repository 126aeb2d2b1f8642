"""LLM: the way in for Python programs.

    from nvcli import LLM

    with LLM("Qwen/Qwen3-8B") as llm:
        for answer in llm.generate(["What is 3+4?"], sampling={"temperature": 0}):
            print(answer.text)

Rows, answers and errors are those of `nvcli generate` (`docs/rows.md`). Rows are read as they are needed, and answers
come in the order of the rows. The engines stay alive between calls; calls may run at the same time, in one thread or
several, and one call may read its rows from the answers of another.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from nvcli.core.config import RunConfig, flag_keys
from nvcli.core.config_types import Order, ParallelSize
from nvcli.core.sampling_params import MAX_INT
from nvcli.core.system.process_limits import check_process
from nvcli.core.task_config import Normalization, ScoreConfig, Task
from nvcli.core.validation import InvalidValue, convert, show
from nvcli.errors import ClosedError, ConfigError
from nvcli.job.job import JobResult
from nvcli.job.rows.conversation import CONVERSATION_KEYS
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.task_rows import ScoreRows
from nvcli.job.run.engines import StartEngine, start_engine
from nvcli.llm.answer import Answer, make_answer
from nvcli.llm.call import Call
from nvcli.llm.keywords import METHODS, read_config, says_what_to_use
from nvcli.llm.rows import ReadRow, Row, as_conversation, as_row, check_rows
from nvcli.llm.sampling import read_samplings
from nvcli.llm.session import Session

Sampling = Mapping[str, Any] | object
"""How tokens are chosen: a dict, a `SamplingParams`, or an object with such attributes."""

_ORDERS = ("input", "completion")


class LLM:
    """A model that is loaded and answers rows until it is closed.

    It is closed by `close`, at the end of a `with` block, as garbage, and at the end of the program.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tp: ParallelSize | None = None,
        pp: int | None = None,
        dp: ParallelSize | None = None,
        sampling: Mapping[str, Any] | None = None,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Load a model, and return when it is ready.

        `model` is a folder, a Hugging Face id or `demo`. `tp`, `pp` and `dp` are short for `tensor_parallel_size`,
        `pipeline_parallel_size` and `data_parallel_size`. `sampling` holds the defaults of every row's `sampling`.
        `config` is a configuration file. `settings` are any other keys of `docs/configuration.md` by name, such as
        `max_model_len=4096` or `job={"system": "Be brief."}`; they go over those of the file. The keys of `job` that
        are about files have no effect, `order` among them. Keywords of vLLM's are understood where they mean the same
        (`keywords`).

        Raises ConfigError, LoadError, CapacityError or WorkerError. Messages for the user go to the logger `nvcli`.
        """
        flags = {"--tp": tp, "--pp": pp, "--dp": dp}
        for flag, value in flags.items():
            if value is not None and (key := flag_keys()[flag]) in settings:
                raise ConfigError(f"`{key}` and its short name `{flag.lstrip('-')}` are given; leave one out")
        run = read_config(model, config, flags, settings | ({} if sampling is None else {"sampling": sampling}))
        self._open(run, log_note, start_engine, None, False)

    @classmethod
    def from_config(
        cls,
        run: RunConfig,
        *,
        note: Callable[[str], None] | None = None,
        start: StartEngine = start_engine,
        num_requests: int | None = None,
        needs_chat_template: bool = False,
    ) -> LLM:
        """Load the model of a configuration that was read already. The keywords are those of `Session`.

        Notes go to the logger `nvcli` if `note` is None.
        """
        llm = cls.__new__(cls)
        llm._open(run, note or log_note, start, num_requests, needs_chat_template)
        return llm

    def _open(
        self,
        run: RunConfig,
        note: Callable[[str], None],
        start: StartEngine,
        num_requests: int | None,
        needs_chat_template: bool,
    ) -> None:
        check_process()
        session = Session(
            run, note=note, start=start, num_requests=num_requests, needs_chat_template=needs_chat_template
        )
        self._session = session
        # Garbage is collected at any place, so that nothing may be waited for there; at the end of the program it may.
        self._finalizer = weakref.finalize(self, _collect, session)
        self._finalizer.atexit = False
        atexit.register(session.close)
        try:
            session.wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> RunConfig:
        """The configuration, as it was given."""
        return self._session.run

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self._session.max_model_len

    @property
    def has_chat_template(self) -> bool:
        """Whether the model answers conversations."""
        return self._session.has_chat_template

    @says_what_to_use()
    def generate(
        self,
        rows: Iterable[Row] | str | Mapping[str, Any],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        order: Order = "input",
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | None = None,
    ) -> Answers:
        """Answer rows, and return an iterator over the answers.

        A row is a dict in the row format, a text (its `prompt`), a list of messages or a list of token ids. `rows` may
        be any iterable, or one text or dict. It is read at once by a thread of its own, as far ahead as the engines
        need (`job.run.plan.window_rows`) and no further.

        `sampling_params`, or `sampling`, goes over the LLM's defaults and under the `sampling` of a row: a dict, a
        `SamplingParams` or an object with such attributes, one for all rows or a list with one for each. `order` is
        `input` (the answers in the order of the rows) or `completion` (each as soon as it is there). `seed` takes the
        place of the configuration's; the same rows with the same seed get the same answers, however often they are
        asked.

        A row that cannot be answered is an answer with an `error`. Raises ConfigError and ClosedError, and the error of
        an engine that has died.
        """
        return self._generate(rows, sampling_params, sampling, order=order, seed=seed)

    @says_what_to_use("chat_template_kwargs", *CONVERSATION_KEYS)
    def chat(
        self,
        messages: Iterable[Row] | str | Mapping[str, Any],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        order: Order = "input",
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Answer | Answers:
        """Answer one conversation, and return its answer; or several, and return an iterator over the answers.

        A conversation is a list of messages, a text (the message of a user), or a dict with `messages` and other keys
        of a row. Several are any iterable of conversations. `options` are keys that stand beside `messages` in a row,
        for all conversations that do not have their own: `tools`, `tool_choice`, `chat_template_kwargs` and the like.
        The other arguments and the errors are those of `generate`. The one answer of one conversation may have an
        `error`.
        """
        is_one = _is_conversation(messages)
        beside = {key: value for key, value in options.items() if value is not None}

        def read(row: Row, keys: RowKeys) -> dict[str, Any]:
            return {**beside, **as_conversation(row, keys)}

        rows: Any = [messages] if is_one else messages
        answers = self._generate(rows, sampling_params, sampling, order=order, seed=seed, read=read)
        return next(answers) if is_one else answers

    @says_what_to_use()
    def score(
        self,
        rows: Iterable[Row] | str | Mapping[str, Any],
        *,
        order: Order = "input",
        normalize: Normalization | None = None,
        token_logprobs: bool | None = None,
    ) -> Answers:
        """Score texts, and return an iterator over the answers: the rows that `nvcli score` writes.

        A row is one of `generate` with a `continuation` or `choices`; a row without them has its prompt scored itself.
        `normalize` and `token_logprobs` take the place of the configuration's (`ScoreConfig`). The other arguments and
        the errors are those of `generate`.
        """
        self._check_task("score")
        given = {"normalize": normalize, "token_logprobs": token_logprobs}
        own = {key: value for key, value in given.items() if value is not None}
        config = {**msgspec.to_builtins(self._session.run.score), **own}
        try:
            task = ScoreRows(convert(config, ScoreConfig, under=("score",)))
        except InvalidValue as error:
            raise ConfigError(error.message) from None
        return self._answer(rows, order, task=task)

    @says_what_to_use()
    def embed(self, rows: Iterable[Row] | str | Mapping[str, Any], *, order: Order = "input") -> Answers:
        """Make embeddings, and return an iterator over the answers: the rows that `nvcli embed` writes.

        The LLM was made with `task="embed"`. A row is one of `generate`. The other arguments and the errors are those
        of `generate`.
        """
        self._check_task("embed")
        return self._answer(rows, order, task=self._session.task)

    @says_what_to_use()
    def stream(
        self,
        row: Row,
        sampling_params: Sampling | None = None,
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
    ) -> AnswerStream:
        """Answer one row, and return an iterator over the text of its answer as it comes.

        Where the row asks for several answers (`n`), the text is that of the first; with `best_of` it is that of the
        best and comes in one piece. The other arguments and the errors are those of `generate`.
        """
        _check_seed(seed)
        self._check_task("generate")
        own = read_samplings(sampling_params, sampling)
        call = self._session.open_call([row], order="input", sampling=own, seed=seed, streams=True)
        return AnswerStream(self, call)

    def _generate(
        self,
        rows: Iterable[Row] | str | Mapping[str, Any],
        sampling_params: object,
        sampling: object,
        *,
        order: Order,
        seed: int | None,
        read: ReadRow = as_row,
    ) -> Answers:
        _check_seed(seed)
        self._check_task("generate")
        return self._answer(rows, order, sampling=read_samplings(sampling_params, sampling), seed=seed, read=read)

    def _check_task(self, task: Task) -> None:
        """Raise ConfigError unless the engines do what a method needs."""
        makes_embeddings = self._session.run.task == "embed"
        if makes_embeddings != (task == "embed"):
            way_out = "leave `task` out" if makes_embeddings else 'make it with task="embed"'
            what = "embeddings alone" if makes_embeddings else "no embeddings"
            raise ConfigError(f"this LLM makes {what}: for `{task}`, {way_out}")

    def _answer(self, rows: Iterable[Row] | str | Mapping[str, Any], order: Order, **options: Any) -> Answers:
        """Open a call. `options` are those of `Session.open_call`. Raises what `generate` raises."""
        if order not in _ORDERS:
            raise ConfigError(f"order={show(order)}: allowed: {' or '.join(_ORDERS)}")
        rows = [rows] if isinstance(rows, str | Mapping) else rows
        check_rows(rows, options.get("sampling"))
        return Answers(self, self._session.open_call(rows, order=order, **options))

    if not TYPE_CHECKING:  # which knows what there is

        def __getattr__(self, name: str) -> Any:
            way_out = f"; {METHODS[name]}" if name in METHODS else ""
            raise AttributeError(f"an LLM has no `{name}`{way_out}")

    def close(self) -> None:
        """End the engines, and the calls that are open with a ClosedError. It may be called again."""
        self._finalizer.detach()
        self._session.close()
        atexit.unregister(self._session.close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self._session.run.model!r})"


class _Results:
    """A call as its consumer sees it. It keeps the LLM alive, and ends the call when it is closed or collected."""

    def __init__(self, llm: LLM, call: Call) -> None:
        self._llm = llm
        self._call = call

    def close(self) -> None:
        """Want no more, and have the engines drop what they compute for it. It may be called again."""
        self._llm._session.leave(self._call)

    def _take(self) -> JobResult | str | None:
        try:
            item = self._call.next()
        except BaseException:  # Ctrl-C too: the LLM stays usable, and free of what nobody reads
            self.close()
            raise
        if item is None:
            self.close()
        return item

    def _answer_of(self, result: JobResult) -> Answer:
        return make_answer(result, self._llm._session.form, self._call.take_prompt(result.context.index))

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()


class Answers(_Results):
    """An iterator over the answers of one call."""

    def __iter__(self) -> Iterator[Answer]:
        return self

    def __next__(self) -> Answer:
        result = self._take()
        if result is None:
            raise StopIteration
        assert isinstance(result, JobResult)
        return self._answer_of(result)

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigError(f"answers come one by one; list(answers)[{index}] waits for all of them")


class AnswerStream(_Results):
    """An iterator over the pieces of one answer's text, and the whole answer at its end."""

    def __init__(self, llm: LLM, call: Call) -> None:
        super().__init__(llm, call)
        self._pieces: list[str] = []
        self._answer: Answer | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def answer(self) -> Answer:
        """The whole answer; this waits for its end. Raises ClosedError if the stream was closed before."""
        for _ in self:
            pass
        if self._answer is None:
            raise ClosedError("this stream was closed before its answer came")
        return self._answer

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (item := self._take()) is not None:
            if isinstance(item, JobResult):
                self._answer = self._answer_of(item)
                if item.choices and item.choices[0].score is not None:  # the best one is known only now
                    self._pieces.append(item.choices[0].text)
                    return item.choices[0].text
            else:
                self._pieces.append(item)
                return item
        raise StopIteration


def log_note(line: str) -> None:
    """Hand a line for the user to the logger `nvcli`: warnings as such, anything else for those who ask for it."""
    warning = line.removeprefix("warning: ")
    logging.getLogger("nvcli").log(logging.INFO if warning == line else logging.WARNING, "%s", warning)


def _collect(session: Session) -> None:
    """Have the session of an LLM that is garbage end."""
    session.begin_close()
    atexit.unregister(session.close)


def _check_seed(seed: int | None) -> None:
    if seed is not None and not (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= MAX_INT):
        raise ConfigError(f"seed={show(seed)}: allowed: an integer from 0 to {MAX_INT}")


def _is_conversation(messages: object) -> bool:
    """Tell whether this is one conversation rather than several."""
    if isinstance(messages, str | Mapping):
        return True
    if not isinstance(messages, Sequence) or not messages:
        return False
    first = messages[0]
    return isinstance(first, Mapping) and "role" in first
