"""An LLM on a real GPU gives its memory back, and answers as before when it has it again, with the same graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvcli.demo import demo_path
from nvcli.llm.llm import LLM

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def ask(llm: LLM) -> list[list[int]]:
    sampling = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    prompts = [[5 + (7 * row + place * place) % 500 for place in range(20 + row)] for row in range(40)]
    return [answer["choices"][0]["token_ids"] for answer in llm.generate(prompts, sampling=sampling)]


def used() -> int:
    """Memory in use on the first GPU."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The built-in model with other weights."""
    for file in demo_path().iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    weights = load_file(demo_path() / "model.safetensors")
    noisy = {name: (value.float() + 0.1 * torch.randn(value.shape)).to(value.dtype) for name, value in weights.items()}
    save_file(noisy, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_goes_and_comes_back(other: Path, num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    torch.zeros(1, device="cuda")  # this process's own context
    before = used()
    settings = {"max_model_len": 2048, "max_num_seqs": 256, "kv_cache_memory": "1GiB", "batch_invariant": True}
    with LLM("demo", tp=num_ranks, **settings) as llm:
        awake, first = used(), ask(llm)
        assert awake - before > 0.8 * GIB
        for level in (1, 2):
            llm.sleep(level)  # type: ignore[arg-type]
            asleep = used()
            print(f"level {level}: {(awake - before) / GIB:.2f} GiB awake, {(asleep - before) / GIB:.2f} GiB asleep")
            assert awake - asleep >= 0.8 * GIB
            assert asleep - before < (1 + num_ranks / 2) * GIB  # contexts, kernels, graphs and NCCL's buffers
            llm.wake()
            assert abs(used() - awake) < GIB // 2
            assert ask(llm) == first
        llm.load_weights(other)
        second = ask(llm)
        assert second != first
        llm.sleep(2)
        llm.wake()
        assert ask(llm) == second
        llm.load_weights(demo_path())
        assert ask(llm) == first
