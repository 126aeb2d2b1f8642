"""SamplingRules: what a row's sampling parameters mean for its tokens, whatever the prompt: stop ids, biases, and a
grammar.

Most rows of a job have the same parameters, so this is worked out once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import MAX_END_IDS, Constraint, Structured
from nvcli.errors import RowError
from nvcli.job.text.grammar_maker import Grammar, GrammarMaker
from nvcli.job.text.model_limits import ModelLimits, check_vocabulary
from nvcli.job.text.token_rules import TokenRules, token_rules
from nvcli.job.text.tokenizer import Tokenizer


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
    """Work out the rules for sampling parameters. Raises RowError for what the model or the tokenizer does not have.

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
