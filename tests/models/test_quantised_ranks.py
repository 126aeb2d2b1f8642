"""Quantised models that are cut over two ranks give the logits of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batches import RequestState
from checkpoints import reference_logits, write_tiny_model
from model_driver import ModelDriver
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from quantised_checkpoints import FORMATS, fp8_blocks, write_quantised
from tensor_parallel_ranks import run_ranks

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
IDS = list(range(2, 32))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(quantised, plain) by format."""
    folder = tmp_path_factory.mktemp("models")
    original = write_tiny_model(folder / "original", head_dim=64, **SIZES)
    formats = {"blocks": fp8_blocks((128, 128)), "gptq": FORMATS["gptq, act-order"]}
    return {name: write_quantised(original, folder / name, one) for name, one in formats.items()}


def logits(path: Path, group: TensorParallelGroup | None = None, *, keeps_fp8: bool) -> list[torch.Tensor]:
    """Of a prompt in two chunks; nothing on ranks other than 0."""
    driver = ModelDriver(path, group=group, quantization="fp8" if keeps_fp8 else "none")
    request = RequestState()
    return [part for ids in (IDS[:20], IDS[20:]) for part in driver.step((request, ids))]


def run_rank(group: TensorParallelGroup, paths: list[Path]) -> list[list[torch.Tensor]]:
    return [logits(path, group, keeps_fp8=kept) for path, kept in zip(paths, (False, True, True), strict=True)]


def test_two_ranks_give_the_logits_of_one(checkpoints: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Plain numbers give the same; activations with a scale for each 128 numbers too, as long as no sum falls on the
    other side of a rounding. A rank's part of a row has a scale of its own, so those of whole rows only come near."""
    gptq, blocks, plain = checkpoints["gptq"][0], checkpoints["blocks"][0], checkpoints["blocks"][1]
    ranks = run_ranks(2, run_rank, tmp_path, [gptq, blocks, plain])
    decoded, in_blocks, in_rows = (torch.cat(one) for one in ranks[0])
    torch.testing.assert_close(decoded, reference_logits(checkpoints["gptq"][1], IDS), atol=2e-4, rtol=1e-4)
    exact = reference_logits(plain, IDS)
    for found, path, share in ((in_blocks, blocks, 0.1), (in_rows, plain, 1.0)):
        alone = torch.cat(logits(path, keeps_fp8=True))
        assert (found - alone).abs().mean() <= share * (alone - exact).abs().mean()
        assert (found - exact).abs().mean() < 0.2 * exact.std()
