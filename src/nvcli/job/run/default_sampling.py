"""Checks the `sampling` section of a run's configuration against the model, before any process starts.

A value that would make an error row of every row that leaves the key out, such as a token id that the model does not
have, is a mistake of the run. What depends on a row's prompt is left to the row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import msgspec

from nvcli.core.sampling_params import SamplingParams
from nvcli.core.validation import convert
from nvcli.errors import ConfigError, RowError
from nvcli.job.run.settings import SetterOf
from nvcli.job.text.grammar_maker import GrammarMaker
from nvcli.job.text.model_limits import ModelLimits, check_vocabulary, fit_prompt
from nvcli.job.text.reasoning import find_reasoning_format, unknown_marks
from nvcli.job.text.sampling_rules import token_rules
from nvcli.job.text.tokenizer import Tokenizer

_SECTION = "sampling"


def check_default_sampling(
    given: Mapping[str, Any], limits: ModelLimits, load_tokenizer: Callable[[], Tokenizer], setter_of: SetterOf
) -> Tokenizer | None:
    """Check the `sampling` section of the configuration, which is valid as SamplingParams.

    Returns the tokenizer if a value had to be looked up in it, which takes about a second, and else None. Raises
    ConfigError that names the key and what set it, and what `load_tokenizer` raises.
    """
    sampling = convert(dict(given), SamplingParams)
    tokenizer = functools.cache(load_tokenizer)
    for key in given:
        try:
            _check_key(key, f"{_SECTION}.{key}", sampling, limits, tokenizer)
        except RowError as error:
            setter = setter_of((_SECTION, key))
            raise ConfigError(f"{setter}: {error}" if setter else str(error)) from None
    return tokenizer() if tokenizer.cache_info().currsize else None


def _check_key(
    key: str, name: str, sampling: SamplingParams, limits: ModelLimits, tokenizer: Callable[[], Tokenizer]
) -> None:
    """Check one key. Raises RowError, and whatever `tokenizer` raises, which is called only to look up values."""
    match key:
        case "stop_token_ids" | "allowed_token_ids":
            check_vocabulary(f"`{name}`", getattr(sampling, key) or (), limits)
        case "logit_bias" | "bad_words":
            own = SamplingParams(**{key: getattr(sampling, key)})
            lists = [word for word in own.bad_words if isinstance(word, list)]
            tokens = [token for token in (*own.logit_bias, *itertools.chain(*lists)) if isinstance(token, int)]
            check_vocabulary(f"`{name}`", tokens, limits)
            if any(isinstance(given, str) for given in (*own.logit_bias, *own.bad_words)):
                token_rules(own, tokenizer(), under=_SECTION)
        case "thinking_budget":
            if sampling.thinking_budget is not None:
                template = tokenizer().chat_template if limits.reasoning_parser == "auto" else ""
                if find_reasoning_format(limits.reasoning_parser, template) is None:
                    raise unknown_marks(name)
        case "structured":
            if sampling.structured is not None:
                with closing(GrammarMaker(None)) as grammars:
                    grammars.grammar(sampling.structured, name=f"`{name}`")
        case "max_tokens" | "min_tokens":
            if sampling.max_tokens is None:  # then a longer prompt leaves room for fewer numbers
                sampling = msgspec.structs.replace(sampling, logprobs=None, return_token_ids=False, best_of=None)
            fit_prompt([0], sampling, limits, _SECTION)
