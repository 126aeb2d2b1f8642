"""Text to ids and back, as the checkpoint's tokenizer does it and without its padding and truncation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nvcli
from nvcli.demo import demo_path
from nvcli.errors import LoadError, RowError
from nvcli.job.text.tokenizer import Tokenizer

BOS, END = 0, 1


def ids_of(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    (ids,) = tokenizer.encode([text], add_special_tokens=add_special_tokens)
    assert isinstance(ids, list)
    return ids


def test_special_tokens_are_added_once_and_nothing_is_padded_or_cut(tokenizer: Tokenizer) -> None:
    long = "x" * 200
    assert len(ids_of(tokenizer, long)) == 201
    assert ids_of(tokenizer, "ab")[0] == BOS
    assert ids_of(tokenizer, "ab", add_special_tokens=False) == ids_of(tokenizer, "ab")[1:]
    assert [len(ids) for ids in tokenizer.encode(["a", "bb"], add_special_tokens=True) if isinstance(ids, list)] == [
        2,
        3,
    ]
    assert ids_of(tokenizer, "<|end|>x")[1] == END


def test_text_comes_back_without_special_tokens(tokenizer: Tokenizer) -> None:
    answers = [ids_of(tokenizer, "grüße 😀 , ."), [END], []]
    assert tokenizer.decode(answers) == ["grüße 😀 , .", "", ""]
    assert tokenizer.decode_one(answers[0]) == "grüße 😀 , ."
    assert tokenizer.token_text(END) == "<|end|>"
    assert tokenizer.eos_token_id == END


def test_one_text_that_cannot_be_read_does_not_take_the_others_with_it(tokenizer: Tokenizer) -> None:
    first, bad, last = tokenizer.encode(["a", "\ud800", "b"], add_special_tokens=False)
    assert isinstance(bad, RowError)
    assert bad.type == "tokenizer_error"
    assert r"it holds the lone surrogate \ud800" in bad.message
    assert [first, last] == [ids_of(tokenizer, text, add_special_tokens=False) for text in "ab"]


def test_a_text_that_makes_the_tokenizer_panic_does_not_take_the_others_with_it() -> None:
    """A panic of Rust code is no Exception; it ended the run, at every resume."""
    demo = Tokenizer.load(demo_path())
    first, bad, last = demo.encode(["a", " " * 12_000_000, "b"], add_special_tokens=True)
    assert isinstance(bad, RowError)
    assert bad.type == "tokenizer_error"
    assert [first, last] == [ids_of(demo, text) for text in "ab"]


def test_an_interrupt_is_no_error_of_the_text() -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    slow: Any = SlowTokenizer()
    tokenizer = Tokenizer(slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlowTokenizer, "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode(["a"], add_special_tokens=True)


def test_templates(tokenizer: Tokenizer) -> None:
    assert tokenizer.render([{"role": "user", "content": "hi"}, {"role": "bot", "content": "ho"}]) == "<u>hi<b>ho<a>"
    with pytest.raises(RowError, match="no such role") as caught:
        tokenizer.render([{"role": "forbidden", "content": ""}])
    assert caught.value.type == "chat_template_error"


class SlowTokenizer:
    """A tokenizer without a Rust object below it."""

    chat_template = None
    eos_token_id = None

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0] * add_special_tokens + [ord(letter) for letter in text] for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


_LISTS = (
    "{% for m in messages %}[{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}]{% endfor %}"
)
_INDEXED = "{% for m in messages %}[{{ m.content[0].text + '' }}]{% endfor %}"
_TEXTS = "{% for m in messages %}[{{ m.content + '' }}]{% endfor %}"
_BOTH = "{% for m in messages %}[{{ m.content if m.content is string else 'parts' }}]{% endfor %}"


@pytest.mark.parametrize("template", [_LISTS, _INDEXED, _TEXTS, _BOTH])
def test_contents_are_given_as_the_template_reads_them(template: str) -> None:
    """Templates such as LLaVA's leave texts out that are not in a list: the prompt was empty."""
    demo = Tokenizer.load(demo_path(), chat_template=template)
    assert demo.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "[a][b]"


_LOST_ROLES = (
    "{# a developer #}{% for m in messages if m.role in 'system user' %}{{ m.role }} {{ m.content }}.{% endfor %}"
)
_LOST_LATE = "{{ messages[0].content }}.{% for m in messages[1:] if m.role != 'system' %}{{ m.content }}.{% endfor %}"
_LAST_SYSTEM = "{% for m in messages if m.role != 'system' or m == messages[-1] %}{{ m.content }}.{% endfor %}"
_LOST_CALLS = "{% for m in messages %}{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}.{% endfor %}"
_NO_CALLS = "{# tool_calls #}{% for m in messages %}{{ m.content }}.{% endfor %}"
_CALL = {"id": "1", "type": "function", "function": {"name": "c", "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SYSTEM = {"role": "system", "content": "a"}


@pytest.mark.parametrize(
    ("template", "message", "said"),
    [
        (_LOST_ROLES, {"role": "human", "content": "b"}, r'`messages\[1\]`, whose role is "human"; give it one'),
        (_LOST_ROLES, {"role": "tool", "content": "b"}, r'`messages\[1\]`, whose role is "tool"; give it one'),
        (_LOST_ROLES, _CALLING, r"`messages\[1\].tool_calls`; leave them out"),
        (_NO_CALLS, _CALLING, r"`messages\[1\].tool_calls`; leave them out"),
        (_LOST_CALLS, {**_CALLING, "tool_calls": [_CALL] * 2}, r"`messages\[1\].tool_calls\[1\]`; give a message one"),
        (_LOST_LATE, _SYSTEM, r'`messages\[1\]`, whose role is "system"; give one system message, the first'),
        (_LAST_SYSTEM, _SYSTEM, r'`messages\[0\]`, whose role is "system"; give one system message'),
    ],
)
def test_no_message_is_lost_that_the_template_leaves_out(template: str, message: dict[str, Any], said: str) -> None:
    """Templates leave out messages of roles that they do not know (Qwen3), system messages but for the first (SmolLM3,
    gpt-oss) or the last (DeepSeek-R1), calls (LFM2), calls beside a text (small DeepSeek-R1) and later calls (gpt-oss).
    """
    tokenizer = Tokenizer.load(demo_path(), chat_template=template)
    with pytest.raises(RowError, match=f"the chat template leaves out {said}"):
        tokenizer.render([{"role": "system", "content": "a"}, message])


def test_what_the_template_writes_is_given_to_it() -> None:
    """The word developer is in Cohere's templates too, which do not know the role. gpt-oss's template reads no function
    without a description."""
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert Tokenizer.load(demo_path(), chat_template=_LOST_ROLES).render(messages) == "system a.user b."
    known = _LOST_ROLES.replace("'system", "'developer")
    assert Tokenizer.load(demo_path(), chat_template=known).render(messages) == "developer a.user b."
    one_call = Tokenizer.load(demo_path(), chat_template=_LOST_CALLS)
    assert one_call.render([messages[1], _CALLING, _SYSTEM]) == "b.c.a."
    bare = [{"type": "function", "function": {"name": "c", "description": None}}]
    for form, text in (
        ("{{ (tools | first).function | tojson }}", '{"name": "c", "description": null}'),
        (
            "{{ (tools | first).function.description + '' }}{{ (tools | first).function | tojson }}",
            '{"name": "c", "description": "", "parameters": {"type": "object", "properties": {}}}',
        ),
    ):
        assert Tokenizer.load(demo_path(), chat_template=form).render(messages[1:], {"tools": bare}) == text


def test_a_tokenizer_in_plain_python_works_too() -> None:
    slow: Any = SlowTokenizer()
    tokenizer = Tokenizer(slow)
    assert tokenizer.encode(["ab"], add_special_tokens=True) == [[0, 97, 98]]
    assert tokenizer.decode([[97], [98]]) == ["a", "b"]
    assert tokenizer.token_text(97) == "a"
    assert tokenizer.eos_token_id is None
    with pytest.raises(RowError) as caught:
        tokenizer.render([{"role": "user", "content": ""}])
    assert caught.value.type == "no_chat_template"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_plain_tokenizers_are_loaded_as_transformers_would_and_without_torch(
    tokenizer_class: str, tmp_path: Path
) -> None:
    """Importing torch takes the parent seconds, and it has no use for it."""
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        shutil.copy(demo_path() / name, tmp_path)
    config = json.loads((demo_path() / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": tokenizer_class}))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nvcli.job.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.load(Path(sys.argv[1]))\n"
        "print(tokenizer.render([{'role': 'user', 'content': 'What is 1 + 2?'}]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(nvcli.__file__).parent.parent)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert result.stdout.removesuffix("\n") == rendered
    texts = [rendered, "héllo  wörld\t 12345\n\n it's 中文 🙂"]
    ours = Tokenizer.load(tmp_path)
    ids = ours.encode(texts, add_special_tokens=True)
    assert ids == theirs(texts)["input_ids"]
    assert ours.decode([ids[1]]) == [texts[1]]  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_that_transformers_makes_of_nothing_is_refused(tmp_path: Path) -> None:
    shutil.copy(demo_path() / "config.json", tmp_path)
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(LoadError, match=r"no tokenizer but special tokens; copy the model's tokenizer\.json there"):
        Tokenizer.load(tmp_path)
