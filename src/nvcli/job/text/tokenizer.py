"""Text ↔ token ids, through the checkpoint's own tokenizer and chat template.

Loading imports transformers, which takes seconds: call `load` in a background thread. Encoding and decoding work on
batches and release the interpreter while they run. Decoded text is what the tokens say, without the cosmetic space
clean-up that some tokenizer configurations ask transformers for.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nvcli.core.chat_template import MAX_TEMPLATE_BYTES, syntax_problem
from nvcli.core.config_types import MAX_INT32
from nvcli.core.system.regular_file import check_regular
from nvcli.core.validation import describe_surrogate, show
from nvcli.errors import LoadError, RowError
from nvcli.job.text.template_probe import TemplateProbe
from nvcli.models.json_file import JsonFile, read_json

MAX_INLINE_TOKENS = 8192
"""Up to this many tokens are decoded inline, in a millisecond; in a batch they would wait for threads that encode."""


class Tokenizer:
    """A loaded tokenizer. Used by one thread for encoding and by another for decoding."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a tokenizer object of transformers."""
        self._tokenizer = tokenizer
        # The Rust object below the Python one: no offsets, masks and dictionaries that nobody reads.
        self.backend: Any | None = getattr(tokenizer, "backend_tokenizer", None)
        """The `tokenizers.Tokenizer`; None for a tokenizer in plain Python."""
        self._token_texts: dict[int, str] = {}
        self.vocab_size: int | None = None
        """Upper bound of all ids; None: unknown."""
        if self.backend is not None:
            self.backend.no_padding()
            self.backend.no_truncation()
            self.vocab_size = max(self.vocab().values(), default=-1) + 1

    @classmethod
    def load(cls, model_path: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint, and run none of its code. Raises LoadError that names the file.

        `chat_template` is the text of a template that takes the place of the checkpoint's own.
        """
        # It replaces itself in `sys.modules`: while another thread imports it, `from transformers import …` fails.
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.set_verbosity_error()  # what a user must know of a checkpoint, nvcli says itself
        check_tokenizer_files(model_path)
        _check_own_template(JsonFile.read_if_present(model_path / _CONFIG))
        loader = transformers.PreTrainedTokenizerFast if is_plain(model_path) else transformers.AutoTokenizer
        try:
            loaded = loader.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
            if chat_template is not None or not loaded.chat_template:
                loaded.chat_template = _processor_template(model_path) if chat_template is None else chat_template
            tokenizer = cls(loaded)
        except BaseException as error:  # whatever a broken file makes transformers or tokenizers raise
            if not is_library_failure(error):
                raise
            raise load_error(model_path, error) from error
        backend = tokenizer.backend
        if backend is not None and backend.get_vocab_size() == len(backend.get_added_tokens_decoder()):
            # transformers makes one for some families where it finds none of the files that it looks for
            raise LoadError(f"{model_path}: no tokenizer but special tokens; copy the model's tokenizer.json there")
        if tokenizer.vocab_size is not None and tokenizer.vocab_size > MAX_INT32:
            check_token_ids(model_path, tokenizer.vocab(), MAX_INT32)
        return tokenizer

    def vocab(self) -> dict[str, int]:
        """Return the id of every token, including added ones; empty if unknown."""
        return {} if self.backend is None else self.backend.get_vocab(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling; None if there is none, or it is unknown."""
        found: int | None = None if self.backend is None else self.backend.token_to_id(token)
        return found

    @property
    def control_tokens(self) -> list[str]:
        """Spellings of special tokens, and of other added tokens in the text of the chat template."""
        if self.backend is None:
            return list(self._tokenizer.all_special_tokens)
        text = self.chat_template
        return [
            token.content
            for token in self.backend.get_added_tokens_decoder().values()
            if token.content.strip() and (token.special or token.content in text)
        ]

    @property
    def chat_template(self) -> str:
        """The text of the chat template, or of all of several; empty if there is none."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def check_chat_template(self, model_path: Path) -> None:
        """Raise LoadError if the chat template of the checkpoint there is not Jinja."""
        template = self._tokenizer.chat_template or ""
        text = template if isinstance(template, str) else template.get("default", "")
        if (problem := syntax_problem(text)) is not None:
            file = model_path / _TEMPLATE
            in_json = _CONFIG if _read_config(model_path).get("chat_template") else _PROCESSOR_TEMPLATE
            place = file if file.is_file() else f"{model_path / in_json}: `chat_template`"
            raise LoadError(
                f"{place}{problem}; download the file again, or name another as `job.chat_template` (--chat-template)"
            )

    @property
    def eos_token_id(self) -> int | None:
        eos = self._tokenizer.eos_token_id
        return eos if isinstance(eos, int) else None

    @property
    def bos_token_id(self) -> int | None:
        bos = self._tokenizer.bos_token_id
        return bos if isinstance(bos, int) else None

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int] | RowError]:
        """Return the token ids of each text, or its error.

        `add_special_tokens` adds those that the tokenizer adds by default.
        """
        try:
            if self.backend is None:
                ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
                return [*ids]
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        except BaseException as error:
            if not is_library_failure(error):
                raise
            if len(texts) == 1:
                reason = describe_surrogate(texts[0]) or str(error)
                return [RowError("tokenizer_error", f"the tokenizer cannot read this text: {reason}")]
            return [self.encode([text], add_special_tokens=add_special_tokens)[0] for text in texts]

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Return the prompt text of a conversation, up to where the answer begins. Raises RowError and MemoryError.

        `variables` are given to the chat template. `continue_final_message` is one of them: the answer then goes on
        with the last message. Messages and tools are given as the template reads them (`TemplateProbe`).
        """
        if not self._tokenizer.chat_template:
            raise RowError(
                "no_chat_template",
                "this model has no chat template for `messages`; give `prompt` instead, or name one as "
                "`job.chat_template` (--chat-template)",
            )
        options = dict(variables or {})
        options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
        if "tools" in options:
            options["tools"] = self._probe.tools_as_read(options["tools"])
        return self._render(self._probe.as_read(messages), options)

    @functools.cached_property
    def _probe(self) -> TemplateProbe:
        return TemplateProbe(self.chat_template, self._render)

    def _render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except MemoryError:
            raise
        except Exception as error:  # templates raise on purpose, and by accident
            reason = str(error) or type(error).__name__
            raise RowError("chat_template_error", f"the chat template refused `messages`: {reason}") from None
        assert isinstance(text, str)
        return text

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each answer, without special tokens."""
        if self.backend is None:
            return [self.decode_one(ids) for ids in answers]
        if sum(map(len, answers)) <= MAX_INLINE_TOKENS:
            return [self.backend.decode(list(ids), skip_special_tokens=True) for ids in answers]
        texts: list[str] = self.backend.decode_batch([list(ids) for ids in answers], skip_special_tokens=True)
        return texts

    def decode_one(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of one answer, with special tokens or without."""
        decode = self._tokenizer.decode if self.backend is None else self.backend.decode
        return str(decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, even a special one; bytes that are not text show as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode_one([token_id], skip_special_tokens=False)
        return text


_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
)
"""A folder with none of these files has no tokenizer."""
_READ = (*_VOCABULARIES, "*.json", "*.jinja", "*.model", "*.spm", "merges.txt")
"""Files that libraries may open to load a tokenizer."""
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_PROCESSOR_TEMPLATE = "chat_template.json"
"""The template of a model that reads images, in the form of earlier versions of transformers."""
_MOST_BYTES = {".jinja": MAX_TEMPLATE_BYTES, "": 250_000_000}
"""Maximum size of a file by suffix (`""`: any other), because they are read whole."""
_PLAIN_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"}


def check_tokenizer_files(model_path: Path) -> None:
    """Raise LoadError if there is no tokenizer, or one of its files is too large or not a regular file.

    No vocabulary is opened. Without one, transformers would make an empty tokenizer for some families.
    """
    names = _names(model_path)
    if not any(fnmatch(name, pattern) for name in names for pattern in _VOCABULARIES):
        raise _needs_code(model_path) or LoadError(
            f"{model_path}: no tokenizer (such as tokenizer.json); copy the model's tokenizer files there"
        )
    for name in names:
        file = model_path / name
        try:
            check_regular(file)
            size, most = file.stat().st_size, _MOST_BYTES.get(file.suffix, _MOST_BYTES[""])
        except OSError as error:
            if not file.is_dir() or name in (_TOKENIZER, _CONFIG):
                raise LoadError(f"{file}: cannot be read: {error.strerror}; download the file again") from None
            continue
        if size > most:
            raise LoadError(
                f"{file}: {size:,} bytes, more than the {most:,} that such a file may have; download the file again"
            )


def _check_own_template(config: JsonFile) -> None:
    """Raise LoadError if tokenizer_config.json has something else as its chat template than a text, or several with
    their names."""
    template = config.values.get("chat_template")
    if isinstance(template, dict):
        texts = [*template.values()]
    elif isinstance(template, list):
        texts = [each.get("template") if isinstance(each, dict) else None for each in template]
    else:
        texts = [] if template is None else [template]
    if not all(isinstance(text, str) for text in texts):
        raise config.error("chat_template", f"{show(template)} is no chat template; download the file again")


def is_plain(model_path: Path) -> bool:
    """Tell whether tokenizer.json describes the checkpoint's tokenizer completely.

    AutoTokenizer gives the same ids, but its import brings torch into this process, which takes seconds. Raises
    LoadError for a tokenizer_config.json that is no JSON.
    """
    config = _read_config(model_path)
    named = config.get("tokenizer_class")
    is_plain_class = isinstance(named, str) and named in _PLAIN_CLASSES and "auto_map" not in config
    return is_plain_class and (model_path / _TOKENIZER).is_file()


def has_chat_template(model_path: Path) -> bool:
    """Tell whether a checkpoint's tokenizer has a chat template, without loading it. Raises LoadError.

    As transformers does it, templates in files of their own take the place of the one in tokenizer_config.json. That of
    the processor (chat_template.json) counts where the tokenizer has none, as in vLLM.
    """
    files = [model_path / _TEMPLATE, *(model_path / "additional_chat_templates").glob("*.jinja")]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    own = max(sizes) if sizes else _read_config(model_path).get("chat_template")
    return bool(own or _processor_template(model_path))


def load_error(model_path: Path, error: BaseException) -> LoadError:
    """Return the error of a tokenizer that a library failed to load with `error`, naming the file if possible.

    Reads the files again, which takes a moment.
    """
    for name in _names(model_path):
        file = model_path / name
        try:
            if name.endswith(".json"):
                read_json(file)
            elif name == _TEMPLATE:
                file.read_text(encoding="utf-8")
        except LoadError as cause:
            return cause
        except UnicodeDecodeError as cause:
            return LoadError(f"{file}: not UTF-8 text (byte {cause.start}); download the file again")
        except FileNotFoundError:
            continue
    if (model_path / _TOKENIZER).is_file():
        from tokenizers import Tokenizer as Backend

        try:
            Backend.from_file(str(model_path / _TOKENIZER))
        except BaseException as cause:
            if not is_library_failure(cause):
                raise
            reason = f"cannot load the tokenizer: {_reason(cause)}"
            return LoadError(f"{model_path / _TOKENIZER}: {reason}; download the file again")
    if (needs_code := _needs_code(model_path)) is not None:
        return needs_code
    sentences = next((model_path / name for name in _SENTENCEPIECE if (model_path / name).is_file()), None)
    if sentences is not None and find_spec("sentencepiece") is None:
        return LoadError(
            f"{sentences}: cannot be read without sentencepiece; pip install sentencepiece protobuf, or copy a "
            "tokenizer.json of the model there"
        )
    place = model_path / _CONFIG if _read_config(model_path) else model_path
    return LoadError(
        f"{place}: cannot load the tokenizer: {_reason(error)}; download the model's tokenizer files again"
    )


def _needs_code(model_path: Path) -> LoadError | None:
    """Return the error for a tokenizer that is code of the checkpoint's; None if it is none. Raises LoadError."""
    config = _read_config(model_path)
    if "auto_map" not in config:
        return None
    return LoadError(
        f"{model_path / _CONFIG}: `auto_map` is {show(config['auto_map'])}: the tokenizer is code that comes with "
        "the checkpoint, which nvcli never runs; copy a tokenizer.json of the model there and take the key out"
    )


def is_library_failure(error: BaseException) -> bool:
    """Tell whether an exception is a library's failure: any Exception, or a panic of tokenizers' Rust code."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def check_token_ids(model_path: Path, vocab: dict[str, int], largest: int) -> None:
    """Raise LoadError if a token's id is above `largest`, so that no model can have it."""
    token, token_id = max(vocab.items(), key=lambda entry: entry[1], default=("", 0))
    if token_id > largest:
        file = model_path / (_TOKENIZER if (model_path / _TOKENIZER).is_file() else _CONFIG)
        raise LoadError(
            f"{file}: token {show(token)} has the id {token_id:,}, above the largest possible ({largest:,}); download "
            "the file again"
        )


def _names(model_path: Path) -> list[str]:
    """Return the names of files that libraries may open, sorted. Raises LoadError."""
    try:
        return sorted(name for name in os.listdir(model_path) if any(fnmatch(name, pattern) for pattern in _READ))
    except OSError as error:
        raise LoadError(f"{model_path}: cannot be read: {error.strerror}") from None


def _read_config(model_path: Path) -> Mapping[str, Any]:
    """Return the object in tokenizer_config.json; empty where there is no such file. Raises LoadError."""
    return JsonFile.read_if_present(model_path / _CONFIG).values


def _processor_template(model_path: Path) -> str | None:
    """Return the chat template in chat_template.json; None if there is none. Raises LoadError."""
    return JsonFile.read_if_present(model_path / _PROCESSOR_TEMPLATE).get("chat_template", str, "") or None


def _reason(error: BaseException) -> str:
    """Return the first line of a library's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
