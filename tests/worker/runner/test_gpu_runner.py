"""A rank on a real GPU: right answers, the CPU's logits and samples, graphs that equal eager steps, planned memory."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import write_tiny_model, write_tiny_qwen3
from nvcli.attention.forward_batch import BatchShape
from nvcli.core.messages import StepInput, pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.kernels.prepare_inputs import prepare_inputs
from nvcli.worker.runner.input_buffers import exact_shape
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_runner, make_scheduler, run_requests
from requests_factory import make_request

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("memory_is_given_back")]

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed"))
    for name, package in {
        "triton": "triton",
        "torch": "torch",
        "flash-attn": "flash_attn",
        "flashinfer": "flashinfer",
    }.items()
]


def generate(
    runner: ModelRunner, prompts: list[list[int]], max_tokens: int, stop_ids: Sequence[int] = (), **sampling: Any
) -> list[list[int]]:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    answers = run_requests(
        runner,
        [
            make_request(i, prompt, max_tokens, sampling=params, stop_ids=list(stop_ids))
            for i, prompt in enumerate(prompts)
        ],
    )
    return [answers[i] for i in range(len(prompts))]


def prompts(count: int = 12, vocab_size: int = 640) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def last_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """[1, V], of the token behind a prompt that is computed in one step."""
    scheduler = make_scheduler(runner)
    scheduler.add([make_request(0, prompt, 1)])
    scheduled = scheduler.schedule()
    assert scheduled is not None
    step, buffers = scheduled.input, runner.buffers
    batch = buffers.batch(exact_shape(step), 1, runner.kv_cache, runner.backend, needs_all_logits=False)
    batch = buffers.stage(step, batch)
    runner.backend.plan(batch.forward)
    runner.slots.apply(step)
    buffers.load(batch)
    prepare_inputs(batch.rows, runner.slots.state, batch.inputs)
    runner.backend.plan_on_device(batch.forward)
    hidden = runner.model.forward(batch.forward)
    assert isinstance(hidden, torch.Tensor)
    return runner.model.compute_logits(hidden).float().cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_built_in_model_answers_right(backend: str, enforce_eager: bool) -> None:
    """Held-out questions on every backend; greedy, so that each answer is right or wrong."""
    import random

    from transformers import AutoTokenizer

    from demo_tasks import raw_prompt, sample

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    rng = random.Random(1)
    examples = [sample(rng, split="heldout") for _ in range(40)]
    runner = make_runner(
        demo_path(),
        attention_backend=backend,
        enforce_eager=enforce_eager,
        block_size=256,
        max_model_len=1024,
        max_num_batched_tokens=300,
    )
    answers = generate(runner, [tokenizer.encode(raw_prompt(e)) for e in examples], 420 if backend != "torch" else 100)
    texts = [tokenizer.decode(ids[: ids.index(0)] if 0 in ids else ids) for ids in answers]
    right = [
        text.strip() == e.answer
        for text, e in zip(texts, examples, strict=True)
        if backend != "torch" or e.task != "count"
    ]
    assert sum(right) >= 0.97 * len(right)


def test_graph_equals_eager_bit_for_bit() -> None:
    runner = make_runner(demo_path())
    scheduler = make_scheduler(runner)
    sampling = SamplingParams(temperature=0.8)
    scheduler.add(make_request(i, prompt, 50, sampling=sampling) for i, prompt in enumerate(prompts(8)))
    for _ in range(6):
        step = scheduler.schedule()
        assert step is not None
        pending = runner.launch(step.input)
        assert pending is not None
        scheduler.process(step, pending.result())
    state, steps = runner.slots.state, runner.steps
    graphs = steps.graphs
    assert graphs is not None
    with torch.inference_mode():
        lens = (state.lengths[:8] + 1).tolist()
        ones = pack([1] * 8)
        decode = StepInput(
            step_id=99, slots=pack(range(8)), num_tokens=ones, num_logits=ones, seq_lens=pack(lens), num_decodes=8
        )
        shape = graphs.padded_shape(exact_shape(decode))
        assert shape is not None
        saved = state.lengths.clone(), state.token_ids.clone()
        batch = runner.buffers.stage(decode, steps._padded_batch(shape))
        runner.backend.plan(batch.forward)
        runner.buffers.load(batch)
        graph = graphs.replay(shape)
        logits, ids = graph.logits.clone(), graph.ids.clone()  # type: ignore[union-attr]
        state.lengths.copy_(saved[0])
        state.token_ids.copy_(saved[1])
        runner.backend.plan(batch.forward)
        eager = steps.run_padded(shape)
        assert torch.equal(logits, eager.logits)  # type: ignore[union-attr]
        assert torch.equal(ids, eager.ids)  # type: ignore[union-attr]


def test_padding_leaves_real_slots_alone() -> None:
    """Any number of requests up to max_num_seqs, also those between captured sizes, answers as alone. In float32: how
    many rows a matrix product has changes its rounding, and in bf16 that tips a choice now and then."""
    torch.backends.cuda.matmul.allow_tf32 = False
    runner = make_runner(demo_path(), max_num_seqs=21, dtype="float32")
    some = prompts(21)
    together = generate(runner, some, 30)
    for count in (1, 3, 9, 19):
        assert generate(runner, some[:count], 30) == together[:count]


def test_mixed_graphs_answer_right() -> None:
    """Requests that come and go beside running ones: most mixed steps are graphs, and the answers stay right."""
    import random

    from transformers import AutoTokenizer

    from demo_tasks import raw_prompt, sample

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    rng = random.Random(5)
    examples = [
        sample(rng, task, split="heldout") for task in ("add", "lookup", "reverse", "repeat") for _ in range(30)
    ]
    rng.shuffle(examples)
    asked = [tokenizer.encode(raw_prompt(example)) for example in examples]
    runner = make_runner(demo_path(), max_model_len=1024, max_num_batched_tokens=2048, max_num_seqs=16)
    graphs = runner.steps.graphs
    assert graphs is not None
    replay, replayed = graphs.replay, []

    def counted(shape: BatchShape) -> Any:
        if shape.prefill_rows:
            replayed.append(shape)
        return replay(shape)

    graphs.replay = counted  # type: ignore[method-assign]
    for sampling in ({}, {"temperature": 0.1, "top_k": 5, "repetition_penalty": 1.0001}):
        replayed.clear()
        answers = generate(runner, asked, 200, stop_ids=[0], **sampling)
        texts = [tokenizer.decode(ids[: ids.index(0)] if 0 in ids else ids).strip() for ids in answers]
        right = sum(text == example.answer for text, example in zip(texts, examples, strict=True))
        assert right >= 0.97 * len(examples)
        assert len(replayed) > 10


def test_sampled_answers_with_every_parameter_equal_the_cpus(tmp_path: Path) -> None:
    """float32 on both: the random numbers are the same bits, so the tokens are the same."""
    path = write_tiny_qwen3(tmp_path / "tiny", head_dim=64)
    gpu = make_runner(path, dtype="float32", attention_backend="triton")
    cpu = make_runner(path, device="cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    some = prompts(8, vocab_size=97)
    same = total = 0
    for sampling in (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.02, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 5, "logit_bias": {7: 3.0}},
    ):
        for ours, theirs in zip(generate(gpu, some, 20, **sampling), generate(cpu, some, 20, **sampling), strict=True):
            same += ours == theirs
            total += 1
    assert same >= total - 1  # rounding may tip one


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "Mistral", "sliding_window": 48},
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2},
    ],
    ids=["mistral", "qwen3, window in some layers"],
)
def test_windows_give_the_cpus_answers(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Prompts and answers far longer than the window, in float32: chunks, decode rows and graphs of the triton backend
    against the torch backend on the CPU."""
    path = write_tiny_model(tmp_path / "tiny", **{"family": "Qwen3", "head_dim": 64, **settings})
    torch.backends.cuda.matmul.allow_tf32 = False
    options = {"block_size": 16, "max_num_batched_tokens": 96}
    gpu = make_runner(path, dtype="float32", attention_backend="triton", **options)
    assert gpu.steps.graphs is not None
    cpu = make_runner(path, device="cpu", **options)
    assert any(group.window is not None for group in gpu.ready.kv_groups)
    some = prompts(8, vocab_size=97)
    assert generate(gpu, some, 60) == generate(cpu, some, 60)


@pytest.fixture(scope="module")
def random_06b(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], torch.Tensor]:
    """(a checkpoint, a prompt, the CPU's logits for it in float32)."""
    shape: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    path = write_tiny_qwen3(tmp_path_factory.mktemp("models") / "0.6b", **shape)
    prompt = prompts(1, vocab_size=150_000)[0] + list(range(1000, 1100))
    return path, prompt, last_logits(make_runner(path, device="cpu"), prompt)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_06b_logits_match_the_cpus(backend: str, random_06b: tuple[Path, list[int], torch.Tensor]) -> None:
    path, prompt, reference = random_06b
    logits = last_logits(make_runner(path, attention_backend=backend, block_size=256), prompt)
    assert (logits - reference).norm() / reference.norm() < 0.05
    assert (logits.argmax(-1) == reference.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen3-14b"])
def test_memory_is_used_as_planned(tmp_path: Path, name: str) -> None:
    """Planned against used within 2 % of the device, at the default settings of a run, long prompts included."""
    from nvcli.tools.bench.shapes import write_shape

    runner = make_runner(
        write_shape(name, tmp_path),
        load_format="dummy",
        max_model_len=40960,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.9,
        kv_cache_memory=None,
    )
    generate(runner, [list(range(5, 32_005)), list(range(7, 8_007)), *prompts(200)], 8)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    used, plan = total - free, runner.memory_plan
    report = f"used {used}, {reserved} of it torch's allocator's, with {held} in use; planned: {plan}"
    print(report)
    del runner  # which a failure's traceback would keep in memory
    assert abs(used - plan.budget) < 0.02 * total, report
