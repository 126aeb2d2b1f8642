"""Keywords of other engines' Python classes: accepted if they mean the same here, else the error says what to use.

A keyword that would change the answers and has no equivalent here is refused. One about the inner workings of another
engine is ignored, with a warning if it has a value. `nvcli.core.other_names` lists other tools' names for the
configuration's keys.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nvcli.core.config import SECTIONS, RunConfig, flag_keys, load_run_config
from nvcli.core.other_names import own_keys, remarks
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.validation import show, suggest
from nvcli.errors import ConfigError
from nvcli.llm.rows import plain_setting

P = ParamSpec("P")
T = TypeVar("T")

NO_EFFECT = frozenset(
    (
        *("trust_remote_code", "swap_space", "disable_log_stats", "disable_log_requests", "disable_custom_all_reduce"),
        *("enable_chunked_prefill", "use_v2_block_manager", "max_seq_len_to_capture", "max_context_len_to_capture"),
        *("distributed_executor_backend", "async_scheduling", "preemption_mode", "scheduling_policy"),
        *("served_model_name", "compilation_config", "max_logprobs", "limit_mm_per_prompt", "mm_processor_kwargs"),
        *("guided_decoding_backend", "structured_outputs_config", "max_parallel_loading_workers", "model_impl"),
        *("speculative_config", "worker_cls", "attention_config", "kv_transfer_config", "profiler_config"),
        *("additional_config",),
    )
)
"""Settings that are ignored with a warning, unless their value is a no-op."""

_NOT_GIVEN: tuple[Any, ...] = (None, {}, [])
"""Values of other engines' settings that are no-ops, whatever the setting."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(NO_EFFECT, (False,)),
    **dict.fromkeys(("skip_tokenizer_init", "enable_lora", "load_in_4bit", "load_in_8bit"), (False,)),
    **dict.fromkeys(("tokenizer_mode", "device_map"), ("auto",)),
    "cpu_offload_gb": (0, 0.0),
    "max_loras": (1,),
    "max_lora_rank": (16,),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "logprobs_mode": ("raw_logprobs",),
    "enable_return_routed_experts": (False,),
    "enable_sleep_mode": (False, True),
    "use_tqdm_on_load": (False, True),
}
"""Settings that are not keys of the configuration → values that are no-ops."""

_FOR_ALL = 'set it for all rows: LLM(model, job={"%s": …})'
CALL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_tqdm": (
        (None, False),
        "no progress bar is shown; wrap the answers in one: tqdm(llm.generate(rows), total=len(rows))",
    ),
    "lora_request": ((None, []), remarks()["lora_request"]),
    "prompt_adapter_request": ((None,), remarks()["lora_request"]),
    "priority": ((None, 0), "rows are started in the order in which they come"),
    "guided_options_request": ((None,), 'use sampling_params={"structured": {"json_schema": …}}'),
    "prompt_token_ids": ((None,), "a list of token ids is a row: llm.generate([[1, 2, 3]])"),
    "messages": ((), "use llm.chat(messages)"),
    "chat_template": ((None,), _FOR_ALL % "chat_template"),
    "chat_template_content_format": ((None, "auto", "string"), "message contents are plain text"),
    "mm_processor_kwargs": ((None, {}), remarks()["image"]),
    "tokenization_kwargs": ((None, {}), 'use sampling_params={"truncate_prompt_tokens": …}'),
    "pooling_params": ((None,), 'use LLM(model, task="embed", embed={"dimensions": …})'),
    "stream": ((None, False), "use llm.stream(row)"),
    "system": ((None,), _FOR_ALL % "system" + ', or give a message of the role "system"'),
}
"""Keywords of methods → values that are no-ops, and what to use instead."""

METHODS = {
    "get_tokenizer": "use transformers.AutoTokenizer.from_pretrained(model); llm.chat renders the chat template itself",
    "encode": 'use llm.embed(rows), on an LLM made with task="embed"',
    "reward": 'use llm.classify(rows), on an LLM made with task="classify"',
    "beam_search": remarks()["use_beam_search"],
    "llm_engine": "the engines run in separate processes; llm.config is their configuration",
    "shutdown": "use llm.close()",
    "wake_up": "use llm.wake()",
    "create_chat_completion": "use llm.chat(messages)",
}
"""Methods and attributes of other engines' objects → what to use instead."""

_RENAMED = {"prompts": "rows", "inputs": "rows"}
_VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "generation_config": {"vllm": "none"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "bfloat16": "bf16"},
    "load_format": {"safetensors": "auto"},
    # The format of a checkpoint is read from its files.
    "quantization": dict.fromkeys(
        (
            *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors"),
            *("modelopt", "modelopt_fp4", "fbgemm_fp8", "mxfp4", "gguf", "auto-round"),
        ),
        "auto",
    ),
}
"""Key → values that mean the same as one of nvcli's."""


def read_config(
    model: str | Path | None, config: str | Path | None, flags: Mapping[str, Any], settings: Mapping[str, Any]
) -> RunConfig:
    """Return the configuration for a constructor's arguments. Raises ConfigError.

    `config` is a file. `flags` are values by option name, None if not given; `settings` are all other keywords,
    including other engines' names.
    """
    if not isinstance(config, str | os.PathLike | None):
        raise ConfigError(f"config={show(config)}: allowed: the path of a YAML file; keys are arguments of their own")
    given = {flag_keys()[flag]: value for flag, value in flags.items() if value is not None}
    if model is not None:
        given["model"] = model
    given |= understood_settings(model, settings)
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    plain = {key: plain_setting(key, value) for key, value in texts.items()}
    return load_run_config(None if config is None else Path(config), settings=plain)


def understood_settings(model: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a constructor's settings to nvcli's keys. Raises ConfigError for a key that belongs in a section.

    Unknown keys are left for `load_run_config`, which says what to use.
    """
    known = dict(zip(RunConfig.__struct_fields__, RunConfig.__struct_defaults__, strict=True))
    ours: dict[str, Any] = {}
    for name, value in settings.items():
        harmless = (*_NOT_GIVEN, *HARMLESS.get(name, ()))
        if name in known:
            if value is not None or known[name] is None:  # None is the default in other engines
                ours[name] = _our_value(name, value)
        elif _is_one_of(value, harmless) or (name == "tokenizer" and str(value) == str(model)):
            continue
        elif name in NO_EFFECT:
            remark = f"; {remarks()[name]}" if name in remarks() else ""
            logging.getLogger("nvcli").warning("LLM: `%s` has no effect here and is ignored%s", name, remark)
        elif name == "order":
            raise ConfigError('LLM takes no `order`; give it in each call: llm.generate(rows, order="completion")')
        elif section := next((section for section, kind in SECTIONS.items() if name in kind.__struct_fields__), None):
            raise ConfigError(f'LLM takes no `{name}`; it belongs in {section}={{"{name}": {show(value)}}}')
        else:
            ours[name] = value
    return ours


def _our_value(name: str, value: Any) -> Any:
    if name == "dtype" and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    return _VALUES[name].get(value, value) if name in _VALUES and isinstance(value, str) else value


def says_what_to_use(*more: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a method accept other engines' keywords, or say what to use with a ConfigError.

    `more` are keywords that the method takes besides those of its signature.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        known = (*(name for name in inspect.signature(method).parameters if name not in ("self", "options")), *more)

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if kwargs.keys() <= set(known):
                return method(*args, **kwargs)
            understood = _understood(kwargs, known, method.__name__, num_given=len(args) - 1)
            return method(*args, **understood)

        return call

    return decorate


def _understood(given: Mapping[str, Any], known: tuple[str, ...], method: str, *, num_given: int) -> dict[str, Any]:
    """Translate keywords to those that a method knows. `num_given` arguments are positional."""
    ours: dict[str, Any] = {}
    for name, value in given.items():
        own = _RENAMED.get(name, name)
        if own in known:
            if own != name and (own in given or num_given > 0):
                raise ConfigError(f"`{name}` is another name for `{own}`, and both are given; leave one out")
            ours[own] = value
            continue
        harmless, hint = CALL.get(name, ((), ""))
        if _is_one_of(value, harmless):
            continue
        if not hint and "sampling_params" in known and (path := _sampling_path(name)) is not None:
            hint = f"put it into the sampling: sampling_params={_nested(path, show(value))}"
        raise ConfigError(f"llm.{method} takes no `{name}`; {hint or suggest(name, known)}")
    return ours


def _sampling_path(name: str) -> list[str] | None:
    """Return where a name, or its equivalent here, belongs in the sampling; None if it does not."""
    paths = [f"sampling.{name}"] if name in SamplingParams.__struct_fields__ else own_keys().get(name, ())
    return next((path.split(".")[1:] for path in paths if path.startswith("sampling.")), None)


def _nested(path: list[str], value: str) -> str:
    """Write a value at a path as a nested dict, as text."""
    return "".join(f'{{"{step}": ' for step in path) + value + "}" * len(path)


def _is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in values)
