"""compare-quality: exact divergences over all positions, whole and cut over ranks, and a report that tells them."""

from __future__ import annotations

import json
import math
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from checkpoints import reference_logits, write_tiny_model, write_tiny_qwen3
from fake_runners import engine_config
from family_shapes import SHAPES
from nvcli.cli.main import app
from nvcli.cli.messages import say_warning
from nvcli.core.config import RunConfig, load_run_config
from nvcli.errors import ConfigError, NvcliError
from nvcli.models.linear_methods import Fp8LinearMethod
from nvcli.models.parallel import ShardedLinear
from nvcli.tools.quality import compare
from nvcli.tools.quality.compare import compare_quality
from nvcli.tools.quality.passages import agreement
from nvcli.tools.quality.rank import PassageReader, compare_logits
from nvcli.tools.quality.report import format_json, format_report
from nvcli.tools.quality.statistics import Predictions, TokenSums
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner import model_runner
from nvcli.worker.runner.interface import RankContext

pytestmark = pytest.mark.usefixtures("warm_engines")
CONTEXT = RankContext(rank=0, report_phase=lambda phase: None)
DEMO = Path(__file__).parents[3] / "src/nvcli/demo/example.jsonl"
VOCAB = 97


def make_logits() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of A and B [9, 97], and the targets of all positions but the last."""
    generator = torch.Generator().manual_seed(0)
    a, noise = torch.randn(2, 9, VOCAB, generator=generator)
    return 3 * a, 3 * a + noise, torch.randint(0, VOCAB, (8,), generator=generator)


class ThreadGroup(TensorParallelGroup):
    """A rank in a thread, which exchanges tensors with those in other threads."""

    def __init__(self, rank: int, shared: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def all_gather(self, x: Tensor) -> Tensor:
        self._shared[self.rank] = x
        self._barrier.wait()
        everyone = torch.stack(self._shared)
        self._barrier.wait()
        return everyone


def compare_shard(group: TensorParallelGroup) -> TokenSums | None:
    """Compare a rank's part of the logits, padded so that all ranks have equally many columns."""
    a, b, targets = make_logits()
    size = -(-VOCAB // group.size)
    shards = [
        torch.nn.functional.pad(logits, (0, size * group.size - VOCAB), value=50.0)[
            :, group.rank * size : (group.rank + 1) * size
        ]
        for logits in (a, b)
    ]
    return compare_logits(group, shards[0], shards[1], targets, vocab_size=VOCAB)


def test_the_sums_are_those_of_the_formulas() -> None:
    """Padding that is likelier than every token counts for nothing, and three ranks find what one does."""
    a, b, targets = make_logits()
    log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    divergences = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    alone = compare_shard(TensorParallelGroup.single())
    assert alone is not None
    assert (alone.positions, alone.targets) == (9, 8)
    found = Predictions.of(alone)
    assert found.mean_kl == pytest.approx(float(divergences.mean()), rel=1e-12)
    assert alone.kl_max == pytest.approx(float(divergences.max()), rel=1e-12)
    assert alone.same_best == int((a.argmax(-1) == b.argmax(-1)).sum()) < 9
    nll = [-float(log[:8].gather(1, targets[:, None]).mean()) for log in (log_p, log_q)]
    perplexities = [found.perplexity_a, found.perplexity_b]
    assert perplexities == pytest.approx([math.exp(value) for value in nll], rel=1e-12)
    shared, barrier = [torch.empty(0)] * 3, threading.Barrier(3, timeout=30)
    with ThreadPoolExecutor(3) as pool:
        cuts = list(pool.map(compare_shard, [ThreadGroup(rank, shared, barrier) for rank in range(3)]))
    for cut in cuts:
        assert cut is not None
        for name in TokenSums.__struct_fields__:
            assert getattr(cut, name) == pytest.approx(getattr(alone, name), rel=1e-12)


def test_equal_logits_do_not_diverge_and_nan_is_found() -> None:
    a, _, targets = make_logits()
    group = TensorParallelGroup.single()
    same = compare_logits(group, a, a.clone(), targets, vocab_size=VOCAB)
    assert same is not None
    assert (same.kl_sum, same.same_best) == (0.0, 9)
    a[3, 5] = torch.nan
    assert compare_logits(group, a, make_logits()[1], targets, vocab_size=VOCAB) is None


@pytest.mark.parametrize("family", ["plain", "gemma 2", "qwen 3-next"])
def test_passages_are_read_as_transformers_reads_them(family: str, tmp_path: Path) -> None:
    """All positions, in chunks, and one passage behind another: also with windows, and with recurrent states."""
    kind, overrides = SHAPES.get(family, ("Qwen3", {}))
    path = write_tiny_model(tmp_path, kind, **overrides)
    ids = [7, 3, 50, 96, 2, 33, 8, 41, 5, 5, 60, 71]
    config = engine_config(model_path=path, max_model_len=64, block_size=4)
    with torch.inference_mode():
        reader = PassageReader(config, CONTEXT, max_tokens=len(ids), say=print)
        for _ in range(2):
            tokens = torch.tensor(ids, dtype=torch.int32)
            hidden = torch.cat([reader.read_chunk(tokens[:7], 0), reader.read_chunk(tokens[7:], 7)])
            found = reader.model.compute_logits(hidden)
            torch.testing.assert_close(found, reference_logits(path, ids), atol=1e-3, rtol=1e-3)


def test_weights_in_fp8_are_compared(tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path)
    found = []
    for kept in ("none", "fp8"):
        config = engine_config(model_path=path, max_model_len=64, block_size=4, quantization=kept)
        with torch.inference_mode():
            reader = PassageReader(config, CONTEXT, max_tokens=5, say=print)
            tokens = torch.tensor([7, 3, 50, 96, 2], dtype=torch.int32)
            found.append(reader.model.compute_logits(reader.read_chunk(tokens, 0)))
    assert 0 < (found[0] - found[1]).abs().mean() < 0.2


def test_a_model_is_read_with_the_accumulation_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the one with fast sums would be compared with itself."""
    path, asked = write_tiny_qwen3(tmp_path), []
    monkeypatch.setattr(
        model_runner, "has_fp8_units", lambda device, accumulation=None: asked.append(accumulation) is None
    )
    for accumulation in ("exact", "fast"):
        config = engine_config(
            model_path=path, max_model_len=64, block_size=4, quantization="fp8", fp8_accumulation=accumulation
        )
        reader = PassageReader(config, CONTEXT, max_tokens=5, say=print)
        layers = [layer for layer in reader.model.modules() if isinstance(layer, ShardedLinear)]
        methods = [layer.method for layer in layers if isinstance(layer.method, Fp8LinearMethod)]
        assert {method.accumulation for method in methods} == {accumulation}
    assert [each for each in asked if each is not None] == ["exact", "fast"]


def test_a_batch_invariant_run_is_read_as_it_computes(tmp_path: Path) -> None:
    """Its logits have the same bits however a passage is cut into chunks."""
    config = engine_config(model_path=write_tiny_qwen3(tmp_path), max_model_len=64, block_size=4, batch_invariant=True)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).int()
    with torch.inference_mode():
        reader = PassageReader(config, CONTEXT, max_tokens=40, say=print)
        whole, one_by_one = (
            torch.cat([reader.read_chunk(tokens[start : start + size], start) for start in range(0, 40, size)])
            for size in (40, 1)
        )
    assert reader.model.group.sums_in_order
    assert torch.equal(whole, one_by_one)


def test_agreement_of_answers() -> None:
    a = [array("i", [1, 2, 3]), array("i", [1, 2]), None, array("i", [9])]
    b = [array("i", [1, 2, 3]), array("i", [1, 2, 4, 5]), array("i", [1]), array("i", [8])]
    found = agreement(a, b)
    assert (found.rows, found.failed) == (3, 1)
    assert found.equal == pytest.approx(1 / 3)
    assert found.mean_common_prefix == pytest.approx(5 / 3)
    assert found.mean_tokens == 2


def test_the_command_over_rows(capfd: pytest.CaptureFixture[str]) -> None:
    """An FP8 cache moves predictions a little, and those of answers that the model was trained for hardly at all. What
    would follow the end of an answer is not compared."""
    settings = {"model": "demo", "max_model_len": 512}
    run_a = load_run_config(None, settings=settings)
    run_b = load_run_config(None, settings={**settings, "kv_cache_dtype": "fp8"})
    said: list[str] = []
    report = compare_quality(
        run_a, run_b, str(DEMO), limit=4, context=64, max_answer_tokens=12, say=said.append, note=say_warning
    )
    assert [line.partition(" 4 ")[0] for line in said[:2]] == ["A answers", "B answers"]
    assert report.differences == {"kv_cache_dtype": ("auto", "fp8")}
    assert report.answers is not None
    assert (report.answers.rows, report.answers.equal) == (4, 1.0)
    everything, prompts, answers = (report.predictions[name] for name in ("all", "prompts", "answers"))
    assert everything.tokens == prompts.tokens + answers.tokens
    assert answers.tokens == pytest.approx(4 * report.answers.mean_tokens)
    assert 0 < answers.mean_kl < 1e-4
    assert answers.top1_agreement == 1.0
    assert answers.perplexity_a == pytest.approx(answers.perplexity_b, rel=0.01)
    assert json.loads(format_json(report))["predictions"]["all"]["tokens"] == everything.tokens
    text = format_report(report)
    assert "kv_cache_dtype: auto → fp8" in text
    assert "100.00 % of 4 are equal" in text
    assert capfd.readouterr().out == ""  # results alone go there, and the command prints them


def test_a_text_over_two_ranks_without_answers(tmp_path: Path) -> None:
    """Settings that change no prediction give a divergence of nothing, over every token of the pieces."""
    text = tmp_path / "text.txt"
    text.write_text("What is 3 + 4? It is 7. " * 20)
    settings = {"model": "demo", "tensor_parallel_size": 2, "max_model_len": 512}
    run_a = load_run_config(None, settings=settings)
    run_b = load_run_config(None, settings={**settings, "seed": 1})
    report = compare_quality(run_a, run_b, str(text), limit=2, context=70, max_answer_tokens=0, say=print, note=print)
    assert report.answers is None
    found = report.predictions["all"]
    assert (report.passages, found.tokens, list(report.predictions)) == (2, 140, ["all"])
    assert (found.mean_kl, found.top1_agreement) == (0.0, 1.0)
    assert found.perplexity_a == found.perplexity_b > 1


@pytest.mark.parametrize(
    ("arguments", "a", "b"),
    [
        (["--tp", "1", "--set-b", "tensor_parallel_size=2"], 1, 2),
        (["--tp", "2", "--set", "seed=3", "--set-b", "seed=4"], 2, 2),
    ],
    ids=["its own", "shared"],
)
def test_what_is_set_for_b_goes_over_the_flags(
    arguments: list[str], a: int, b: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[RunConfig] = []
    monkeypatch.setenv("HOME", "/home/me")

    def take(run_a: RunConfig, run_b: RunConfig, input_file: str, **options: object) -> None:
        assert input_file == "/home/me/x.txt"
        compared.extend((run_a, run_b))
        raise ConfigError("enough")

    monkeypatch.setattr(compare, "compare_quality", take)
    result = CliRunner().invoke(app, ["compare-quality", "~/x.txt", "-m", "demo", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert [run.tensor_parallel_size for run in compared] == [a, b]
    assert [run.model for run in compared] == ["demo", "demo"]
    assert compared[0] != compared[1]


@pytest.mark.parametrize(
    ("in_b", "input_file", "words"),
    [
        ({}, "x.jsonl", "same configuration; change B with --set-b"),
        ({"pipeline_parallel_size": 2}, "x.jsonl", "`pipeline_parallel_size` of B is 2"),
        ({"tensor_parallel_size": 2}, "x.jsonl", "`tensor_parallel_size` is 1 for A but 2 for B"),
        ({"lora": {"adapters": {"a": "b"}}}, "x.jsonl", r"names adapters \(a\), .*without a name: --set-b lora=b"),
        ({"seed": 1}, "nowhere.txt", "nowhere.txt: cannot be read: No such file"),
        ({"seed": 1}, "nowhere.jsonl", "nowhere.jsonl"),
    ],
    ids=["equal", "stages", "ranks", "named adapters", "no text", "no rows"],
)
def test_what_cannot_be_compared(in_b: dict[str, object], input_file: str, words: str) -> None:
    settings: dict[str, object] = {"model": "demo", "tensor_parallel_size": 1, "device": "cpu"}
    run_a, run_b = (load_run_config(None, settings=values) for values in (settings, {**settings, **in_b}))
    with pytest.raises(ConfigError, match=words):
        compare_quality(run_a, run_b, input_file, limit=1, context=64, max_answer_tokens=0, say=print, note=print)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("max_model_len", "--set-b max_model_len: expected key=value, such as `--set-b "),
        ("block_size=[", "--set-b block_size=[: the value is not valid YAML"),
        ("block_size=0", "--set-b block_size=0: `block_size` is 0; allowed: "),
        ("max_model_len=99999", "B, as set by --set-b and --config-b: `max_model_len` is 99999, and demo was"),
        ("model=/nowhere", "B, as set by --set-b and --config-b: /nowhere"),
    ],
)
def test_what_is_wrong_with_b_names_its_option(value: str, words: str) -> None:
    result = CliRunner().invoke(app, ["compare-quality", "x.jsonl", "-m", "demo", "--set-b", value])
    assert isinstance(result.exception, NvcliError)
    assert str(result.exception).startswith(words)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    """A model of NaN ends the comparison with one error, whatever the other says."""
    from checkpoints import set_weights
    from nvcli.tools.quality.ranks import ComparingRanks, PassageTask

    path = write_tiny_qwen3(tmp_path)
    set_weights(path, "model.norm.weight", torch.nan)
    config = engine_config(model_path=path, max_model_len=64, block_size=4)
    with ComparingRanks((config, config), max_tokens=3) as ranks:
        ranks.wait_ready()
        with pytest.raises(NvcliError, match="some logits after tokens 0 to 2 of a passage are NaN"):
            ranks.compare(PassageTask(array("i", [1, 2, 3]).tobytes(), 3))
