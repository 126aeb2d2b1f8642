"""LLM: the entry point for Python programs.

    from nvcli import LLM

    with LLM("Qwen/Qwen3-8B") as llm:
        for answer in llm.generate(["What is 3+4?"], sampling={"temperature": 0}):
            print(answer.text)

Rows, answers and errors are those of `nvcli generate` (`docs/rows.md`). Rows are read as they are needed, and answers
come in the order of the rows. The engines stay alive between calls; calls may run concurrently, in one thread or
several, and one call may read its rows from another's answers.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from nvcli.core.config import RunConfig, flag_keys
from nvcli.core.config_types import MAX_INT64, Order, ParallelSize
from nvcli.core.task_config import Normalization, ScoreConfig, Task
from nvcli.core.validation import InvalidValue, convert, is_integer, show
from nvcli.core.weight_changes import LoadWeights, Sleep, Wake
from nvcli.errors import ClosedError, ConfigError, LoadError
from nvcli.job.job import JobResult
from nvcli.job.rows.conversation import CONVERSATION_KEYS
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.task_rows import ScoreRows
from nvcli.job.run.engines import StartEngine, start_engine
from nvcli.llm.answer import Answer, make_answer
from nvcli.llm.call import Call
from nvcli.llm.call_defaults import Lora
from nvcli.llm.keywords import METHODS, read_config, says_what_to_use
from nvcli.llm.rows import Row, as_conversation, check_rows, plain_setting
from nvcli.llm.sampling import read_samplings
from nvcli.llm.session import Session

Sampling = Mapping[str, Any] | object
"""How tokens are chosen: a dict, a `SamplingParams`, or any object with such attributes."""

SleepLevel = Literal[1, 2]

_ORDERS = ("input", "completion")


class LLM:
    """A loaded model, which answers rows until it is closed.

    It is closed by `close`, at the end of a `with` block, by garbage collection, and at the end of the program.
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
        `pipeline_parallel_size` and `data_parallel_size`. `sampling` holds defaults for every row's `sampling`.
        `config` is a configuration file. `settings` are any other keys of `docs/configuration.md` by name, such as
        `max_model_len=4096` or `job={"system": "Be brief."}`; they override the file. Keys of `job` about files,
        including `order`, have no effect. vLLM's keywords are accepted if they mean the same here (`keywords`).

        Raises ConfigError, LoadError, CapacityError or WorkerError. Messages for the user go to the logger `nvcli`.
        """
        flags = {"--tp": tp, "--pp": pp, "--dp": dp}
        for flag, value in flags.items():
            if value is not None and (key := flag_keys()[flag]) in settings:
                raise ConfigError(f"`{key}` and its short name `{flag.lstrip('-')}` are given; leave one out")
        run = read_config(model, config, flags, settings | ({} if sampling is None else {"sampling": sampling}))
        self._open(Session(run, note=log_note))

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
        session = Session(
            run,
            note=note or log_note,
            start=start,
            num_requests=num_requests,
            needs_chat_template=needs_chat_template,
        )
        llm._open(session)
        return llm

    def _open(self, session: Session) -> None:
        self._session = session
        # Garbage collection may run anywhere, so nothing may be waited for there; at the end of the program it may.
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
        """The configuration, as given."""
        return self._session.resolved.run

    @property
    def max_model_len(self) -> int:
        """Maximum prompt + answer tokens."""
        return self._session.resolved.config.max_model_len

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that rows and calls may choose."""
        return self._session.resolved.adapter_names

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can answer conversations."""
        return self._session.has_chat_template

    @says_what_to_use()
    def generate(
        self,
        rows: Iterable[Row] | str | Mapping[str, Any],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        order: Order = "input",
        sampling: Sampling | Sequence[Sampling] | None = None,
        lora: Lora = None,
        seed: int | None = None,
    ) -> Answers:
        """Answer rows, and return an iterator over the answers.

        A row is a dict in the row format, a text (its `prompt`), a list of messages or a list of token ids. `rows` may
        be any iterable, or one text or dict. A thread starts reading it at once, only as far ahead as the engines need
        (`job.run.plan.window_rows`).

        `sampling_params`, or `sampling`, overrides the LLM's defaults and is overridden by a row's own `sampling`: a
        dict, a `SamplingParams` or an object with such attributes, either one for all rows or a list with one per row.
        `lora` is the name of an adapter for rows without a `lora` of their own, or a list with one per row, if the LLM
        has adapters with names. `order` is `input` (the order of the rows) or `completion` (each answer as soon as it
        is there). `seed` replaces the configuration's; the same rows with the same seed get the same answers every
        time.

        A row that cannot be answered gives an answer with an `error`. Raises ConfigError, ClosedError, and the error of
        an engine that died.
        """
        return self._generate(rows, sampling_params, sampling, seed, order=order, lora=lora)

    @says_what_to_use("chat_template_kwargs", *CONVERSATION_KEYS)
    def chat(
        self,
        messages: Iterable[Row] | str | Mapping[str, Any],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        order: Order = "input",
        sampling: Sampling | Sequence[Sampling] | None = None,
        lora: Lora = None,
        seed: int | None = None,
        **options: Any,
    ) -> Answer | Answers:
        """Answer one conversation, and return its answer; or several, and return an iterator over the answers.

        A conversation is a list of messages, a text (a user's message), or a dict with `messages` and other keys of a
        row. Several conversations may come from any iterable. `options` are keys that go next to `messages` in a row,
        for all conversations that do not set them: `tools`, `tool_choice`, `chat_template_kwargs` and the like. The
        other arguments and the errors are those of `generate`. A single conversation's answer may have an `error`, too.
        """
        is_one = _is_conversation(messages)
        beside = {key: value for key, value in options.items() if value is not None}

        def read(row: Row, keys: RowKeys) -> dict[str, Any]:
            return {**beside, **as_conversation(row, keys)}

        rows: Any = [messages] if is_one else messages
        answers = self._generate(rows, sampling_params, sampling, seed, order=order, lora=lora, read=read)
        return next(answers) if is_one else answers

    @says_what_to_use()
    def score(
        self,
        rows: Iterable[Row] | str | Mapping[str, Any],
        *,
        order: Order = "input",
        lora: Lora = None,
        normalize: Normalization | None = None,
        token_logprobs: bool | None = None,
    ) -> Answers:
        """Score texts, and return an iterator over the answers: the rows that `nvcli score` writes.

        A row is as for `generate`, with a `continuation` or `choices`; without these, its prompt itself is scored.
        `normalize` and `token_logprobs` replace the configuration's (`ScoreConfig`). The other arguments and the errors
        are those of `generate`.
        """
        self._check_task("score")
        given = {"normalize": normalize, "token_logprobs": token_logprobs}
        own = {key: value for key, value in given.items() if value is not None}
        config = {**msgspec.to_builtins(self.config.score), **own}
        try:
            task = ScoreRows(convert(config, ScoreConfig, under=("score",)))
        except InvalidValue as error:
            raise ConfigError(error.message) from None
        return self._answer(rows, order=order, lora=lora, task=task)

    @says_what_to_use()
    def embed(
        self, rows: Iterable[Row] | str | Mapping[str, Any], *, order: Order = "input", lora: Lora = None
    ) -> Answers:
        """Compute embeddings, and return an iterator over the answers: the rows that `nvcli embed` writes.

        The LLM must have been made with `task="embed"`. A row is as for `generate`, and so are the other arguments and
        the errors.
        """
        self._check_task("embed")
        return self._answer(rows, order=order, lora=lora, task=self._session.resolved.task)

    @says_what_to_use()
    def classify(
        self, rows: Iterable[Row] | str | Mapping[str, Any], *, order: Order = "input", lora: Lora = None
    ) -> Answers:
        """Compute rewards or classes, and return an iterator over the answers: the rows that `nvcli classify` writes.

        The LLM must have been made with `task="classify"`. The rest is as for `embed`.
        """
        self._check_task("classify")
        return self._answer(rows, order=order, lora=lora, task=self._session.resolved.task)

    @says_what_to_use()
    def stream(
        self,
        row: Row,
        sampling_params: Sampling | None = None,
        *,
        sampling: Sampling | None = None,
        lora: str | None = None,
        seed: int | None = None,
    ) -> AnswerStream:
        """Answer one row, and return an iterator over the text of its answer as it comes.

        If the row asks for several answers (`n`), the text is that of the first; with `best_of` it is that of the best,
        in one piece. The other arguments and the errors are those of `generate`.
        """
        self._check_task("generate")
        own = read_samplings(sampling_params, sampling)
        call = self._session.open_call(
            [row], order="input", sampling=own, lora=lora, seed=_read_seed(seed), streams=True
        )
        return AnswerStream(self, call)

    def _generate(
        self, rows: Any, sampling_params: object, sampling: object, seed: int | None, **options: Any
    ) -> Answers:
        """Answer rows. `options` are those of `_answer`."""
        self._check_task("generate")
        own = read_samplings(sampling_params, sampling)
        return self._answer(rows, sampling=own, seed=_read_seed(seed), **options)

    def _check_task(self, task: Task) -> None:
        """Raise ConfigError unless the engines do what a method needs."""
        made_for = self.config.task
        if task != made_for and (task, made_for) != ("score", "generate"):
            way_out = f'make it with task="{task}"' if task in ("embed", "classify") else "leave `task` out"
            what = {"generate": "answers and scores", "score": "scores", "embed": "embeddings", "classify": "classes"}
            raise ConfigError(f"this LLM makes {what[made_for]} alone; for `{task}`, {way_out}")

    def _answer(self, rows: Iterable[Row] | str | Mapping[str, Any], *, order: Order, **options: Any) -> Answers:
        """Open a call. `options` are those of `Session.open_call`. Raises what `generate` raises."""
        if order not in _ORDERS:
            raise ConfigError(f"order={show(order)}: allowed: {' or '.join(_ORDERS)}")
        rows = [rows] if isinstance(rows, str | Mapping) else rows
        check_rows(rows)
        return Answers(self, self._session.open_call(rows, order=order, **options))

    if not TYPE_CHECKING:  # which names what there is

        def __getattr__(self, name: str) -> Any:
            way_out = f"; {METHODS[name]}" if name in METHODS else ""
            raise AttributeError(f"an LLM has no `{name}`{way_out}")

    def load_weights(self, folder: str | Path) -> None:
        """Replace the weights by those of another checkpoint of the same architecture, in place.

        `folder` is a local folder with config.json and *.safetensors files. The next call answers with the new weights;
        tokenizer, chat template and defaults stay. The prefix cache is emptied, and an LLM that is asleep wakes up.

        Raises LoadError if the folder has another architecture or cannot be read, and ConfigError while answers are
        still to come; the old weights then stay in use.
        """
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError(f"load_weights: {show(folder)} is no path; give a local folder with *.safetensors files")
        path = Path(folder).expanduser().absolute()
        if not path.is_dir():
            found = f"{path} is no folder" if path.exists() else f"there is no folder {path}"
            raise LoadError(f"load_weights: {found}; give a local folder with *.safetensors files")
        self._session.change_weights(LoadWeights(str(path)))

    def sleep(self, level: SleepLevel = 1) -> None:
        """Give the memory of the weights and of the KV cache back, until `wake` or `load_weights`.

        `level` 1 keeps the weights in host memory; 2 drops them, and they are read from their files again. The prefix
        cache is lost. On a GPU the context, buffers and CUDA graphs stay. Until then other methods raise a ClosedError.

        Raises ConfigError while answers are still to come and if the GPU's driver cannot do it, and CapacityError if
        host memory has no room for the weights.
        """
        if level not in (1, 2):
            raise ConfigError(f"level={show(level)}: allowed: 1 or 2")
        self._session.change_weights(Sleep(level))

    def wake(self) -> None:
        """Take the memory again after `sleep`, and put the weights back. Does nothing to an LLM that is awake.

        Raises CapacityError if other programs hold the memory, and LoadError if dropped weights cannot be read any
        more; the LLM then stays asleep.
        """
        self._session.change_weights(Wake())

    def close(self) -> None:
        """End the engines; open calls end with a ClosedError. Idempotent."""
        self._finalizer.detach()
        self._session.close()
        atexit.unregister(self._session.close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.config.model!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied, as its engines belong to its process; make one in each")


class _Results:
    """A call as its consumer sees it. It keeps the LLM alive, and ends the call when it is closed or collected."""

    def __init__(self, llm: LLM, call: Call) -> None:
        self._llm = llm
        self._call = call

    def close(self) -> None:
        """Stop waiting for results, and let the engines drop the call's work. Idempotent."""
        self._llm._session.leave(self._call)

    def _take(self) -> JobResult | str | None:
        self._llm._session.check_process()
        try:
            item = self._call.next()
        except BaseException:  # Ctrl-C too: the LLM stays usable, and free of work that no one reads
            self.close()
            raise
        if item is None:
            self.close()
        return item

    def _answer_of(self, result: JobResult) -> Answer:
        return make_answer(result, self._llm._session.form, self._call.take_prompt(result.context.index))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_call") and not is_finalizing():  # modules may be gone then, and the engines end anyway
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("answers that are still to come cannot be pickled or copied; list(answers) waits for them")


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
        raise ConfigError(f"answers come one at a time; list(answers)[{index}] waits for all of them")


class AnswerStream(_Results):
    """An iterator over the pieces of one answer's text, with the whole answer at the end."""

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
        """The whole answer; waits for its end. Raises ClosedError if the stream was closed before."""
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
                if item.choices and item.choices[0].score is not None:  # only now is the best one known
                    self._pieces.append(item.choices[0].text)
                    return item.choices[0].text
            else:
                self._pieces.append(item)
                return item
        raise StopIteration


def log_note(line: str) -> None:
    """Send a line for the user to the logger `nvcli`: warnings as such, anything else as information."""
    warning = line.removeprefix("warning: ")
    logging.getLogger("nvcli").log(logging.INFO if warning == line else logging.WARNING, "%s", warning)


def _collect(session: Session) -> None:
    """End the session of an LLM that is garbage-collected."""
    session.begin_close()
    atexit.unregister(session.close)


def _read_seed(seed: object) -> int | None:
    """Return a seed, which may be an integer of numpy. Raises ConfigError."""
    value = plain_setting("seed", seed)
    if value is not None and not is_integer(value, 0, MAX_INT64):
        raise ConfigError(f"seed={show(seed)}: allowed: an integer from 0 to {MAX_INT64}")
    return value


def _is_conversation(messages: object) -> bool:
    """Whether this is one conversation rather than several."""
    if isinstance(messages, str | Mapping):
        return True
    if not isinstance(messages, Sequence) or not messages:
        return False
    first = messages[0]
    return isinstance(first, Mapping) and "role" in first
