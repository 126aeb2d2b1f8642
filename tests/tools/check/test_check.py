"""A check says of a job what the run of it would do, without its engine: errors, tokens, equal rows, settings."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from file_jobs import generate
from nvcli.core.config import load_sourced_config
from nvcli.errors import ConfigError
from nvcli.job.progress.display import Progress
from nvcli.job.shard import Shard
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.check import machine
from nvcli.tools.check.check import Check, CheckOptions, CheckReport, check_job
from nvcli.tools.check.machine import Forecast, named_gpus
from nvcli.tools.check.progress import CheckProgress
from nvcli.tools.check.report import format_json, print_report
from vision_model import write_image, write_vision_model

pytestmark = pytest.mark.usefixtures("tokenizer")  # its first import warns

ROWS: list[Any] = [
    {"prompt": "ab", "id": "first"},
    {"messages": [{"role": "user", "content": "Hi <|end|>"}]},
    {"messages": [{"role": "forbidden", "content": "x"}]},
    {"prompt": "x" * 70},
    {"prompt": "ab", "id": "first"},
    {"prompt": 5},
    "no json",
    {"prompt_token_ids": [3, 999]},
    {"prompt": "ab", "sampling": {"n": 2}},
    {"prompt": "ab", "sampling": {"max_tokens": 60}},
    {"prompt": "y" * 300, "temperature": 1},
]


def checked(
    folder: Path, model: Path, rows: list[Any], options: CheckOptions | None = None, **flags: Any
) -> CheckReport:
    return check_of(folder, model, rows, options, **flags).report


def check_of(folder: Path, model: Path, rows: list[Any], options: CheckOptions | None = None, **flags: Any) -> Check:
    path = folder / "in.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return check_file(path, model, options, **flags)


def check_file(
    path: Path,
    model: Path,
    options: CheckOptions | None = None,
    *,
    config: Path | None = None,
    overrides: tuple[str, ...] = (),
    **flags: Any,
) -> Check:
    run, source = load_sourced_config(config, overrides, {"--model": str(model), "--max-num-seqs": 4} | flags)
    return check_job(
        run, source, inputs=[str(path)], options=options or CheckOptions(), progress=CheckProgress(io.StringIO())
    )


def test_it_says_what_the_run_then_does(tmp_path: Path, model_folder: Path) -> None:
    report = checked(tmp_path, model_folder, ROWS, **{"--temperature": 0, "--max-tokens": 9})
    run, _ = load_sourced_config(None, (), {"--model": str(model_folder), "--temperature": 0, "--max-tokens": 9})
    inputs = [str(tmp_path / "in.jsonl")]
    summary = generate(
        run, inputs=inputs, output=None, progress=Progress(io.StringIO()), start=lambda config: FakeEngine(config)
    )
    answers = sorted(
        map(json.loads, (tmp_path / "in.out.jsonl").read_text().splitlines()), key=lambda row: row["index"]
    )
    assert report.rows == len(answers) == len(ROWS)
    assert {error.type: error.count for error in report.errors} == summary.errors
    for error in report.errors:
        first = next(row for row in answers if row["error"] and row["error"]["type"] == error.type)
        assert (error.index, error.message) == (first["index"], first["error"]["message"])
    good = [row for row in answers if row["error"] is None]
    assert report.lengths is not None
    assert report.lengths.total == sum(row["usage"]["prompt_tokens"] for row in good)
    assert report.equal_rows == summary.counts.rows_deduplicated == 0
    assert list(report.warnings) == [
        "line 11 has `temperature` at its top level, where it is copied and has no effect; if it is a setting, put it "
        "into `sampling`",
        *summary.row_warnings,
    ]


def test_prompts_are_shown_as_the_model_sees_them(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ROWS[1], {"prompt": "a\x1b[31m\u202eb"}, {"prompt_token_ids": [5] * 50}, {"prompt": "z"}]
    report = checked(tmp_path, model_folder, rows)
    assert [len(prompt.pieces) for prompt in report.prompts] == [3, 2, 1]
    assert [(piece.text, piece.special) for piece in report.prompts[0].pieces] == [
        ("<u>Hi ", False),
        ("<|end|>", True),
        ("<a>", False),
    ]
    shown = io.StringIO()
    print_report(report, shown)
    assert "│ <u>Hi <|end|><a>\n" in shown.getvalue()
    assert "│ <|bos|>a␛[31m\\u202eb\n" in shown.getvalue()
    assert "line 1, id row-0: 10 tokens, and an answer of up to 54" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_report(report, coloured := io.StringIO())
    assert "<u>Hi \x1b[1;36m<|end|>\x1b[0m<a>\n" in coloured.getvalue()


def test_long_prompts_are_shown_by_their_ends(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "long"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    (prompt,) = checked(tmp_path, folder, [{"prompt": "a" * 500 + "b" * 500}]).prompts
    assert [(piece.text[:1], piece.left_out) for piece in prompt.pieces] == [("<", 0), ("a", 0), ("", 601), ("b", 0)]


def test_equal_rows_and_shared_beginnings(tmp_path: Path, model_folder: Path) -> None:
    begun = "s" * 40
    rows = [{"prompt": begun + end} for end in ("a", "b", "a", "c")]
    greedy = checked(tmp_path, model_folder, rows, **{"--temperature": 0})
    assert (greedy.equal_rows, greedy.repeated_prompts, greedy.answers) == (1, 0, 3)
    assert greedy.prompt_tokens_to_compute == 3 * 42
    drawn = checked(tmp_path, model_folder, rows)
    assert (drawn.equal_rows, drawn.repeated_prompts, drawn.answers) == (0, 1, 4)
    assert drawn.cached_tokens == 0  # a block has 64 tokens
    (tmp_path / "nvcli.yaml").write_text("block_size: 16")
    found = check_file(
        tmp_path / "in.jsonl", model_folder, config=tmp_path / "nvcli.yaml", **{"--temperature": 0}
    ).report
    assert (found.cached_tokens, found.cached_tokens_are_exact) == (2 * 32, True)


def test_sampling_comes_with_its_origin(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_k": 7, "top_p": 0.5}')
    config = tmp_path / "job.yaml"
    config.write_text("sampling:\n  top_p: 0.25\n  stop: [x]\n")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "sampling": {"n": 2}}\n{"prompt": "b"}\n')
    report = check_file(
        tmp_path / "in.jsonl", folder, config=config, overrides=("sampling.min_p=0.5",), **{"--temperature": 0.5}
    ).report
    assert {each.key: (each.value, each.origin) for each in report.sampling} == {
        "sampling.max_tokens": (None, "default"),
        "sampling.temperature": (0.5, "--temperature"),
        "sampling.top_p": (0.25, f"{config}:2"),
        "sampling.top_k": (7, "generation_config.json"),
        "sampling.min_p": (0.5, "--set"),
        "sampling.stop": (["x"], f"{config}:3"),
    }
    assert report.rows_with_own_sampling == 1


def test_answers_are_forecast_within_what_rows_allow(tmp_path: Path, model_folder: Path) -> None:
    rows = [
        {"prompt": "a", "sampling": {"max_tokens": 5, "n": 3}},
        {"prompt": "b", "sampling": {"min_tokens": 20}},
        {"prompt": "c", "sampling": {"ignore_eos": True, "max_tokens": 30}},
    ]
    report = checked(tmp_path, model_folder, rows, CheckOptions(answer_tokens=10))
    assert report.answers == 5
    assert report.forecasts == [
        Forecast(answer_tokens=10, generated_tokens=3 * 5 + 20 + 30, seconds=None),
        Forecast(answer_tokens=None, generated_tokens=3 * 5 + 62 + 30, seconds=None),
    ]
    (only,) = checked(tmp_path, model_folder, rows[:1]).forecasts
    assert only == Forecast(answer_tokens=None, generated_tokens=15, seconds=None)


def big_model(folder: Path, tokenizer: Path) -> Path:
    """A model of 32 billion parameters, of which there are no weights."""
    shutil.copytree(tokenizer, folder)
    return write_shape("qwen3-32b", folder)


def test_named_gpus_are_estimated_without_weights(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = big_model(tmp_path / "big", model_folder)
    rows = [{"prompt": f"{number}"} for number in range(50)]

    def report(kind: str, count: int) -> CheckReport:
        return checked(tmp_path, model, rows, CheckOptions(gpus=named_gpus(kind, count), answer_tokens=100))

    monkeypatch.setattr(machine, "available_ram", lambda: 1 << 30)
    here = checked(tmp_path, model, rows[:1]).machine
    assert (here.fits, "the weights take 122.05 GiB in float32" in here.note) == (None, True)
    assert checked(tmp_path, model, rows[:1], **{"--device": "cpu"}).machine.fits is False
    small = report("l40s", 1)
    assert (small.machine.fits, small.forecasts[0].seconds) == (False, None)
    assert "does not fit" in small.machine.note
    four, eight = report("L40S", 4), report("h200", 8)
    assert (four.machine.fits, four.machine.gpus) == (True, ["NVIDIA L40S"] * 4)
    assert "--tp 4" in four.machine.note
    assert four.forecasts[0].seconds is not None
    assert eight.forecasts[0].seconds is not None
    assert 1 < eight.forecasts[0].seconds < four.forecasts[0].seconds < (four.forecasts[1].seconds or 0)
    assert four.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"--gpu 4090 is unknown; known: b200, h200"):
        named_gpus("4090", 1)
    with pytest.raises(ConfigError, match=r"--gpus 4 needs the kind"):
        named_gpus(None, 4)
    monkeypatch.setattr(Tokenizer, "load", lambda *_, **__: pytest.fail("the layout was not checked first"))
    with pytest.raises(ConfigError, match=r"\(--tp\) is 4, and the run has 2 GPUs"):
        checked(tmp_path, model, rows, CheckOptions(gpus=named_gpus("h200", 2)), **{"--tp": 4})


def test_images_are_counted_with_their_sizes_and_tokens(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model")
    for name, height, width in (("a", 40, 64), ("b", 32, 48)):
        write_image(tmp_path / f"{name}.png", height, width)
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": f"{name}.png"} for name in names]}]}
        for names in ("a", "ab", "ax", "aa")
    ]
    report = checked(tmp_path, model, [*rows, {"prompt": "x"}], CheckOptions(num_prompts=0))
    assert report.images is not None
    assert (report.images.rows, report.images.tokens.total) == (3, 4 * 40 + 24)
    printed = io.StringIO()
    print_report(report, printed)
    assert (
        "images      5 in 3 rows: 184 tokens; of one: least 24, median 40, most 40\n"
        "            pixels that the model gets: 4 of 64 × 40, 1 of 48 × 32\n"
    ) in printed.getvalue()


def test_a_damaged_input_leaves_the_report_of_what_was_read(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n') + gzip.compress(b'{"prompt": "b"}\n')[:20])
    done = check_file(path, model_folder)
    assert (done.report.rows, done.report.is_complete) == (1, False)
    print_report(done.report, printed := io.StringIO())
    assert "rows        1, not all of the input: 1 can be answered, 0 cannot\n" in printed.getvalue()
    assert isinstance(done.ended_by, ConfigError)
    assert "cannot be read past line 1" in str(done.ended_by)


def test_a_shard_is_checked_alone(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"prompt": "ab"}, {"prompt": 5}, {"prompt": "abc"}]
    report = checked(tmp_path, model_folder, rows, CheckOptions(shard=Shard(0, 2)))
    assert (report.rows, report.rows_failed, [prompt.index for prompt in report.prompts]) == (2, 0, [0, 2])


def test_what_cannot_be_checked_at_all_is_an_error(tmp_path: Path, model_folder: Path) -> None:
    def no_check(**flags: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            checked(tmp_path, model_folder, ROWS, CheckOptions(gpus=named_gpus("h200", 1)), **flags)
        return str(caught.value)

    assert no_check(**{"--device": "cpu"}) == (
        "--gpu estimates for GPUs, but `device` is cpu; leave one of the two out"
    )
    assert no_check(**{"--max-model-len": 100}).startswith("`max_model_len` is 100, and")
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08broken")
    with pytest.raises(ConfigError, match="cannot be read: "):
        check_file(tmp_path / "broken.gz", model_folder)


def test_the_report_is_json_too(tmp_path: Path, model_folder: Path) -> None:
    report = checked(tmp_path, model_folder, ROWS[3:])
    values = json.loads(format_json(report))
    assert values["rows_failed"] == sum(error["count"] for error in values["errors"])
    assert values["lengths"]["histogram"][0].keys() == {"first", "last", "count"}


def test_a_check_of_no_rows(tmp_path: Path, model_folder: Path) -> None:
    report = checked(tmp_path, model_folder, [], CheckOptions(gpus=named_gpus("h100", None)))
    assert (report.rows, report.lengths, report.answers) == (0, None, 0)
    print_report(report, io.StringIO())


def test_progress_comes_every_ten_seconds_where_there_is_no_terminal() -> None:
    now = 0.0
    stream = io.StringIO()
    progress = CheckProgress(stream, clock=lambda: now)
    for now in (1.0, 9.0, 10.0, 11.0, 25.0):
        progress.update(int(now) * 100, 0.5 if now < 20 else None)
    progress.close()
    assert stream.getvalue().splitlines() == ["nvcli: 50%, 1,000 rows, 100 rows/s", "nvcli: 2,500 rows, 100 rows/s"]
