"""A chat with a model: a conversation that grows turn by turn, and the commands that a person may type.

The whole conversation goes to the model each time; earlier turns are found in the prefix cache. This module reads and
writes through functions that it is given, and knows no terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nvcli.llm.answer import Answer
from nvcli.llm.llm import LLM, AnswerStream

HELP = '''commands of a chat:
  /clear          forget the conversation; the system message stays
  /system TEXT    set the system message; without TEXT there is none
  /lora NAME      answer with an adapter of --lora NAME=PATH; without NAME with the base model
  /help           show this
  /exit           end the chat, as Ctrl-D does
Ctrl-C stops an answer. Put a message of several lines between two lines of """.
To begin a message with a slash, type two.'''

_FENCE = '"""'


class Person(Protocol):
    """The person who chats, at their terminal."""

    def read_line(self, *, goes_on: bool) -> str | None:
        """Return the next line; None if there are no more. `goes_on`: it continues a message.

        Raises KeyboardInterrupt if the line is abandoned.
        """

    def show(self, stream: AnswerStream) -> Answer:
        """Show an answer as it comes, to its end. Raises KeyboardInterrupt if the person stops it."""

    def say(self, text: str) -> None:
        """Say something other than an answer."""

    def say_error(self, text: str) -> None:
        """Say why there is no answer."""


class Chat:
    """A conversation with a model. It keeps the messages that were answered, in whole or in part."""

    def __init__(self, llm: LLM, *, system: str | None = None) -> None:
        """`system` is the system message; None if there is none."""
        self._llm = llm
        self.system = system
        self.lora: str | None = None
        """The LoRA adapter of the next answers; None: there is none."""
        self._messages: list[dict[str, str]] = []
        self._num_asked = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far, beginning with the system message."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self._messages]

    @property
    def has_begun(self) -> bool:
        """Whether there is a conversation to forget."""
        return bool(self._messages)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that `lora` may have."""
        return self._llm.adapters

    def clear(self) -> None:
        """Forget all messages except the system message."""
        self._messages = []

    def ask(self, text: str, show: Callable[[AnswerStream], Answer]) -> Answer | None:
        """Ask the next question, and return what `show` returns for its answer; None if Ctrl-C stopped it.

        A stopped answer stays in the conversation as far as it came; a question that failed does not.
        """
        question = {"role": "user", "content": text}
        # Each turn draws its own random numbers, so that repeating a question may give another answer.
        seed = self._llm.config.seed + self._num_asked
        self._num_asked += 1
        stream = self._llm.stream([*self.messages, question], sampling={"n": 1}, lora=self.lora, seed=seed)
        answer: Answer | None = None
        try:
            answer = show(stream)
        except KeyboardInterrupt:
            stream.close()
        if answer is None or answer.error is None:
            # Its reasoning is not repeated.
            text = stream.text if answer is None else answer.text or stream.text
            self._messages += [question, {"role": "assistant", "content": text}]
        return answer


def run_chat(chat: Chat, person: Person) -> None:
    """Chat until the person has no more to say. Raises the error of an engine that died."""
    while True:
        try:
            text = _read_message(person)
        except KeyboardInterrupt:
            continue
        if text is None or text.strip() == "/exit":
            return
        if text.startswith("/") and not text.startswith("//"):
            _obey(text, chat, person)
        elif text.strip():
            _answer(text.removeprefix("/") if text.startswith("//") else text, chat, person)


def _read_message(person: Person) -> str | None:
    line = person.read_line(goes_on=False)
    if line is None or not line.lstrip().startswith(_FENCE):
        return line
    text = line.lstrip().removeprefix(_FENCE)
    while not text.rstrip().endswith(_FENCE):
        more = person.read_line(goes_on=True)
        if more is None:
            return text.strip("\n")
        text += f"\n{more}"
    return text.rstrip().removesuffix(_FENCE).strip("\n")


def _obey(command: str, chat: Chat, person: Person) -> None:
    word, _, rest = command.strip().partition(" ")
    if word == "/clear":
        chat.clear()
        person.say("the conversation is forgotten")
    elif word == "/system":
        chat.system = rest.strip() or None
        person.say("there is no system message" if chat.system is None else "the system message is set")
    elif word == "/lora":
        _choose_adapter(rest.strip() or None, chat, person)
    elif word == "/help":
        person.say(HELP)
    else:
        person.say_error(f"{word} is not a command; /help shows them, and // begins a message with a slash")


def _choose_adapter(name: str | None, chat: Chat, person: Person) -> None:
    if name is None or name in chat.adapters:
        chat.lora = name
        person.say("the base model answers" if name is None else f"the adapter {name} answers")
    elif chat.adapters:
        person.say_error(f"{name} is no adapter; there are: {', '.join(sorted(chat.adapters))}")
    else:
        person.say_error("there are no adapters with names; give them when the chat begins: --lora NAME=PATH")


def _answer(text: str, chat: Chat, person: Person) -> None:
    answer = chat.ask(text, person.show)
    if answer is None:
        return
    error = answer.error
    if error is not None:
        hint = ""
        if error.type in ("prompt_too_long", "max_tokens_too_large") and chat.has_begun:
            hint = "\nthe conversation is too long for the model: /clear starts a new one"
        person.say_error(f"{str(error).removeprefix('rows[0]: ')}{hint}")
