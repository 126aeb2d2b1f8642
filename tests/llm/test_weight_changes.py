"""An LLM whose weights are replaced, given up and put back: with a real model, and with engines that are held back."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from held_engine import HeldEngine, MakeLLM
from model_engine import ModelEngine, write_byte_model
from nvcli.core.config import RunConfig
from nvcli.core.validation import convert
from nvcli.core.weight_changes import LoadWeights, Sleep, Wake, WeightsChanged
from nvcli.errors import ClosedError, ConfigError, LoadError, WorkerError
from nvcli.llm.llm import LLM
from quantised_checkpoints import FORMATS, write_quantised

pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")

PROMPTS = ["Take the first ten letters", "and the next", "z"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("models") / "first")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture, with other weights, and in another type."""
    return write_byte_model(tmp_path_factory.mktemp("models") / "second", seed=1, dtype="bfloat16")


def open_llm(model: Path, **config: Any) -> LLM:
    settings = {"model": str(model), "device": "cpu", "max_num_seqs": 4, "block_size": 4, **config}
    return LLM.from_config(convert(settings, RunConfig), start=ModelEngine, note=lambda line: None)


def ask(llm: LLM) -> list[list[int]]:
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    return [answer["choices"][0]["token_ids"] for answer in llm.generate(PROMPTS, sampling=sampling)]


@pytest.fixture(scope="module")
def of_second(second: Path) -> list[list[int]]:
    with open_llm(second, dtype="float32") as llm:
        return ask(llm)


@pytest.fixture
def llm(first: Path) -> Iterator[LLM]:
    with open_llm(first) as llm:
        yield llm


def test_the_next_call_answers_with_the_new_weights(
    llm: LLM, first: Path, second: Path, of_second: list[list[int]]
) -> None:
    before = ask(llm)
    assert before != of_second
    llm.load_weights(second)
    (uncached,) = llm.generate(PROMPTS[0], sampling={"max_tokens": 1})
    assert uncached["usage"]["cached_tokens"] == 0
    assert ask(llm) == of_second
    llm.load_weights(str(first))
    assert ask(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_weights_come_back_as_they_were(llm: LLM, second: Path, of_second: list[list[int]], level: Any) -> None:
    llm.load_weights(second)
    llm.sleep(level)
    with pytest.raises(ClosedError, match=r"asleep; call llm.wake\(\)"):
        llm.generate("a")
    llm.sleep(1)  # says nothing new
    llm.wake()
    llm.wake()
    assert ask(llm) == of_second


def test_other_weights_wake_an_llm_up(llm: LLM, first: Path, second: Path, of_second: list[list[int]]) -> None:
    before = ask(llm)
    llm.sleep()
    llm.sleep(2)
    llm.load_weights(second)
    assert ask(llm) == of_second
    llm.sleep()
    llm.load_weights(first)
    assert ask(llm) == before


def test_weights_of_another_architecture_are_refused(llm: LLM, tmp_path: Path) -> None:
    before = ask(llm)
    folders = {
        r"`hidden_size` is 64, and 32 in the loaded model; .* make a new LLM": {"hidden_size": 64},
        r"`num_layers` is 3, and 2 in": {"num_hidden_layers": 3},
        r"`decoder.layer_kinds\[0\].mixer.num_kv_heads` is 4, and 2 in": {"num_key_value_heads": 4},
        r"`decoder.norm.eps` is 1e-05, and 1e-06 in": {"rms_norm_eps": 1e-5},
    }
    for number, (message, overrides) in enumerate(folders.items()):
        other = write_byte_model(tmp_path / str(number), **overrides)
        for _ in range(2):  # awake and asleep
            with pytest.raises(LoadError, match=message):
                llm.load_weights(other)
            llm.sleep()
        llm.wake()
        assert ask(llm) == before


def test_weights_in_another_format_are_refused(first: Path, tmp_path: Path) -> None:
    """What the loaded model was told to keep is not there."""
    quantised, _ = write_quantised(first, tmp_path, FORMATS["modelopt, nvfp4"], skip=())
    with open_llm(quantised, quantization="w4a16") as llm:
        before = ask(llm)
        with pytest.raises(LoadError, match=r"first: .* not quantised.* make a new LLM"):
            llm.load_weights(first)
        assert ask(llm) == before


def test_files_that_do_not_fit_are_refused(llm: LLM, tmp_path: Path) -> None:
    before = ask(llm)
    broken = write_byte_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(LoadError, match="truncated"):
        llm.load_weights(broken)
    with pytest.raises(LoadError, match=r"there is no folder .*nowhere"):
        llm.load_weights(tmp_path / "nowhere")
    with pytest.raises(LoadError, match=r"model.safetensors is no folder"):
        llm.load_weights(weights)
    with pytest.raises(ConfigError, match="level=3: allowed: 1 or 2"):
        llm.sleep(3)  # type: ignore[arg-type]
    assert ask(llm) == before


def test_made_up_weights_take_no_files_and_come_back(
    first: Path, second: Path, of_second: list[list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "without-weights"
    shutil.copytree(first, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with open_llm(folder, load_format="dummy") as llm:
        made_up = ask(llm)
        llm.sleep(2)
        llm.wake()
        assert ask(llm) == made_up
        llm.load_weights(second)
        assert ask(llm) == of_second


def in_background(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_answers_must_be_there_before_weights_change(make_llm: MakeLLM) -> None:
    llm = make_llm()
    answers = llm.generate(["hold on", "next"])
    with pytest.raises(ConfigError, match="1 call is still being answered; read all answers first, or close them"):
        llm.sleep()
    make_llm.engines[0].may_go_on.set()
    assert next(answers).error is None
    done = llm.generate(["x"])
    assert next(done).error is None
    next(answers)  # all are answered, though both calls are open
    llm.sleep()
    assert make_llm.engines[0].changes == [Sleep(1)]


def test_rows_that_no_one_waits_for_are_dropped_first(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate(["hold on"] * 100).close()
    llm.sleep(2)  # the engine finds nothing running
    llm.wake()
    assert make_llm.engines[0].changes == [Sleep(2), Wake()]


class SlowEngine(HeldEngine):
    """Changes its weights only when it may go on."""

    def take_changed(self) -> WeightsChanged | None:
        return super().take_changed() if self.may_go_on.is_set() else None


def test_calls_wait_for_a_change(make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("held_engine.HeldEngine", SlowEngine)
    llm = make_llm()
    change = in_background(lambda: llm.load_weights(tmp_path))
    answered = threading.Event()
    engine = make_llm.engines[0]
    while not engine.changes:
        change.join(0.001)
    call = in_background(lambda: (list(llm.generate(["abc"])), answered.set()))
    assert not answered.wait(0.05)
    assert not engine.received
    engine.may_go_on.set()
    assert answered.wait(5)
    change.join()
    call.join()
    assert engine.changes == [LoadWeights(str(tmp_path))]


def test_kept_answers_are_forgotten(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm()
    for _ in range(2):
        list(llm.generate(["abc"], sampling={"temperature": 0}))
    assert len(make_llm.engines[0].received) == 1
    llm.load_weights(tmp_path)
    list(llm.generate(["abc"], sampling={"temperature": 0}))
    assert len(make_llm.engines[0].received) == 2


def test_copies_of_a_model_change_together(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(data_parallel_size=2)
    list(llm.generate("abc", sampling={"temperature": 0}))
    llm.load_weights(tmp_path)
    assert [engine.changes for engine in make_llm.engines] == [[LoadWeights(str(tmp_path))]] * 2
    refusal = WeightsChanged("LoadError", "no such model")
    for engine in make_llm.engines:
        engine.answer_to_changes = refusal
    with pytest.raises(LoadError, match="no such model"):
        llm.load_weights(tmp_path)
    assert len(list(llm.generate("abc"))) == 1
    make_llm.engines[0].answer_to_changes = WeightsChanged()
    with pytest.raises(WorkerError, match="1 of 2 copies of the model did not do as the others: no such model"):
        llm.load_weights(tmp_path)
