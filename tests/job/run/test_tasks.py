"""Rows that are scored and embedded, files to files, by a real scheduler and model: the numbers are transformers'."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import edit_json, edit_weights, reference_logits, reference_model
from file_jobs import generate
from kept_lines import KeptLines
from model_engine import ModelEngine, write_byte_model
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.validation import convert
from nvcli.errors import ConfigError, LoadError
from nvcli.job.progress.summary import Summary, format_summary
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.tools.bench.command import BenchOptions, run_bench

pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")  # imports transformers once, before the runs

BOS, BYTE_Z = 0, 91
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("models") / "byte-model")


@pytest.fixture(scope="module")
def encode(model: Path) -> Callable[[str], list[int]]:
    """The ids of a text without the token that begins one."""
    tokenizer = Tokenizer.load(model)

    def encode(text: str) -> list[int]:
        (ids,) = tokenizer.encode([text], add_special_tokens=False)
        assert isinstance(ids, list)
        return ids

    return encode


class Jobs:
    """Runs jobs in a folder and keeps the engines' configurations and the summary of the last."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.started: list[EngineConfig] = []
        self.engines: list[ModelEngine] = []
        self.summary: Summary | None = None

    def __call__(self, rows: list[dict[str, Any]], task: str, *, name: str = "out.jsonl", **config: Any) -> list[Any]:
        options = {key: config.pop(key) for key in ("limit", "update", "overwrite") if key in config}
        source = self.folder / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))

        def start(engine_config: EngineConfig) -> ModelEngine:
            self.started.append(engine_config)
            self.engines.append(ModelEngine(engine_config))
            return self.engines[-1]

        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, **config}
        run = convert({"model": str(self.model), "device": "cpu", "task": task, **settings}, RunConfig)
        output = self.folder / name
        self.summary = generate(
            run, inputs=[str(source)], output=str(output), progress=KeptLines(), start=start, **options
        )
        if output.suffix != ".jsonl":
            return []
        return sorted((json.loads(line) for line in output.read_text().splitlines()), key=index_of)


def index_of(row: dict[str, Any]) -> int:
    return int(row["index"] if "index" in row else row["id"].rpartition("_")[2])


@pytest.fixture
def jobs(tmp_path: Path, model: Path) -> Jobs:
    return Jobs(tmp_path, model)


PROMPT = "The sky over the harbour is"


def test_scores_are_those_of_transformers(jobs: Jobs, model: Path, encode: Callable[[str], list[int]]) -> None:
    choices = [" grey", " the colour of television", " blue", "!"]
    cases: list[tuple[dict[str, Any], str, list[str]]] = [
        ({"prompt": PROMPT, "choices": choices, "answer": "C"}, PROMPT, choices),
        ({"prompt": f"{PROMPT} ", "continuation": "grey", "answer": 0, "note": 1}, PROMPT, [" grey"]),
        ({"prompt": PROMPT, "choices": choices[::-1], "answer": " blue"}, PROMPT, choices[::-1]),
        ({"prompt": "", "continuation": "grey"}, "", ["grey"]),
        ({"messages": [{"role": "user", "content": "hi "}], "continuation": "ho"}, "<u>hi <a>", ["ho"]),
        ({"prompt": PROMPT}, "", [PROMPT]),
    ]
    rows = jobs([row for row, _, _ in cases], "score", score={"normalize": "bytes", "token_logprobs": True})
    for (given, before, texts), row in zip(cases, rows, strict=True):
        start = encode(before) if "messages" in given else [BOS, *encode(before)]
        for text, choice in zip(texts, row["choices"], strict=True):
            ids = encode(text)
            logits = reference_logits(model, start + ids)[len(start) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(ids)), ids].tolist()
            assert choice["logprob"] == pytest.approx(math.fsum(expected), abs=1e-4)
            assert choice["token_logprobs"] == pytest.approx(expected, abs=1e-4)
            assert (choice["num_tokens"], len(choice["tokens"])) == (len(ids), len(ids))
            num_bytes = len(text) - (given.get("prompt") == f"{PROMPT} ")
            assert choice["num_bytes"] == num_bytes
            assert choice["score"] == pytest.approx(choice["logprob"] / num_bytes)
            assert choice["perplexity"] == pytest.approx(math.exp(-choice["logprob"] / len(ids)), rel=1e-5)
            assert choice["is_greedy"] == (logits.argmax(-1).tolist() == ids)
        scores = [choice["score"] for choice in row["choices"]]
        assert row["best"] == scores.index(max(scores))
        assert row["usage"]["prompt_tokens"] == len(start) + sum(len(encode(text)) for text in texts)
    assert [row.get("correct") for row in rows] == [rows[0]["best"] == 2, None, rows[2]["best"] == 1, None, None, None]
    assert rows[1]["note"] == 1
    assert "text" not in rows[5]["choices"][0]
    assert jobs.engines[0].stats.cached_tokens > 4 * len(PROMPT) // 2  # choices share what is before them
    assert jobs.summary is not None
    shown = format_summary(jobs.summary)
    assert "accuracy" in shown
    assert "perplexity" in shown
    assert "generated" not in shown
    assert "temperature" not in shown


def test_the_likeliest_continuation_is_greedy(jobs: Jobs, model: Path, encode: Callable[[str], list[int]]) -> None:
    tokenizer = Tokenizer.load(model)
    for prompt in map(str, range(100)):  # until the likeliest byte is a text by itself
        best = int(reference_logits(model, [BOS, *encode(prompt)])[-1].argmax())
        text = tokenizer.decode([[best]])[0]
        if text.strip() and encode(text) == [best]:
            break
    (row,) = jobs([{"prompt": prompt, "choices": [text, f"{text}~~", "zz"]}], "score")
    assert [choice["is_greedy"] for choice in row["choices"]] == [True, False, False]
    assert row["best"] == 0


def test_what_is_wrong_with_a_row_is_said(jobs: Jobs) -> None:
    cases = [
        ({"prompt": "a", "choices": ["b"], "continuation": "c"}, "invalid_value", "`continuation` and `choices`"),
        ({"prompt": "a", "choices": []}, "invalid_value", "`choices` holds 0 texts; allowed: 1 to 1,024"),
        ({"prompt": "a", "choices": ["b", 3]}, "invalid_value", "`choices[1]` is 3"),
        ({"prompt": "a", "choices": ["b", ""]}, "invalid_value", "`choices` holds an empty text"),
        ({"prompt": "a", "choices": ["b"], "answer": 1}, "invalid_value", "`answer` is 1, which names none of the 1"),
        ({"prompt": "a" * 600, "choices": ["b"]}, "prompt_too_long", "602 tokens together, and `max_model_len` is 512"),
        ({"prompt_token_ids": [5]}, "empty_prompt", "the prompt has one token"),
        ({"choices": ["b"]}, "missing_prompt", "none of `prompt`"),
        ({"custom_id": "x", "url": "/v1/completions", "body": {}}, "unsupported_url", "cannot be scored"),
        ({"prompt_token_ids": [5, 999]}, "token_out_of_vocabulary", "`prompt_token_ids` holds 999"),
    ]
    rows = jobs([row for row, _, _ in cases] + [{"prompt": "ab", "continuation": "c"}], "score")
    for (_, kind, message), row in zip(cases, rows, strict=False):
        error = row["error"] if "choices" in row else row["response"]["body"]["error"] | {"type": row["error"]["code"]}
        assert error["type"] == kind
        assert message in error["message"]
    assert [row["choices"] for row in rows if "choices" in row][:-1] == [[]] * 9
    assert rows[-1]["error"] is None


def test_a_text_of_the_full_length_is_scored_and_a_longer_one_cut_where_allowed(jobs: Jobs) -> None:
    rows = [{"prompt": "a" * 511}, {"prompt": "a" * 512}, {"prompt": "a" * 600, "continuation": "b" * 20}]
    found = jobs(rows, "score")
    assert [row["error"] and row["error"]["type"] for row in found] == [None, "prompt_too_long", "prompt_too_long"]
    assert found[0]["choices"][0]["num_tokens"] == 511
    cut = jobs(rows, "score", job={"on_too_long": "truncate-left"}, overwrite=True)
    assert [row["choices"][0]["num_tokens"] for row in cut] == [511, 511, 20]
    assert [row["usage"]["prompt_tokens"] for row in cut] == [512, 512, 512]


def test_a_job_is_continued_and_updated_and_no_other_task_takes_its_output(jobs: Jobs) -> None:
    rows = [{"id": f"r{i}", "prompt": f"{PROMPT} {i}", "choices": ["x", "yy"]} for i in range(6)]
    assert len(jobs(rows, "score", limit=2)) == 2
    whole = jobs(rows, "score")
    assert len(whole) == 6
    assert jobs.engines[1].stats.generated_tokens == 8  # the two choices of four rows
    with pytest.raises(ConfigError, match="made by another job"):
        jobs(rows, "generate")
    rows[3]["choices"] = ["x", "z"]
    updated = jobs(rows, "score", update=True)
    assert jobs.engines[2].stats.generated_tokens == 2
    assert [row["choices"][1]["text"] for row in updated] == ["yy", "yy", "yy", "z", "yy", "yy"]
    assert [row for row in updated if row["index"] != 3] == [row for row in whole if row["index"] != 3]


def test_equal_rows_are_computed_once_and_are_right_each_by_its_own_answer(jobs: Jobs) -> None:
    rows = [{"prompt": PROMPT, "choices": ["x", "yy"], "answer": answer} for answer in (0, 0, 1)]
    found = jobs(rows, "score")
    assert jobs.summary is not None
    assert jobs.summary.counts.rows_deduplicated == 1
    assert found[0]["correct"] == found[1]["correct"] != found[2]["correct"]


def test_prompt_logprobs_are_not_lost_by_a_prefix_hit(
    jobs: Jobs, model: Path, encode: Callable[[str], list[int]]
) -> None:
    sampling = {"max_tokens": 2, "temperature": 0, "n": 2}
    rows: list[dict[str, Any]] = [{"prompt": PROMPT, "sampling": sampling}]
    rows += [{"prompt": PROMPT + end, "sampling": {**sampling, "prompt_logprobs": 2}} for end in (" ", " b")]
    plain, *found = jobs(rows, "generate", max_num_seqs=1)
    assert "prompt_logprobs" not in plain
    for row, given in zip(found, rows[1:], strict=True):
        ids = [BOS, *encode(given["prompt"])]
        expected = reference_logits(model, ids).log_softmax(-1)
        of_prompt = row["prompt_logprobs"]
        assert of_prompt["token_logprobs"][0] is None
        assert of_prompt["top_logprobs"][0] is None
        chosen = expected[range(len(ids) - 1), ids[1:]].tolist()
        assert of_prompt["token_logprobs"][1:] == pytest.approx(chosen, abs=1e-4)
        best = expected[:-1].topk(2).values.tolist()
        for top, values in zip(of_prompt["top_logprobs"][1:], best, strict=True):
            assert max(top.values()) == pytest.approx(values[0], abs=1e-4)
        assert len(of_prompt["tokens"]) == len(ids)
        assert len(row["choices"]) == 2


def test_an_echo_has_the_log_probabilities_of_the_prompt(
    jobs: Jobs, model: Path, encode: Callable[[str], list[int]]
) -> None:
    """They stand before those of each answer, whatever `prompt_logprobs` asks for beside them."""
    sampling = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 1}
    ids = [BOS, *encode(PROMPT)]
    rows: list[dict[str, Any]] = [
        {"prompt": PROMPT, "sampling": {**sampling, "n": 2, "prompt_logprobs": 3}},
        {"prompt": PROMPT, "sampling": {**sampling, "best_of": 2}},
        {"prompt_token_ids": [5], "sampling": sampling},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": PROMPT, **sampling}},
    ]
    plain, ranked, short, openai = jobs(rows, "generate", max_num_seqs=1)
    expected = reference_logits(model, ids).log_softmax(-1)
    chosen, (best, _) = expected[range(len(ids) - 1), ids[1:]].tolist(), expected[:-1].max(-1)
    bodies = [*plain["choices"], *ranked["choices"], *openai["response"]["body"]["choices"]]
    assert len(bodies) == 4
    for choice in bodies:
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")] == [len(ids) + 2] * 3
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(chosen, abs=1e-4)
        assert [max(top.values()) for top in logprobs["top_logprobs"][1 : len(ids)]] == pytest.approx(
            best.tolist(), abs=1e-4
        )
        assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
    assert max(len(top) for top in plain["prompt_logprobs"]["top_logprobs"][1:]) == 3
    assert "prompt_logprobs" not in ranked
    assert ranked["choices"][0]["score"] == pytest.approx(sum(bodies[2]["logprobs"]["token_logprobs"][-2:]) / 2)
    assert len(short["choices"][0]["logprobs"]["tokens"]) == 3
    assert len(bodies[3]["logprobs"]["text_offset"]) == len(ids) + 2


@pytest.fixture(scope="module")
def hidden(model: Path, encode: Callable[[str], list[int]]) -> Callable[[str], Any]:
    """transformers' hidden states of a text, behind the final norm."""
    import torch

    reference = reference_model(model)

    def hidden(text: str) -> Any:
        with torch.inference_mode():
            ids = torch.tensor([[BOS, *encode(text)]])
            return reference(ids, output_hidden_states=True).hidden_states[-1][0].numpy()

    return hidden


@pytest.mark.parametrize(("pooling", "position"), [("last", slice(-1, None)), ("mean", slice(None)), ("cls", slice(1))])
def test_embeddings_are_those_of_transformers(
    jobs: Jobs, hidden: Callable[[str], Any], pooling: str, position: slice
) -> None:
    texts = [PROMPT, "a", PROMPT + " grey" * 30]
    rows = jobs([{"prompt": text} for text in texts], "embed", embed={"pooling": pooling, "normalize": False})
    for text, row in zip(texts, rows, strict=True):
        np.testing.assert_allclose(row["embedding"], hidden(text)[position].mean(axis=0), atol=1e-4)
        assert row["usage"]["prompt_tokens"] == len(text) + 1
        assert "choices" not in row


def test_a_text_of_the_full_length_is_embedded_and_a_longer_one_cut_where_allowed(
    jobs: Jobs, hidden: Callable[[str], Any]
) -> None:
    cut_right: dict[str, Any] = {"job": {"on_too_long": "truncate-right"}}
    texts = ["b" + "a" * 510, "c" + "a" * 510, "a" * 512]
    rows = jobs([{"prompt": text} for text in texts], "embed", embed={"normalize": False})
    assert [row["error"] and row["error"]["type"] for row in rows] == [None, None, "prompt_too_long"]
    cut = jobs([{"prompt": texts[2]}], "embed", name="cut.jsonl", embed={"normalize": False}, **cut_right)
    for text, row in zip(["b" + "a" * 510, "c" + "a" * 510, "a" * 511], [*rows[:2], *cut], strict=True):
        np.testing.assert_allclose(row["embedding"], hidden(text)[-1], atol=1e-4)
        assert row["usage"]["prompt_tokens"] == 512


def test_the_files_of_a_checkpoint_say_how_embeddings_are_made(
    jobs: Jobs, model: Path, hidden: Callable[[str], Any], tmp_path: Path
) -> None:
    """A checkpoint of the decoder alone, as sentence-transformers writes it: no LM head, and no `model.` in names."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "embedder"
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / file).write_text((model / file).read_text().replace("Qwen3ForCausalLM", "Qwen3Model"))
    weights = {name: value for name, value in load_file(model / "model.safetensors").items() if "lm_head" not in name}
    named = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    kinds = {"0": "Transformer", "1": "Pooling", "2": "Normalize"}
    modules = [
        {"idx": int(i), "path": "" if i == "0" else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"query": "q: ", "document": "d: "}
    named = {"prompts": prompts, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(named))
    jobs.model = folder
    request = {"input": PROMPT, "encoding_format": "base64", "dimensions": 8, "model": "m"}
    openai = {"custom_id": "o", "method": "POST", "url": "/v1/embeddings", "body": request}
    native, other = jobs([{"prompt": PROMPT}, openai], "embed", job={"order": "input"})
    mean = hidden(f"d: {PROMPT}").mean(axis=0)
    np.testing.assert_allclose(native["embedding"], mean / np.linalg.norm(mean), atol=1e-4)
    body = other["response"]["body"]
    assert (body["object"], body["model"], body["usage"]["prompt_tokens"]) == ("list", "m", len(PROMPT) + 4)
    found = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, mean[:8] / np.linalg.norm(mean[:8]), atol=1e-4)
    (query,) = jobs([{"prompt": PROMPT}], "embed", name="q.jsonl", embed={"prompt_name": "query", "normalize": False})
    np.testing.assert_allclose(query["embedding"], hidden(f"q: {PROMPT}").mean(axis=0), atol=1e-4)
    with pytest.raises(ConfigError, match=r"\(--prompt-name\) is q, and .* names these: query, document"):
        jobs([{"prompt": PROMPT}], "embed", name="q.jsonl", embed={"prompt_name": "q"})
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(ConfigError, match=r"the mean over texts without the prompt before them \(`include_prompt`"):
        jobs([{"prompt": PROMPT}], "embed", name="q.jsonl")
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name="title")
    with pytest.raises(LoadError, match=r"`default_prompt_name`.* is not among `prompts`: query, document"):
        jobs([{"prompt": PROMPT}], "embed", name="q.jsonl")
    with pytest.raises(ConfigError, match="no LM head"):
        jobs([{"prompt": PROMPT}], "score", name="scores.jsonl")


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows of both ways": (
        "Gemma3Text",
        {"use_bidirectional_attention": True, "sliding_window": 20, "layer_types": [SLIDING, FULL]},
    ),
    "is_causal": ("Llama", {"is_causal": False}),
    "EuroBERT": ("EuroBert", {}),
    "ModernBERT": (
        "ModernBert",
        {"local_attention": 20, "layer_types": [FULL, SLIDING], "rope_parameters": None, "head_dim": None},
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_of_tokens_that_attend_both_ways_are_those_of_transformers(
    jobs: Jobs, encode: Callable[[str], list[int]], name: str, tmp_path: Path
) -> None:
    import torch

    family, settings = ENCODERS[name]
    jobs.model = write_byte_model(tmp_path / "encoder", family=family, is_bare=True, **settings)
    edit_json(jobs.model / "config.json", **settings)  # some versions of transformers write half of the window
    texts = [PROMPT, "a", PROMPT + " grey" * 30, PROMPT]
    rows = jobs([{"prompt": text} for text in texts], "embed", max_model_len=256, max_num_batched_tokens=256)
    reference = reference_model(jobs.model)
    for text, row in zip(texts, rows, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([[BOS, *encode(text)]]))[0][0].mean(dim=0)
        np.testing.assert_allclose(row["embedding"], expected / expected.norm(), atol=1e-5)
    with pytest.raises(ConfigError, match="whose tokens attend to later ones, so that it gives no tokens"):
        jobs([{"prompt": PROMPT}], "generate", name="answers.jsonl")
    with pytest.raises(
        ConfigError, match="computes a prompt of up to 512 tokens in one step: raise it or lower `max_mo"
    ):
        jobs([{"prompt": PROMPT}], "embed", name="long.jsonl")


def test_linear_layers_make_embeddings_of_the_mean(
    jobs: Jobs, model: Path, hidden: Callable[[str], Any], tmp_path: Path
) -> None:
    """A prompt of a causal model is then computed in one step as well. `dimensions` are those of the result."""
    import torch
    from safetensors.torch import save_file

    jobs.model = folder = shutil.copytree(model, tmp_path / "with-dense")
    layers = [torch.nn.Linear(32, 48), torch.nn.Linear(48, 40, bias=False)]
    files = {"1_Pooling": {"pooling_mode": "mean"}}
    for number, (layer, activation) in enumerate(zip(layers, ("Tanh", "Identity"), strict=True), 2):
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
        files[f"{number}_Dense"] = {**sizes, "activation_function": f"torch.nn.modules.linear.{activation}"}
    for name, settings in files.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    modules = [{"path": name, "type": f"sentence_transformers.models.{name[2:]}"} for name in files]
    (folder / "modules.json").write_text(json.dumps(modules))
    save_file(layers[0].state_dict(prefix="linear."), folder / "2_Dense" / "model.safetensors")
    torch.save(layers[1].state_dict(prefix="linear."), folder / "3_Dense" / "pytorch_model.bin")
    texts = [PROMPT, "a", PROMPT + " grey" * 30]
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 256}
    rows = jobs([{"prompt": text} for text in texts], "embed", embed={"dimensions": 36}, **sizes)
    for text, row in zip(texts, rows, strict=True):
        with torch.inference_mode():
            expected = layers[1](layers[0](torch.from_numpy(hidden(text)).mean(0)).tanh())
        np.testing.assert_allclose(row["embedding"], expected[:36], atol=1e-5)
    with pytest.raises(ConfigError, match=r"`embed.dimensions` is 41, and .* gives vectors of 40 numbers"):
        jobs([{"prompt": "a"}], "embed", name="e.jsonl", embed={"dimensions": 41}, **sizes)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its padding is the token for `z`."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    return write_byte_model(folder, id2label={0: "bad", 1: "good", 2: "odd"}, pad_token_id=BYTE_Z)


def test_classes_are_those_of_transformers(
    jobs: Jobs, classifier: Path, encode: Callable[[str], list[int]], tmp_path: Path
) -> None:
    import torch

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": PROMPT}, f"b{PROMPT}"),
        ({"prompt": f"{PROMPT} not zzz", "label": "x"}, f"b{PROMPT} not zzz"),
        ({"messages": chat}, "<u>hi<a>ho"),
        ({"messages": chat[:1], "add_generation_prompt": True}, "<u>hi<a>"),
    ]
    jobs.model = classifier
    rows = jobs([row for row, _ in cases] + [{"prompt": 5}], "classify")
    reference = reference_model(classifier)
    for (_, text), row in zip(cases, rows, strict=False):
        ids = [BOS, *encode(text[1:])] if text.startswith("b") else encode(text)
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0]
        probabilities = logits.softmax(0).tolist()
        assert [each["label"] for each in row["classes"]] == ["bad", "good", "odd"]
        assert [each["logit"] for each in row["classes"]] == pytest.approx(logits.tolist(), abs=1e-4)
        assert [each["probability"] for each in row["classes"]] == pytest.approx(probabilities, abs=1e-4)
        assert (row["label"], row["score"]) == (
            ["bad", "good", "odd"][int(logits.argmax())],
            pytest.approx(max(probabilities), abs=1e-4),
        )
    assert rows[1]["input"] == {"label": "x"}
    assert rows[1]["usage"]["prompt_tokens"] == len(PROMPT) + 6  # without padding at the end
    assert [rows[4][key] for key in ("label", "score", "classes")] == [None, None, []]
    assert rows[4]["error"]["type"] == "invalid_value"
    with pytest.raises(ConfigError, match="gives numbers for classes alone: use `nvcli classify`"):
        jobs([{"prompt": "a"}], "embed", name="e.jsonl")
    with pytest.raises(ConfigError, match="gives numbers for classes alone"):
        run_bench(RunConfig(model=str(classifier)), BenchOptions(), say=print)
    reward = shutil.copytree(classifier, tmp_path / "reward")
    edit_json(reward / "config.json", id2label={"0": "reward"}, problem_type="regression")
    jobs.model = reward
    with pytest.raises(LoadError, match=r"has shape \[3, 32\], .* for \[1, 32\] \(1 classes, by `num_labels`"):
        jobs([cases[0][0]], "classify", name="reward.jsonl")
    edit_weights(reward, lambda weights: weights.update({"score.weight": weights["score.weight"][2:]}))
    (row,) = jobs([cases[0][0]], "classify", name="reward.jsonl")
    of_reward = {"label": "reward", "logit": row["score"], "probability": None}
    assert row["classes"] == [of_reward]
    assert row["score"] == pytest.approx(rows[0]["classes"][2]["logit"], abs=1e-5)


HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a decoder with a prediction head": ("ModernBertDecoder", "", {"classifier_bias": True}),
    "the first token of both ways": ("ModernBert", "", {"norm_bias": True}),
    "the mean of both ways": ("ModernBert", "", {"classifier_pooling": "mean", "classifier_bias": True}),
    "NVIDIA": ("Llama", "LlamaBidirectionalForSequenceClassification", {"pooling": "avg", "temperature": 0.5}),
}


@pytest.mark.parametrize("name", HEADS)
def test_classes_of_other_heads_are_those_of_transformers(
    jobs: Jobs, encode: Callable[[str], list[int]], name: str, tmp_path: Path
) -> None:
    import torch

    family, architecture, settings = HEADS[name]
    shape = {"id2label": {0: "a", 1: "b"}, "pad_token_id": BYTE_Z}
    if not architecture:
        shape |= {"local_attention": 20, "rope_parameters": None, "head_dim": None, "num_key_value_heads": None}
    jobs.model = write_byte_model(tmp_path / "model", family=family, **shape, **settings)
    text = PROMPT + " grey" * 9
    ids = torch.tensor([[BOS, *encode(text)]])
    reference = reference_model(jobs.model)
    with torch.inference_mode():
        if architecture:
            reference.config.is_causal = False  # transformers then attends both ways
            expected = reference.score(reference.model(ids)[0].mean(1))[0] / 0.5
            edit_json(jobs.model / "config.json", architectures=[architecture], **settings)
        else:
            expected = reference(ids).logits[0]
    (row,) = jobs([{"prompt": text}], "classify", max_model_len=256, max_num_batched_tokens=256)
    assert [each["logit"] for each in row["classes"]] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_model_without_classes_classifies_nothing(jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match="which has no classes; use `nvcli score` or `nvcli embed`"):
        jobs([{"prompt": "a"}], "classify")


def test_tables_have_the_columns_of_the_task(jobs: Jobs, classifier: Path) -> None:
    from pyarrow.parquet import read_table

    jobs([{"prompt": "a", "usage": 1, "best": "x"}, {"prompt": 5}], "embed", name="e.parquet")
    (one, failed) = read_table(jobs.folder / "e.parquet").to_pylist()
    assert (one, failed) if one["error"] is None else (failed, one)
    table = read_table(jobs.folder / "e.parquet")
    assert str(table.schema.field("embedding").type) == "list<element: float>"
    assert sorted(len(row["embedding"] or []) for row in table.to_pylist()) == [0, 32]
    jobs([{"prompt": "a", "choices": ["b", "c"]}, {"prompt": 5, "choices": ["b"]}], "score", name="s.parquet")
    table = read_table(jobs.folder / "s.parquet")
    assert sorted(len(row["choices"]) for row in table.to_pylist()) == [0, 2]
    assert str(table.schema.field("best").type) == "int64"
    jobs.model, model = classifier, jobs.model
    assert len(jobs([{"prompt": "a"}, {"prompt": "b"}, {"prompt": 5}], "classify", name="c.parquet", limit=1)) == 0
    jobs([{"prompt": "a"}, {"prompt": "b"}, {"prompt": 5}], "classify", name="c.parquet")
    found = sorted(read_table(jobs.folder / "c.parquet").to_pylist(), key=index_of)
    assert [len(row["classes"] or []) for row in found] == [3, 3, 0]
    assert found[0]["score"] == max(each["probability"] for each in found[0]["classes"])
    assert [row["label"] is None for row in found] == [False, False, True]
    jobs.model = model
    sampling = {"prompt_logprobs": 1, "max_tokens": 1}
    jobs([{"prompt": "ab", "best": 2, "sampling": sampling}], "generate", name="g.parquet")
    (row,) = read_table(jobs.folder / "g.parquet").to_pylist()
    assert row["best"] == 2
    assert row["choices"][0]["finish_reason"] == "length"
    assert len(row["prompt_logprobs"]["tokens"]) == 3
