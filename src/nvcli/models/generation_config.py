"""Reads generation_config.json: the ids that end an answer, the checkpoint's sampling, and what of it nvcli does not
apply. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvcli.core.config_types import MAX_INT32
from nvcli.core.validation import is_integer, show
from nvcli.models.json_file import JsonFile

GENERATION_CONFIG_FILE = "generation_config.json"
MAX_EOS_IDS = 64
"""The most end-of-sequence ids; messages to the ranks have room for this many."""
_DRAWN_KEYS = ("temperature", "top_p", "top_k", "min_p")
_SAMPLING_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
"""Keys of generation_config.json, also where tokens are not drawn, and `SamplingParams`' names for them."""
_NOT_APPLIED = {
    **dict.fromkeys(("num_beams", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    "min_length": 0,
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("force_words_ids", "constraints", "dola_layers", "watermarking_config")),
}
"""Keys of generation_config.json by which transformers chooses tokens and nvcli does not, with the value that
changes nothing; an empty list changes nothing either."""
_NOT_APPLIED_GREEDY = {"penalty_alpha": 0}
_NOT_APPLIED_DRAWN = {"typical_p": 1, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}


def eos_token_ids(*files: JsonFile) -> tuple[int, ...]:
    """Read the ids that end an answer in any of the files, generation_config.json or config.json. Raises LoadError."""
    ids: dict[int, None] = {}
    for file in files:
        value = file.values.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not is_integer(token, 0, MAX_INT32):
                raise file.error("eos_token_id", f"{show(value)} is not a token id or a list of them")
            ids[token] = None
        if len(ids) > MAX_EOS_IDS:
            raise file.error("eos_token_id", f"{len(ids):,} ids end an answer; allowed: up to {MAX_EOS_IDS}")
    return tuple(ids)


def generation_defaults(generation: JsonFile, vocab_size: int, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """Read the sampling defaults of generation_config.json.

    `do_sample: false` asks for greedy decoding, whatever the temperature. Where `do_sample` is absent, the keys that
    are present count. Absent keys take nvcli's own defaults, as in vLLM, and not transformers' (greedy, top_k 50).
    """
    values = generation.values
    greedy = values.get("do_sample") is False
    names = _SAMPLING_KEYS | ({} if greedy else {key: key for key in _DRAWN_KEYS})
    defaults: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    defaults.update({name: values[key] for key, name in names.items() if values.get(key) is not None})
    if words := _bad_words(values, vocab_size, eos_ids):
        defaults["bad_words"] = words
    return defaults


def _bad_words(values: Mapping[str, Any], vocab_size: int, eos_ids: tuple[int, ...]) -> list[Any]:
    """Read the tokens and sequences that are never chosen, except those with tokens that the model does not have.

    As in transformers, `bad_words_ids` do not forbid the end of an answer, and `suppress_tokens` may.
    """
    suppressed, words = (values.get(key) or [] for key in ("suppress_tokens", "bad_words_ids"))
    if not isinstance(suppressed, list) or not isinstance(words, list):
        return suppressed or words  # refused by a run that takes these defaults
    ends = [[token] for token in eos_ids]
    words = [[token] for token in suppressed] + [word for word in words if word not in ends]

    def is_known(token: object) -> bool:
        return not is_integer(token) or 0 <= token < vocab_size

    return [word for word in words if not isinstance(word, list) or all(map(is_known, word))]


def not_applied(generation: JsonFile) -> dict[str, Any]:
    """Read the keys of generation_config.json that choose tokens in transformers alone."""
    values = generation.values
    draws = values.get("do_sample")
    neutral = _NOT_APPLIED | (_NOT_APPLIED_GREEDY if draws is not True else {})
    neutral |= _NOT_APPLIED_DRAWN if draws is not False else {}
    return {key: values[key] for key, value in neutral.items() if values.get(key) not in (None, [], value)}
