"""Makes a `Job` from a row of an OpenAI batch file. Raises RowError or InvalidValue that names the key.

Parameters of the request body are those of the API's reference (platform.openai.com/docs/api-reference: chat,
completions, batch), as far as they say how tokens are chosen, and the additions that vLLM's server takes. A parameter
that would change the answer and is not known here is an error, never ignored; null is as good as absent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nvcli.core.sampling_params import MAX_LOGPROBS, SamplingParams
from nvcli.core.validation import Path, convert, is_integer, show
from nvcli.errors import RowError
from nvcli.job.job import Job, Prompt, RowContext, RowForm, prompt_fields
from nvcli.job.rows.conversation import CONVERSATION_KEYS, REASONING_EFFORT, check_messages, conversation_options
from nvcli.job.rows.native_row import RowDefaults
from nvcli.job.rows.openai_responses import chat_body
from nvcli.job.rows.openai_structured import STRUCTURED_KEYS, structured_of, unsupported_key, unsupported_value
from nvcli.job.rows.prompt_rules import PromptKind, PromptRules
from nvcli.job.rows.raw_values import is_null

URLS = {
    "/v1/chat/completions": RowForm.CHAT,
    "/v1/completions": RowForm.COMPLETION,
    "/v1/responses": RowForm.RESPONSE,
}
_PROMPT_KEYS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
}
"""The key of the body that holds the prompt, by url."""
_URLS_BY_KEY = {key: url for url, key in _PROMPT_KEYS.items()}
"""Urls of requests that have none, by that key; `input` is taken to be of embeddings, the last of its urls."""
_COMMANDS = {**dict.fromkeys(URLS, "generate"), "/v1/embeddings": "embed"}
"""Commands by the URLs that they answer."""
MAX_PROMPTS = 2048
"""Maximum number of prompts in a row, as at OpenAI."""
OWN_KEYS = frozenset(("custom_id", "method", "url", "body"))

_SAME = (
    *("max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    # vLLM's additions:
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words"),
    *("truncate_prompt_tokens", "echo", "prompt_logprobs"),
    # nvcli's own:
    *("stop_repetition", "thinking_budget"),
)
"""Parameters of the body that `sampling` knows by the same name."""
_OTHER_NAMES = {"thinking_token_budget": "thinking_budget", "no_stop_trim": "include_stop_str_in_output"}
"""Parameters of vLLM and SGLang that `sampling` knows by another name."""
IGNORED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention"),
    # vLLM's and SGLang's:
    *("guided_decoding_backend", "priority", "request_id", "rid", "session_id", "cache_salt", "extra_key"),
)
"""Parameters that do not affect the answer; `model` is copied to it."""
_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
    # vLLM's and SGLang's:
    **dict.fromkeys(("use_beam_search", "early_stopping", "return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("spaces_between_special_tokens", "include_reasoning", "separate_reasoning"), (True,)),
    **dict.fromkeys(("return_token_offsets", "return_prompt_token_ids", "return_hidden_states"), (False,)),
    **dict.fromkeys(("return_routed_experts", "return_cached_tokens_details", "return_meta_info"), (False,)),
    **dict.fromkeys(("routed_experts_prompt_start", "routed_experts_start_len"), (0,)),
    **dict.fromkeys(("stream_reasoning", "return_mm_kwargs"), (True, False)),
    "use_audio_in_video": (False,),
    "length_penalty": (1,),
}
"""Parameters that are allowed only with values that change nothing: of vLLM and SGLang, those that a dump of a request
with all its defaults holds."""
_ADD_SPECIAL_TOKENS = "add_special_tokens"
"""vLLM's parameter that is harmless where it is true for completions, and false for chats."""
_CHAT_KEYS = (
    *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "chat_template_kwargs"),
    *(*CONVERSATION_KEYS, REASONING_EFFORT),
)
_IN_COMPLETIONS = ("logprobs", "best_of", "rank_by")
"""Parameters of completions alone that `sampling` knows by the same name."""
_WORKING = (*_SAME, *_OTHER_NAMES, *STRUCTURED_KEYS)
_WORKING_IN_CHATS = dict.fromkeys((*_WORKING, *_CHAT_KEYS))
_WORKING_IN_COMPLETIONS = dict.fromkeys((*_WORKING, "prompt", *_IN_COMPLETIONS))
"""Parameters with an effect, in the order in which messages list them."""


def looks_like_openai(row: Mapping[str, Any]) -> bool:
    """Tell whether a row without a native prompt is meant as a row of a batch file."""
    if ("custom_id" in row) + ("url" in row) + ("body" in row) < 2:
        return False
    return sum(not is_null(row.get(key)) for key in ("custom_id", "url", "body")) >= 2


def openai_form(row: dict[str, Any]) -> RowForm:
    """Return the form that a row's url asks for.

    It is COMPLETION for a url that is not served: the error row has no part that a chat's form has alone.
    """
    return URLS.get(_url_of(row) or "", RowForm.COMPLETION)


def _url_of(row: dict[str, Any]) -> str | None:
    """Return the url of a row as OpenAI's files have it; None if it has no text as its url. Azure's have no version,
    others have another one or a whole address, and files for Mistral, Together and Fireworks have no url: there it
    stands in the request for the whole batch."""
    url, body = row.get("url"), row.get("body")
    if url is None and isinstance(body, dict):
        return next((url for key, url in _URLS_BY_KEY.items() if body.get(key) is not None), None)
    if not isinstance(url, str):
        return None
    path = f"/{url.partition('?')[0].rstrip('/')}"
    return next((known for known in _COMMANDS if path.endswith(known.removeprefix("/v1"))), url)


def openai_id(row: dict[str, Any]) -> str:
    value = row.get("custom_id")
    if not isinstance(value, str):
        what = f"is {show(value)}" if "custom_id" in row else "is missing"
        raise RowError("invalid_id", f"`custom_id` {what}; give text that no other row has")
    return value


def openai_model(row: dict[str, Any]) -> str | None:
    body = row.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else None


def check_request(row: dict[str, Any], urls: Collection[str]) -> dict[str, Any]:
    """Return the parameters of a request to one of these urls, without those that are null. Raises RowError and
    InvalidValue."""
    if str(row.get("method", "POST")).upper() != "POST":
        raise RowError("invalid_value", f'`method` is {show(row["method"])}; allowed: "POST"')
    url, body = _url_of(row), row.get("body")
    if url is None or url not in urls:
        command = _COMMANDS.get(url or "")
        hint = f"; `nvcli {command}` answers such rows" if command else ""
        raise RowError("unsupported_url", f"`url` is {show(row.get('url'))}; allowed: {', '.join(urls)}{hint}")
    if not isinstance(body, dict):
        raise RowError("invalid_value", f"`body` is {show(body)}; expected an object with the request's parameters")
    given = {key: value for key, value in body.items() if value is not None}
    convert(given.get("model", ""), str, under=("body", "model"))
    own, other = _PROMPT_KEYS[url], next((key for key in _URLS_BY_KEY if key in given), None)
    if own not in given and other is not None:
        takers = " or ".join(url for url, key in _PROMPT_KEYS.items() if key == other)
        raise RowError(
            "missing_prompt", f"`body.{other}` is given, and {url} reads `body.{own}`; the `url` for it is {takers}"
        )
    return given


def openai_job(row: dict[str, Any], context: RowContext, defaults: RowDefaults, rules: PromptRules) -> Job:
    """Make the job of a row. Parameters of its body go over the job's `defaults`."""
    given = check_request(row, URLS)
    is_chat, key = context.form is RowForm.CHAT, "messages"
    if context.form is RowForm.RESPONSE:
        given, is_chat, key = chat_body(given), True, "input"
    _check_keys(given, is_chat)
    own = {key: given[key] for key in (_SAME if is_chat else (*_SAME, *_IN_COMPLETIONS)) if key in given}
    own |= {name: given[key] for key, name in _OTHER_NAMES.items() if key in given}
    if is_chat:
        own |= _chat_parameters(given)
    if (structured := structured_of(given)) is not None:
        own["structured"] = structured
    if context.form is RowForm.RESPONSE:
        own |= {"n": 1, "best_of": None}  # whatever the job has for others
    sampling = defaults.sampling(own, under="body")
    if not is_chat:
        return _completion_job(given, context, sampling, rules)
    if "messages" not in given:
        raise RowError("missing_prompt", "`body.messages` is not given")
    return Job(
        context=context,
        messages=rules.with_system(check_messages(given["messages"], under=("body", key))),
        chat_template_kwargs=rules.variables(given.get("chat_template_kwargs"), under=("body", "chat_template_kwargs")),
        sampling=sampling,
        **conversation_options(given, under=("body",)),
    )


def _completion_job(given: dict[str, Any], context: RowContext, sampling: SamplingParams, rules: PromptRules) -> Job:
    prompts: Sequence[Prompt] = prompts_of(given, "prompt")
    if len(prompts) > 1 and sampling.prompt_logprobs is not None:
        raise RowError(
            "unsupported_parameter",
            "`body.prompt_logprobs` is given beside several prompts; leave it out, or give one prompt a row",
        )
    if PromptKind.OTHER_TEXT not in rules.chat:
        return job_of(prompts, context=context, sampling=sampling)
    sent = [rules.conversation(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return job_of(sent, context=context, sampling=sampling, chat_template_kwargs=rules.variables(None, under=()))


def _check_keys(given: dict[str, Any], is_chat: bool) -> None:
    working = _WORKING_IN_CHATS if is_chat else _WORKING_IN_COMPLETIONS
    harmless = {**_HARMLESS_VALUES, _ADD_SPECIAL_TOKENS: (not is_chat,)}
    for key, value in given.items():
        if key == "chat_template":
            raise RowError(
                "unsupported_parameter",
                "`body.chat_template` is not supported: set `job.chat_template` (--chat-template) for all rows",
            )
        if not (key in working or key in IGNORED or key in harmless):
            raise unsupported_key(key, working)
        if key == "suffix" and value != "":
            raise RowError(
                "unsupported_parameter",
                f"`body.suffix` is {show(value)}, and gaps in a text are not filled; if the model has tokens for that, "
                "write them into `body.prompt`, and leave `body.suffix` out",
            )
        if is_chat and key in _CHAT_KEYS:
            continue
        if key in harmless and value not in harmless[key]:
            raise unsupported_value(key, value)


def _chat_parameters(given: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if "max_completion_tokens" in given:
        most = given["max_completion_tokens"]
        if given.get("max_tokens", most) != most:
            raise RowError("invalid_sampling", "`body.max_tokens` and `body.max_completion_tokens` differ; give one")
        own["max_tokens"] = most
    wanted, count = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise RowError("invalid_sampling", f"`body.logprobs` is {show(wanted)}; allowed: true or false")
    if count is not None and not is_integer(count, 0, MAX_LOGPROBS):
        raise RowError(
            "invalid_sampling", f"`body.top_logprobs` is {show(count)}; allowed: an integer from 0 to {MAX_LOGPROBS}"
        )
    if count and not wanted:
        raise RowError("invalid_sampling", "`body.top_logprobs` is given without `body.logprobs`: true")
    if wanted:
        own["logprobs"] = count or 0
    return own


def prompts_of(given: dict[str, Any], key: str) -> list[str | list[int]]:
    """Return the texts or lists of token ids under a key of a request, which holds one of them or a list.

    Raises RowError and InvalidValue.
    """
    if key not in given:
        raise RowError("missing_prompt", f"`body.{key}` is not given")
    value = given[key]
    if not isinstance(value, str | list):
        raise RowError("invalid_value", f"`body.{key}` is {show(value)}; allowed: text or a list of token ids")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise RowError(
                "invalid_value",
                f"`body.{key}` holds {len(value):,} prompts; allowed: {MAX_PROMPTS:,}; give the others "
                "in a row of their own",
            )
        return [_prompt_of(each, ("body", key, number)) for number, each in enumerate(value)]
    return [_prompt_of(value, ("body", key))]


def _prompt_of(value: Any, path: Path) -> str | list[int]:
    return value if isinstance(value, str) else convert(value, list[int], under=path)


def job_of(prompts: Sequence[Prompt], **rest: Any) -> Job:
    """Return a job with one prompt or several. `rest` holds its other fields."""
    return Job(**(prompt_fields(prompts[0]) if len(prompts) == 1 else {"prompts": prompts}), **rest)
