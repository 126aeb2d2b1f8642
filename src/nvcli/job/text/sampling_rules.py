"""SamplingRules: what a row's sampling parameters mean for its tokens, whatever the prompt: stop ids, biases, bad words
and a grammar.

Most rows of a job have the same parameters, so this is worked out once for all of them.

A text of `logit_bias` is one token. A bad word is a sequence of tokens: those of the word alone, and those of the word
after a space, which are others in most vocabularies. A word that the model spells with yet other tokens is not found,
as in vLLM and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from nvcli.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BIASED_TOKENS, SamplingParams
from nvcli.core.structured import MAX_END_IDS, Constraint, Structured
from nvcli.core.validation import show
from nvcli.errors import RowError
from nvcli.job.text.grammar_maker import Grammar, GrammarMaker
from nvcli.job.text.model_limits import ModelLimits, check_vocabulary
from nvcli.job.text.tokenizer import Tokenizer

_SHOWN_CHARS = 40


class TokenRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules about tokens, by id."""

    biases: dict[int, float] = {}
    """Token id → value added to its logit."""
    forbidden_ids: list[int] = []
    """Tokens that are never chosen."""
    bad_words: list[list[int]] = []
    """Sequences of at least two tokens that the answer may not contain."""


def token_rules(sampling: SamplingParams, tokenizer: Tokenizer, *, under: str) -> TokenRules | None:
    """Return the rules of a row's sampling; None: it has none. `under` is the key of the sampling in the row.

    Raises RowError for a text that is no token, and for more tokens than a row may name.
    """
    if not sampling.logit_bias and not sampling.bad_words:
        return None
    biases = {_token_id(key, tokenizer, f"{under}.logit_bias"): value for key, value in sampling.logit_bias.items()}
    words = [ids for word in sampling.bad_words for ids in _spellings(word, tokenizer, f"{under}.bad_words")]
    forbidden = sorted({word[0] for word in words if len(word) == 1})
    # A longer word that holds a forbidden token cannot come up.
    longer = [word for word in words if len(word) > 1 and set(forbidden).isdisjoint(word)]
    num_tokens = len(biases) + len(forbidden) + sum(map(len, longer)) + len(sampling.stop_token_ids)
    if num_tokens + len(sampling.allowed_token_ids or ()) > MAX_BIASED_TOKENS:
        raise RowError(
            "invalid_sampling",
            f"`{under}.bad_words` are {sum(map(len, words)):,} tokens, and with those of `logit_bias`, "
            f"`stop_token_ids` and `allowed_token_ids` {MAX_BIASED_TOKENS:,} are allowed; give fewer words",
        )
    return TokenRules(biases=biases, forbidden_ids=forbidden, bad_words=longer)


def _token_id(key: int | str, tokenizer: Tokenizer, name: str) -> int:
    if isinstance(key, int):
        return key
    ids = _encode(key, tokenizer, name)
    if len(ids) != 1:
        raise RowError(
            "invalid_sampling",
            f"`{name}` holds {show(key, _SHOWN_CHARS)}, which is {len(ids)} tokens of this model; give a text that is "
            "one (often with the space before a word), or the ids of tokens",
        )
    return ids[0]


def _spellings(word: str | list[int], tokenizer: Tokenizer, name: str) -> list[list[int]]:
    """Return the tokens of a word, alone and after a space, or the tokens that the row gives."""
    if isinstance(word, list):
        return [word]
    bare = word.strip()
    spelled = [_encode(text, tokenizer, name) for text in ((bare, f" {bare}") if bare else (word,))]
    for ids in spelled:
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise RowError(
                "invalid_sampling",
                f"`{name}` holds {show(word, _SHOWN_CHARS)}, which is {len(ids)} tokens of this model; allowed: at "
                f"most {MAX_BAD_WORD_TOKENS}",
            )
    return [ids for number, ids in enumerate(spelled) if ids and ids not in spelled[:number]]


def _encode(text: str, tokenizer: Tokenizer, name: str) -> list[int]:
    (ids,) = tokenizer.encode([text], add_special_tokens=False)
    if isinstance(ids, RowError):
        raise RowError("invalid_sampling", f"`{name}` holds {show(text, _SHOWN_CHARS)}: {ids.message}")
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """The consequences of one set of sampling parameters for one model."""

    sampling: SamplingParams
    stop_ids: list[int]
    rules: TokenRules | None
    """Biases and bad words, by token ids."""
    grammar: Grammar | None
    """The grammar of `structured`; None: the answer may be anything."""
    constraint: Constraint | None
    """The same for the engine."""
    answers_follow_from: bytes | None
    """A key for the sampling parameters, if an answer depends on nothing but these and the prompt; None: it also
    depends on the row's place in the file."""


def sampling_rules(
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    eos_ids: list[int],
    grammars: GrammarMaker | None,
    *,
    under: str,
) -> SamplingRules:
    """Work out the rules for sampling parameters. Raises RowError for tokens and features that the model or the
    tokenizer lacks.

    `grammars` None: rows that ask for structured answers are refused. `under` is the row's key that holds the
    parameters.
    """
    check_vocabulary(f"`{under}.stop_token_ids`", sampling.stop_token_ids, limits)
    rules = token_rules(sampling, tokenizer, under=under)
    if rules is not None:
        check_vocabulary(f"`{under}.logit_bias`", list(rules.biases), limits)
        for word in [rules.forbidden_ids, *rules.bad_words]:
            check_vocabulary(f"`{under}.bad_words`", word, limits)
    stop_ids = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)})
    if sampling.allowed_token_ids is not None:
        check_vocabulary(f"`{under}.allowed_token_ids`", sampling.allowed_token_ids, limits)
        _check_allowed(sampling, set(sampling.allowed_token_ids), rules, stop_ids, under)
    if sampling.min_tokens and len(stop_ids) == limits.vocab_size:
        raise RowError(
            "invalid_sampling",
            f"`{under}.min_tokens` is {sampling.min_tokens}, and all {limits.vocab_size} tokens of the model "
            "are stop tokens, so none may be chosen; leave one of the two out",
        )
    grammar = constraint = None
    if sampling.structured is not None:
        name = structured_name(sampling.structured, under)
        if grammars is None:
            raise RowError("unsupported_parameter", f"{name} is not supported here; leave it out")
        grammar = grammars.grammar(sampling.structured, name=name)
        constraint = constraint_of(grammar, eos_ids, name)
    answers_follow_from = None
    if sampling.is_greedy:
        answers_follow_from = msgspec.json.encode(msgspec.structs.replace(sampling, seed=None))
    elif sampling.seed is not None:
        answers_follow_from = msgspec.json.encode(sampling)
    return SamplingRules(
        sampling=sampling,
        stop_ids=stop_ids,
        rules=rules,
        grammar=grammar,
        constraint=constraint,
        answers_follow_from=answers_follow_from,
    )


def _check_allowed(
    sampling: SamplingParams, allowed: set[int], rules: TokenRules | None, stop_ids: list[int], under: str
) -> None:
    """Raise RowError if none of the allowed tokens may be chosen."""
    left = allowed.difference(() if rules is None else rules.forbidden_ids)
    if not left or (sampling.min_tokens and left.issubset(stop_ids)):
        key = "bad_words" if not left else "min_tokens"
        raise RowError(
            "invalid_sampling",
            f"`{under}.{key}` forbids all of the {len(allowed)} `{under}.allowed_token_ids`, so no token "
            "could be chosen; leave one of the two out",
        )


def constraint_of(grammar: Grammar, eos_ids: list[int], name: str) -> Constraint:
    """Return the constraint of an answer that follows a grammar from the start; `name` is what asks for it.

    Raises RowError.
    """
    if not eos_ids:
        raise RowError("invalid_structured", f"{name} needs an end-of-sequence token, and the model has none")
    return Constraint(grammar=grammar.text, end_ids=eos_ids[:MAX_END_IDS])


def structured_name(wanted: Structured, under: str) -> str:
    """Return the name that messages use for the form that a row asks for. `under` is the key of its sampling
    parameters."""
    form = wanted.form
    return f"`sampling.structured.{form}`" if under == "sampling" else f"the {form} that `{under}` asks for"
