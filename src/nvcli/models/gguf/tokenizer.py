"""The tokenizer of a GGUF file, as the tokenizer.json that it was made from says it. Torch-free.

A file has the vocabulary, the kind of each token, merges or scores, and for byte-level vocabularies a name for how text
is split before merges. What these names mean is in llama.cpp's src/llama-vocab.cpp, and the original expressions stand
in the tokenizer.json of the models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvcli.core.validation import is_integer, show
from nvcli.errors import LoadError

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens: special ones, and others that text is searched for before all else."""
_SPACE = "▁"
_GEMMA4 = "gemma4"
"""A kind of vocabularies like SentencePiece's, with merges instead of scores."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_ENDINGS}"
_MINICPM5 = (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}+|{_ENDINGS}")
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_ENDINGS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(contractions: str, digits: str, *, of: str = "", marks: str = r"[\r\n/]*") -> str:
    """Return the expression of words that end where a capital letter follows a small one. `of`: which letters are in
    words; `marks`: what belongs to the marks before it."""
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{of}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{some}{lower}{others}" for some, others in (("*", "+"), ("+", "*")))
    endings = rf" ?[^\s\p{{L}}\p{{N}}]+{marks}|\s*[\r\n]+|\s+(?!\S)|\s+"
    return "|".join((*(word + contractions for word in words), digits, endings))


_GPT4O = _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)  # digits from the right
_TEKKEN = _by_case("", r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_AFMOE = (
    r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))",  # from the right
    r"[一-\x{9fff}぀-\x{309f}゠-ヿ\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}]+|[\x{e00}-\x{e7f}]+"
    r"|[\x{e80}-\x{eff}]+|[\x{1780}-\x{17ff}]+|[\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}]+"
    r"|[\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+",
    _DEEPSEEK3[2],
)
_KIMI = r"[\p{Han}]+|" + _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", of=r"&&[^\p{Han}]", marks=r"[\r\n]*")
_UNKNOWN_CASES = (  # blocks of Unicode whose letters of two cases DeepSeek's expression leaves out
    r"\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c88}\x{2d00}-\x{2d2d}\x{a790}-\x{a7fa}\x{ab30}-\x{ab68}"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}"
)
_CHINESE = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNKNOWN_CASES}]]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CHINESE,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE)
_YOUTU = (
    r"[가-힣\x{3131}-\x{318e}]+|[\x{2014}\x{2018}\x{2019}\x{201c}\x{201d}\x{2026}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}\x{ff01}"
    r"\x{ff0c}\x{ff1a}\x{ff1b}]+|[\x{3105}-\x{312f}]+|[一-龥぀-ゟ゠-ヿ]+",
    _by_case(f"{_CONTRACTIONS}?", r"\p{N}"),
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_GPT2: tuple[str, ...] = ()
"""No expressions: GPT-2's own, which ByteLevel has."""
_DIGITS = (r"\p{N}",)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0")
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_LLAMA3_NAMES, (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "solar-open"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    "tiny_aya": _TINY_AYA,
    "minicpm5": _MINICPM5,
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "kimi-k2": (_KIMI,),
    "afmoe": _AFMOE,
    "youtu": _YOUTU,
    "exaone-moe": (_EXAONE_MOE,),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "trillion", "mellum", "jais", "a.x-4.0", "gigachat"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
}
"""Expressions by which text is split, one after the other, by the names in `tokenizer.ggml.pre`."""
_GPT2_AFTER = frozenset((_GPT2, _DIGITS))
"""Expressions after which GPT-2's own follows."""
_WHOLE_WORDS = frozenset((*_LLAMA3_NAMES, "tekken", "youtu", "minicpm5"))
"""Names of vocabularies in which a word that is a token is not put together by merges."""
_COMPOSED = frozenset(("qwen2", "qwen35", "command-r", "tiny_aya"))
"""Names of those whose text is brought to Unicode's normal form C first."""
_ADDS_BOS = frozenset((*_LLAMA3_NAMES, "tekken"))
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<turn|>", "<|tool_response>"),
    )
)
"""Tokens that end an answer under whichever id, as in llama.cpp."""
_OF_SENTENCE = "</s>"
"""A token that ends an answer if it is a special one; Gemma's vocabulary has it as a tag of HTML."""
_END, _AFTER_ENDS = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""A token that ends a message, and tokens beside which it does not end the answer: gpt-oss's, or Solar Open's."""


class GGUFVocabulary:
    """The tokenizer of a file."""

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        """Raises LoadError if there is no vocabulary of a kind that is read."""
        self._file = file
        self._metadata = metadata
        self.kind = self._get("model")
        if self.kind is None or self.kind in ("none", "no_vocab"):
            raise LoadError(f"{file}: no tokenizer; copy the model's tokenizer.json beside it")
        if self.kind not in ("gpt2", "llama", _GEMMA4):
            raise self._unread("model", self.kind)
        self.tokens = self._list("tokens", str)
        self.kinds = self._list("token_type", int, default=1)

    def tokenizer(self, architecture: str) -> dict[str, Any]:
        """Return tokenizer.json. Raises LoadError for a vocabulary that is not read or damaged."""
        parts = self._byte_level() if self.kind == "gpt2" else self._with_scores(architecture)
        is_phi3 = architecture == "phi3" and self.kind == "llama"
        added = [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and not (self.kind == "llama" and _is_spaces(token))
        ]
        return {"version": "1.0", "added_tokens": added, "post_processor": self._around(), **parts}

    def config(self) -> dict[str, Any]:
        """Return tokenizer_config.json, without the chat template."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        found = {name: self._special(key) for name, key in names.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: self.tokens[number] for name, number in found.items() if number is not None},
        }

    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates by their names in a checkpoint's folder."""
        key = "tokenizer.chat_template"
        named = {key: "chat_template.jinja"}
        others = self._metadata.get("tokenizer.chat_templates")
        for name in others if isinstance(others, list) else ():
            if isinstance(name, str) and name.replace("_", "").isalnum():
                named[f"{key}.{name}"] = f"additional_chat_templates/{name}.jinja"
        return {file: found for key, file in named.items() if isinstance(found := self._metadata.get(key), str)}

    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        own = (self._special(key) for key in ("eos", "eot", "eom"))
        goes_on = any(others.issubset(self.tokens) for others in _AFTER_ENDS)
        ends = _ENDS - {_END} if goes_on else _ENDS
        by_name = (
            number
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if (kind in (_CONTROL, _USER_DEFINED) and token in ends) or (kind == _CONTROL and token == _OF_SENTENCE)
        )
        return [*dict.fromkeys(number for number in (*own, *by_name) if number is not None)]

    def _byte_level(self) -> dict[str, Any]:
        """Return the parts of a vocabulary whose tokens are bytes, each of them written as a letter."""
        name = self._get("pre")
        if not isinstance(name, str) or name not in SPLITS:
            raise self._unread("pre", name)
        splits = SPLITS[name]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps = [
            {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in splits
        ]
        if name in ("deepseek-coder", "deepseek-llm"):
            steps.append({"type": "Digits", "individual_digits": True})
        steps.append({**byte_level, "use_regex": splits in _GPT2_AFTER})
        return {
            "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": {**byte_level, "use_regex": True},
            "model": self._bpe(self.tokens, self._merges(), name in _WHOLE_WORDS),
        }

    def _merges(self) -> list[tuple[str, str]]:
        parted = (merge.partition(" ") for merge in self._list("merges", str, count=None))
        return [(first, second) for first, _, second in parted]

    def _with_scores(self, architecture: str) -> dict[str, Any]:
        """Return the parts of a vocabulary of SentencePiece, whose merges follow from the tokens' scores."""
        tokens = [_SPACE * len(token) if _is_spaces(token) else token for token in self.tokens]
        if self.kind == _GEMMA4:
            merges = self._merges()
        elif architecture.startswith("gemma"):  # their scores do not say the order of the merges, but their ids do
            merges = merges_of(tokens, range(len(tokens)))
        else:
            merges = merges_of(tokens, [-score for score in self._list("scores", float)])
        starts_with_space = self._get("add_space_prefix", True)
        space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        steps = [{"type": "Prepend", "prepend": _SPACE}, space] if starts_with_space else [space]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if starts_with_space:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        model = self._bpe(tokens, merges, False)
        unknown = self._special("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                **model,
                "unk_token": None if unknown is None else tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _bpe(self, tokens: Sequence[str], merges: Sequence[tuple[str, str]], has_whole_words: bool) -> dict[str, Any]:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        if len(vocabulary) < len(tokens):
            twice = next(token for number, token in enumerate(tokens) if vocabulary[token] != number)
            raise LoadError(f"{self._file}: `{_PREFIX}tokens`: {show(twice)} is there twice; download the file again")
        known = [(a, b) for a, b in merges if a in vocabulary and b in vocabulary and a + b in vocabulary]
        return {"type": "BPE", "ignore_merges": has_whole_words, "vocab": vocabulary, "merges": known}

    def _around(self) -> dict[str, Any] | None:
        """Return the tokens that are put before and behind a text; None: there are none."""
        is_llama = self.kind == "llama"
        adds_bos = self._get("add_bos_token", is_llama or self._get("pre") in _ADDS_BOS) or self.kind == _GEMMA4
        before = self._special("bos") if adds_bos else None
        behind = self._special("eos") if self._get("add_eos_token", False) else None
        if before is None and behind is None:
            return None
        special = {self.tokens[number]: number for number in (before, behind) if number is not None}

        def around(*texts: tuple[str, int]) -> list[dict[str, Any]]:
            steps: list[dict[str, Any]] = []
            for name, number in texts:
                ends = [
                    None if one is None else {"SpecialToken": {"id": self.tokens[one], "type_id": number}}
                    for one in (before, behind)
                ]
                steps += [one for one in (ends[0], {"Sequence": {"id": name, "type_id": number}}, ends[1]) if one]
            return steps

        return {
            "type": "TemplateProcessing",
            "single": around(("A", 0)),
            "pair": around(("A", 0), ("B", 1)),
            "special_tokens": {
                token: {"id": token, "ids": [number], "tokens": [token]} for token, number in special.items()
            },
        }

    def _special(self, name: str) -> int | None:
        """Return the id of a token with a role; None: no token has it."""
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self.kind == "llama" else {}
        found = self._get(f"{name}_token_id", defaults.get(name))
        return found if is_integer(found, 0, len(self.tokens) - 1) else None

    def _get(self, key: str, default: Any = None) -> Any:
        found = self._metadata.get(f"{_PREFIX}{key}")
        return default if found is None else found

    def _list(self, key: str, kind: type, *, default: Any = None, count: int | None = -1) -> list[Any]:
        """Return a list, by default one with a value for each token. Raises LoadError."""
        found = self._get(key)
        if found is None and default is not None:
            return [default] * len(self.tokens)
        wanted = len(self.tokens) if count == -1 and key != "tokens" else None
        if not isinstance(found, list) or not found or not isinstance(found[0], kind):
            raise LoadError(f"{self._file}: `{_PREFIX}{key}` is missing or no list; download the file again")
        if wanted is not None and len(found) != wanted:
            raise LoadError(
                f"{self._file}: `{_PREFIX}{key}` has {len(found):,} values for {wanted:,} tokens; download the file "
                "again"
            )
        return found

    def _unread(self, key: str, value: object) -> LoadError:
        return LoadError(
            f"{self._file}: `{_PREFIX}{key}`: {show(value)} is a tokenizer that is not read from GGUF: copy the "
            "model's tokenizer.json and tokenizer_config.json beside the file"
        )


def merges_of(tokens: Sequence[str], ranks: Iterable[float]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary of SentencePiece: all pairs of tokens that make a token, in the order of these,
    the lowest rank first."""
    ids = {token: number for number, token in enumerate(tokens)}
    found = [
        (rank, -cut, ids[token[:cut]], ids[token[cut:]], token, cut)
        for token, rank in zip(tokens, ranks, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(token[:cut], token[cut:]) for *_, token, cut in sorted(found)]


def _is_spaces(token: str) -> bool:
    """Whether a token is of several spaces, as llama.cpp writes those that SentencePiece has with marks."""
    return len(token) > 1 and not token.strip(" ")
