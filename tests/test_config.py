"""Configuration: what can be wrong in it is named with file, line or flag, key, value and what is allowed."""

from __future__ import annotations

import itertools
import os
import re
import threading
from pathlib import Path

import msgspec
import pytest
import yaml

from nvcli.core.byte_sizes import parse_size
from nvcli.core.config import AttentionBackends, RunConfig, load_run_config
from nvcli.core.config_source import json_object
from nvcli.core.engine_config import EngineConfig
from nvcli.core.sampling_params import SamplingParams
from nvcli.errors import ConfigError
from plain_config import plain_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_file_overrides_and_flags_lie_over_each_other(tmp_path: Path) -> None:
    path = write(tmp_path, "model: a\nseed: 1\nmax_num_seqs: 8\njob: {order: input}\nsampling: {top_k: 5}\n")
    run = load_run_config(
        path,
        [
            "job.max_errors=5",
            "seed=2",
            "max_num_seqs=16",
            "sampling.temperature=0",
            "job.on_too_long=truncate-left",
            "seed=3",
        ],
        {"--model": "b", "--tp": 2, "--order": "completion", "--max-errors": None},
    )
    assert (run.model, run.seed, run.max_num_seqs, run.tensor_parallel_size) == ("b", 3, 16, 2)
    assert run.sampling == {"top_k": 5, "temperature": 0}
    assert (run.job.order, run.job.on_too_long) == ("completion", "truncate-left")
    assert run.job.max_errors is None
    assert run.data_parallel_size == "auto"


def test_sampling_keeps_only_the_keys_that_were_set(tmp_path: Path) -> None:
    assert load_run_config(write(tmp_path, "model: m\nsampling:\n  # top_k: 5\njob:\n")).sampling == {}
    run = load_run_config(write(tmp_path, "model: m\nsampling: {temperature: 1.0, logit_bias: {5: -100}}\n"))
    assert run.sampling == {"temperature": 1.0, "logit_bias": {5: -100}}


def test_keys_dates_times_yes_and_no_in_yaml_are_the_texts_that_were_written(tmp_path: Path) -> None:
    schema = "{properties: {on: {enum: [2024-01-31, 12:30, No, true]}, no: {}}}"
    run = load_run_config(write(tmp_path, f"model: m\nsampling: {{structured: {{json_schema: {schema}}}}}\n"))
    assert run.sampling["structured"]["json_schema"] == {
        "properties": {"on": {"enum": ["2024-01-31", "12:30", "No", True]}, "no": {}}
    }


ERRORS_IN_FILES = [
    ("model: m\nmax_num_seq: 4", r"run.yaml:2: unknown key `max_num_seq`; did you mean `max_num_seqs`\?"),
    ("MODEL: m", r"run.yaml:1: unknown key `MODEL`; did you mean `model`\?"),
    ("model: m\nzzz: 4", r"run.yaml:2: unknown key `zzz`; known: model, revision"),
    ("model: m\njob: {ordr: input}", r"run.yaml:2: unknown key `job.ordr`; did you mean `order`\?"),
    ("model: m\nsampling:\n  temp: 1", r"run.yaml:3: unknown key `sampling.temp`; did you mean `temperature`\?"),
    (
        "model: m\nlora: {adapters: {a: b}, most: 2}",
        r"run.yaml:2: unknown key `lora.most`; known: adapters, max_loaded, mode",
    ),
    (
        "model: m\nsampling.top_k: 1",
        r"run.yaml:2: unknown key `sampling.top_k`; `top_k` is a key of the mapping `sampling`: `sampling: {top_k: …}`",
    ),
    ("dtype: fp16", r'run.yaml:1: `dtype` is "fp16"; allowed: auto, bfloat16, float16, float32'),
    ("quantization: fp4", r'run.yaml:1: `quantization` is "fp4"; allowed: auto, fp8, none'),
    ("model: m\nsampling: {bad_words: ['']}", r"`sampling.bad_words\[0\]` is \"\"; allowed: text that is not empty"),
    (
        "model: m\nsampling: {allowed_token_ids: []}",
        r"is \[\]; allowed: null or a list that is not empty, each item an integer",
    ),
    ("model: [m]", r'run.yaml:1: `model` is \["m"\]; allowed: text'),
    ("model: m\nmax_num_seqs: 0", r"run.yaml:2: `max_num_seqs` is 0; allowed: an integer from 1 to 65536"),
    ("model: m\nmax_num_seqs: '8'", r'run.yaml:2: `max_num_seqs` is "8"; allowed: an integer'),
    ("model: m\nmax_num_seqs: true", r"run.yaml:2: `max_num_seqs` is true; allowed: an integer"),
    (
        "model: m\ngpu_memory_utilization: 1.1",
        r"`gpu_memory_utilization` is 1.1; allowed: a number above 0 and at most 1",
    ),
    ("model: m\nmax_model_len: 1", r"`max_model_len` is 1; allowed: an integer of at least 2 or null"),
    ("model: m\nseed: 9223372036854775808", r"run.yaml:2: `seed` is 9223372036854775808; allowed"),
    ("model: m\nseed: 010", r'run.yaml:2: `seed` is "010"; allowed: an integer'),
    ("model: m\nattention_backend: fa3", r"allowed: auto, flash-attn, flashinfer, torch, triton"),
    ("model: m\nattention_backend: 3", r"allowed: auto, .*triton or an object with the keys prefill, decode"),
    (
        "model: m\nattention_backend: {prefill: fa3}",
        r'run.yaml:2: `attention_backend.prefill` is "fa3"; allowed: auto, flash-attn, flashinfer, torch, triton',
    ),
    (
        "model: m\nattention_backend: {decod: triton}",
        r"run.yaml:2: unknown key `attention_backend.decod`; did you mean `decode`\?",
    ),
    ("model: m\njob: 3", r"run.yaml:2: `job` is 3; allowed: an object with the keys order, on_too_long"),
    ("model: m\njob:\n  order: random", r'run.yaml:3: `job.order` is "random"; allowed: completion, input'),
    ("model: m\nsampling: [1]", r"run.yaml:2: `sampling` is \[1\]; allowed: an object with keys"),
    ("model: m\nsampling: {top_p: 3}", r"run.yaml:2: `sampling.top_p` is 3; allowed: a number above 0 and at most 1"),
    ("model: m\nsampling: {temperature: .nan}", r"`sampling.temperature` is NaN; allowed: a number from 0 to 100"),
    ("model: m\nsampling: {stop: [a, 3]}", r"`sampling.stop\[1\]` is 3; allowed: text"),
    ("model: m\nsampling: {logit_bias: {5: 1000}}", r"`sampling.logit_bias\[5\]` is 1000; allowed: a number from -100"),
    ("model: m\nspeculation: {method: ''}", r'`speculation.method` is ""; allowed: text that is not empty'),
    ("model: m\nlora: {adapters: {a: x, b: null}}", r"`lora.adapters.b` is null; allowed: text"),
    ("model: m\nlora: {mode: merged}", r'run.yaml:2: `lora` is {"mode": "merged"}, which lacks the key `adapters`'),
    ("model: m\nsampling: {logit_bias: {-1: 1}}", r"sampling.logit_bias: the key -1 is not an integer of at least 0"),
    ("model: m\nsampling: {min_tokens: 5, max_tokens: 2}", r"run.yaml:2: `min_tokens` \(5\) is larger .*; lower it"),
    ("model: m\nkv_cache_memory: 2Gi", r'run.yaml:2: `kv_cache_memory` is "2Gi"; allowed: .* such as 512MiB'),
    ("model: m\nkv_cache_memory: 0MiB", r"run.yaml:2: `kv_cache_memory` is .*at least one byte"),
    ("model: m\nkv_cache_memory: 1.5", r"run.yaml:2: `kv_cache_memory` is 1.5; allowed: text or an integer"),
    (
        "model: m\nmax_num_batched_tokens: 8000\nmax_num_seqs: 9000",
        r"run.yaml:2: `max_num_batched_tokens` \(8000\) is smaller than `max_num_seqs`",
    ),
    ("seed: 1\nmodel: m\nseed: 2", r"run.yaml:3: the key `seed` is given twice, first in line 1"),
    ("model: m\njob: {order: input, order: input}", r"run.yaml:2: the key `job.order` is given twice"),
    ("- model", r"run.yaml:1: expected keys with values"),
    ("just text", r"run.yaml:1: expected keys with values"),
    ("model: m\n1: 2", r"run.yaml: top level: the key 1 is not text"),
    ("model: m\nseed: 1:30", r'run.yaml:2: `seed` is "1:30"; allowed: an integer'),
    ("model: m\nstep_timeout: 1:30.5", r'run.yaml:2: `step_timeout` is "1:30.5"; allowed: a number'),
    ("? [a]\n: 2", r"run.yaml:1: a key must be a plain word"),
    ("model: m\njob: [", r"run.yaml:2: not valid YAML"),
    ("model: m\n\tseed: 1", r"run.yaml:2: not valid YAML"),
    ("model: m\n---\nmodel: n", r"run.yaml:2: not valid YAML: expected a single document"),
    ("model: !!python/object:os.system m", r"run.yaml:1: not valid YAML"),
    ("model: \x01", r"run.yaml: not valid YAML"),
    ('model: m\ndtype: "\\ud800"', r"run.yaml:2: not valid YAML: half of a surrogate pair"),
    ("model: m\nenforce_eager: !!bool x", r"run.yaml: not valid YAML"),
    ("model: m\nsampling: {stop_token_ids: !!set {a}}", r"run.yaml:2: not valid YAML: .*set"),
    ("model: m\nstep_timeout: .inf", r"`step_timeout` is Infinity; allowed: a number above 0 and at most 1000000"),
    ("model: m\nmax_num_batched_tokens: 9999999999", r"allowed: an integer from 1 to 2147483647"),
    (f"model: m\nkv_cache_memory: {'9' * 400}GiB", r"run.yaml:2: `kv_cache_memory` is .*; allowed: .* such as 512MiB"),
    ("job: &a {b: *a}", r"run.yaml:1: the alias of `b` leads back"),
    ("", r"^no model given"),
    ("# nothing but a comment\n", r"^no model given.*\n.*`--model demo` is built in"),
    ("model: ''", r"no model given"),
]


ERRORS_IN_FILES += [
    ("model: m\njob: {prompt_template: 'a {'}", r"run.yaml:2: `job.prompt_template` is \"a \{\"; .*allowed: text with"),
    (
        "model: m\njob:\n  messages_template:\n  - {role: user, content: '{}'}",
        r"run.yaml:3: `job.messages_template` is \"\{\}\"; a placeholder is the name of a column",
    ),
    (
        "model: m\njob:\n  messages_template:\n  - {role: user, content: a}\n  - rol: user",
        r"run.yaml:5: unknown key `job.messages_template\[1\].rol`; did you mean `role`",
    ),
    (
        "model: m\njob:\n  messages_template:\n  - {role: user, role: user, content: a}",
        r"run.yaml:4: the key `job.messages_template\[0\].role` is given twice",
    ),
    ("sampling: {stop: &a [*a]}", r"run.yaml:1: the alias leads back to a list"),
    ("model: m\nsampling:\n  stop: ['']\n  max_tokens: 5", r"run.yaml:3: `stop` holds an empty text"),
    (
        "model: m\njob: {prompt_template: a, messages_template: [{role: user, content: a}]}",
        r"`job.prompt_template` and `job.messages_template` exclude each other",
    ),
    (
        "model: m\njob: {prompt_template: a, system: b, chat: never}",
        r"run.yaml:2: `job.prompt_template` makes prompts that are no conv",
    ),
    (
        "model: m\njob: {chat_template_kwargs: {tokenize: 1}}",
        r"run.yaml:2: .*`tokenize` cannot be a variable of a chat template",
    ),
    (
        "model: m\njob: {chat_template_kwargs: {x: {7: 1}}}",
        r"run.yaml:2: `job.chat_template_kwargs`: holds a key that is not text; put quotes around it",
    ),
    (
        "model: m\njob: {chat_template_kwargs: [1]}",
        r"run.yaml:2: `job.chat_template_kwargs` is \[1\]; allowed: an object with keys",
    ),
    ("model: m\njob: {chat_template: ''}", r"run.yaml:2: `job.chat_template` is \"\""),
    (
        "model: m\njob:\n  id_field: chat_template_kwargs\n  keep_input: true",
        r"run.yaml:3: the key `chat_template_kwargs` of a row cannot be two things",
    ),
    ("model: m\nenforce_eager: On", r'run.yaml:2: `enforce_eager` is "On"; allowed: true or false'),
    (
        "model: m\njob:\n  messages_field: prompt\n  prompt_field: prompt",
        r"run.yaml:4: the key `prompt` of a row cannot be two things",
    ),
    ("model: m\njob: {image_field: a, prompt_field: a}", r"run.yaml:2: the key `a` of a row .* `job.image_field`"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS_IN_FILES)
def test_errors_in_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(write(tmp_path, text))
    assert re.search(message, str(caught.value)), str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", r"^--set seed: expected key=value"),
        ("=3", r"^--set =3: expected key=value"),
        ("job..order=input", r"expected key=value"),
        ("max_num_seqs=0", r"^--set max_num_seqs=0: `max_num_seqs` is 0; allowed"),
        ("max_num_seqs=many", r'^--set max_num_seqs=many: `max_num_seqs` is "many"'),
        ("job.ordr=input", r"^--set job.ordr=input: unknown key `job.ordr`; did you mean `order`"),
        ("model.name=x", r'^--set model.name=x: `model` is "m", not a section'),
        ("sampling.stop=[", r"^--set sampling.stop=\[: the value is not valid YAML"),
        ("model=", r"^--set model=: `model` is null"),
    ],
)
def test_errors_in_overrides(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(write(tmp_path, "model: m\n"), [override])


def test_errors_in_flags_name_the_flag() -> None:
    with pytest.raises(
        ConfigError, match=r"^--tp 0: `tensor_parallel_size` is 0; allowed: an integer from 1 to 1024 or auto"
    ):
        load_run_config(None, (), {"--model": "m", "--tp": 0})
    with pytest.raises(ConfigError, match=r"^--temperature 101: `sampling.temperature` is 101; allowed"):
        load_run_config(None, (), {"--model": "m", "--temperature": 101})
    for flag, value in (("--tp", os.fsdecode(b"caf\xe9")), ("--stop", ["a", os.fsdecode(b"caf\xe9")])):
        with pytest.raises(ConfigError, match=rf"^{flag} .*: not UTF-8 text"):
            load_run_config(None, (), {"--model": "m", flag: value})


def test_everyday_flags_set_their_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nsampling: {temperature: 0.5, min_p: 0.1}\n")
    flags = {
        "--temperature": 0,
        "--top-p": 0.9,
        "--top-k": 40,
        "--max-tokens": 64,
        "-n": 2,
        "--stop": ["\n", "Q:"],
        "--seed": 7,
        "--max-model-len": 512,
        "--max-num-seqs": 32,
        "--dtype": "float16",
        "--gpu-memory-utilization": 0.5,
    }
    run = load_run_config(path, ["sampling.temperature=1"], flags)
    assert run.sampling == {
        "temperature": 0,
        "min_p": 0.1,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 64,
        "n": 2,
        "stop": ["\n", "Q:"],
    }
    assert (run.seed, run.max_model_len, run.max_num_seqs) == (7, 512, 32)
    assert (run.dtype, run.gpu_memory_utilization) == ("float16", 0.5)


@pytest.mark.parametrize(("key", "path"), [("temperature", "sampling.temperature"), ("order", "job.order")])
def test_a_key_of_a_section_is_told_its_section(tmp_path: Path, key: str, path: str) -> None:
    message = rf"unknown key `{key}`; did you mean `{path}`\?"
    with pytest.raises(ConfigError, match=rf"^--set {key}=0: {message}"):
        load_run_config(None, ["model=m", f"{key}=0"])
    with pytest.raises(ConfigError, match=rf"run.yaml:2: {message}"):
        load_run_config(write(tmp_path, f"model: m\n{key}: 0\n"))


@pytest.mark.parametrize("text", ["{", "3", "null", '{"a": NaN}', "enable_thinking=false", "{'a': 1}", "\udcff"])
def test_a_flag_that_takes_a_json_object_says_so(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"expected a JSON object in quotes, such as --x '\{\"enable_thinking\": false\}'"
    ):
        json_object("--x", text, example='{"enable_thinking": false}')
    assert json_object("--x", '{"a": [1]}', example="") == {"a": [1]}


def test_an_overridden_error_of_the_file_does_not_count(tmp_path: Path) -> None:
    assert load_run_config(write(tmp_path, "model: m\ndtype: fp16\n"), ["dtype=float16"]).dtype == "float16"


def test_values_of_overrides_are_yaml(tmp_path: Path) -> None:
    run = load_run_config(
        None, ["model=m", "sampling.stop=[a, 'b c']", "max_model_len=null", "sampling.top_p=1e-1", "job={order: input}"]
    )
    assert run.sampling == {"stop": ["a", "b c"], "top_p": 0.1}
    assert run.job.order == "input"


def test_prompts_and_decode_steps_may_have_their_own_attention_backend(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nattention_backend: {prefill: flash-attn}\n")
    both = AttentionBackends(prefill="flash-attn", decode="triton")
    assert load_run_config(path).attention_backend == AttentionBackends(prefill="flash-attn")
    assert load_run_config(path, ["attention_backend.decode=triton"]).attention_backend == both
    assert load_run_config(path, ["attention_backend=torch"]).attention_backend == "torch"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*no such file"):
        load_run_config(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*folder"):
        load_run_config(tmp_path)
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name, found in (("fifo.yaml", "it is a FIFO"), ("zero.yaml", "it is a device")):
        with pytest.raises(ConfigError, match=rf"cannot read the configuration file .*{name}: {found}"):
            load_run_config(tmp_path / name)
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(5 << 20)
    with pytest.raises(ConfigError, match="5,242,880 bytes, more than the"):
        load_run_config(tmp_path / "large.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_run_config(binary)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("10kB", 10_000),
        ("4096", 4096),
        ("4096B", 4096),
        (7, 7),
        (None, None),
    ],
)
def test_sizes(size: str | int | None, num_bytes: int | None) -> None:
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_examples_load_and_are_commented(path: Path) -> None:
    assert load_run_config(path).model
    assert path.read_text().startswith("# ")


def test_the_default_example_shows_every_key_with_its_default() -> None:
    (path,) = (path for path in CONFIGS if path.name == "default.yaml")
    text = path.read_text()
    shown = yaml.safe_load(text)
    assert list(shown) == [field.name for field in msgspec.structs.fields(RunConfig)]
    assert load_run_config(path) == RunConfig(model="demo")
    for name in ("job", "score", "embed"):
        assert shown[name] == msgspec.to_builtins(getattr(RunConfig(), name))
    for field in msgspec.structs.fields(SamplingParams):
        assert f"#   {field.name}: " in text


def test_an_engine_config_survives_the_way_to_another_process() -> None:
    config = plain_config(max_model_len=130)
    data = msgspec.msgpack.encode(config, enc_hook=str)
    assert msgspec.msgpack.decode(data, type=EngineConfig, dec_hook=lambda kind, value: kind(value)) == config
    assert config.max_blocks_per_seq == 3


def test_a_pipe_of_the_shell_and_dev_null_are_configurations() -> None:
    """`--config <(command)`, and `--config /dev/null` so that ./nvcli.yaml is not read."""
    read, write = os.pipe()
    os.write(write, b"model: m\nseed: 3\n")
    os.close(write)
    assert load_run_config(Path(f"/dev/fd/{read}")).seed == 3
    os.close(read)
    assert load_run_config(Path("/dev/null"), ["model=m"]).seed == 0
    read, write = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(write, b"#" * (5 << 20)), os.close(write)))
    writer.start()
    with pytest.raises(ConfigError, match=r"more than 4,194,304 bytes"):
        load_run_config(Path(f"/dev/fd/{read}"))
    os.read(read, 5 << 20)
    os.close(read)
    writer.join()


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in itertools.pairwise("abcdefghijklmno")),
        "a: &a {k: v}\n"
        + "".join(
            f"{b}: &{b} {{{', '.join(f'k{n}: *{a}' for n in range(10))}}}\n"
            for a, b in itertools.pairwise("abcdefghijkl")
        ),
    ],
    ids=["lists", "mappings"],
)
def test_aliases_that_stand_for_more_than_memory_holds_are_refused_at_once(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="more than 100,000 values, counting what each alias stands for"):
        load_run_config(write(tmp_path, text))


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch canary']", "!!python/name:os.system", "!x y"])
def test_tags_of_yaml_make_no_python_objects(tmp_path: Path, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="not valid YAML: could not determine a constructor for the tag"):
        load_run_config(write(tmp_path, f"model: {tag}\n"))
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_run_config(None, [f"model={tag}"])
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("key", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
@pytest.mark.parametrize("value", [1025, 2**63 - 1, 2**63, 2**70])
def test_more_processes_than_any_machine_has(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"`{key}` is {value}; allowed: an integer from 1 to 1024"):
        load_run_config(None, ["model=m", f"{key}={value}"])
