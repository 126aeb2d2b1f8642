"""Every key of a run is listed with its value and with what set it."""

from __future__ import annotations

from pathlib import Path

from nvcli.core.config import load_sourced_config
from nvcli.core.config_source import ConfigSource
from nvcli.job.run.settings import Setting, config_settings, is_worth_showing, sampling_settings


def by_key(settings: list[Setting]) -> dict[str, tuple[object, str]]:
    return {setting.key: (setting.value, setting.origin) for setting in settings}


def test_each_parameter_has_the_value_that_rows_get_and_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\nsampling:\n  top_k: 5\n  top_p: 0.5\n")
    run, source = load_sourced_config(path, ["sampling.min_p=0.1"], {"--temperature": 0})
    generation = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1, "min_tokens": 9}
    settings = by_key(sampling_settings(run, generation, source.setter))
    assert settings["sampling.temperature"] == (0, "--temperature")
    assert settings["sampling.top_k"] == (5, f"{path}:3")
    assert settings["sampling.top_p"] == (0.5, f"{path}:4")
    assert settings["sampling.min_p"] == (0.1, "--set")
    assert settings["sampling.repetition_penalty"] == (1.1, "generation_config.json")
    assert settings["sampling.min_tokens"] == (9, "generation_config.json")
    assert settings["sampling.max_tokens"] == (None, "default")
    telling = [each.key for each in sampling_settings(run, generation, source.setter) if is_worth_showing(each)]
    assert telling == [
        f"sampling.{key}"
        for key in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty")
    ]


def test_min_tokens_of_the_checkpoint_that_give_way_come_from_what_sets_max_tokens() -> None:
    run, source = load_sourced_config(None, [], {"--model": "m", "--max-tokens": 4})
    settings = by_key(sampling_settings(run, {"min_tokens": 9}, source.setter))
    assert settings["sampling.min_tokens"] == (4, "--max-tokens")


def test_generation_config_none_leaves_the_checkpoints_defaults_out() -> None:
    run, source = load_sourced_config(None, ["generation_config=none"], {"--model": "m"})
    assert by_key(sampling_settings(run, {"top_k": 20}, source.setter))["sampling.top_k"] == (0, "default")


def test_keys_of_a_run_that_nobody_named_are_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\njob: {order: input}\nattention_backend: {decode: triton}\n")
    run, source = load_sourced_config(path, [], {"--tp": 2, "--system": "Be brief."})
    settings = by_key(config_settings(run, source.setter))
    assert settings["model"] == ("m", f"{path}:1")
    assert settings["job.order"] == ("input", f"{path}:2")
    assert settings["job.system"] == ("Be brief.", "--system")
    assert settings["tensor_parallel_size"] == (2, "--tp")
    assert settings["attention_backend"] == ({"prefill": "auto", "decode": "triton"}, f"{path}:3")
    assert settings["dtype"] == ("auto", "default")  # the file as a whole has not set it
    assert settings["job.plan"] == (True, "default")
    # Without a source, what differs from the default was set somehow.
    assert by_key(config_settings(run))["job.order"] == ("input", "configuration")


def test_what_lies_under_a_later_flag_is_forgotten() -> None:
    source = ConfigSource()
    source.add_override("sampling.temperature=1")
    source.add_override("sampling={top_k: 3}")
    assert source.setter(("sampling", "temperature")) is None
    assert source.setter(("sampling", "top_k")) == "--set"
    source.add_flag("--top-k", "sampling.top_k", 4)
    assert source.setter(("sampling", "top_k")) == "--top-k"
