"""Heads for multi-token prediction compute what transformers' `MtpLayer` does around the family's own layer: over a
prompt in chunks, and one pass further from the head's own state; on two ranks too."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import RequestState, make_batch
from checkpoints import reference_model, write_tiny_model
from family_shapes import SHAPES
from model_driver import ModelDriver
from mtp_heads import add_mtp_head, stored_name
from nvcli.errors import ConfigError
from nvcli.models.config import load_model_config
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from tensor_parallel_ranks import run_ranks

IDS = random.Random(3).choices(range(97), k=41)
FAMILIES = ("qwen 3-next", "qwen 3.5 with vision", "glm 4.5", "deepseek v3", "glm 4.7 flash", "longcat-flash")
FAMILIES += ("deepseek v3.2", "mimo v2 flash", "ling 3")
_OF_LAYER = {"mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.", "mtp.fc.": "eh_proj."}
_OF_LAYER |= {"mtp.norm.": "post_norm.", "mtp.layers.0.": "mtp_block."}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = SHAPES[request.param]
    path = write_tiny_model(tmp_path_factory.mktemp("mtp") / "model", family, **overrides)
    return add_mtp_head(path)


def reference_logits(path: Path) -> tuple[Tensor, Tensor]:
    """Return the logits of transformers' head at all positions of the prompt, [length - 1, vocab_size], and those of a
    further pass, [1, vocab_size]."""
    from transformers.modeling_layers import MtpLayer

    model = reference_model(path)
    decoder = model.get_decoder()
    numbers = range(len(decoder.layers))
    last = next(number for number in reversed(numbers) if hasattr(decoder.layers[number], "self_attn"))
    window, of_kind = len(IDS), ()
    if "MiMo" in type(model).__name__:  # its head has a window, and no experts
        last, window, of_kind = 1, decoder.config.sliding_window, ("sliding_attention",)
    norm_class = type(decoder.norm)
    of_layer = HalfLayer if "Longcat" in type(model).__name__ else type(decoder.layers[last])
    layer = MtpLayer(decoder.config, of_layer, norm_class, last).eval()
    layer.load_state_dict(head_weights(path, layer.state_dict()))
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        states = decoder(ids).last_hidden_state[:, :-1]

        def run(tokens: Tensor, states: Tensor) -> Tensor:
            positions = torch.arange(tokens.shape[1])[None]
            unseen = torch.full((tokens.shape[1],) * 2, float("-inf"))
            mask = (unseen.triu(1) + unseen.tril(-window))[None, None]
            has_axes = hasattr(decoder.rotary_emb, "mrope_section")
            angles = decoder.rotary_emb(states, positions.expand(3, 1, -1) if has_axes else positions, *of_kind)
            embeddings = model.get_input_embeddings()(tokens)
            result: Tensor = layer(embeddings, states, angles, mask, positions, None)
            return result

        hidden = run(ids[:, 1:], states)
        logits = model.lm_head(hidden)[0]
        guess = logits[-1:].argmax(-1)[None]
        further = run(torch.cat([ids[:, 1:], guess], 1), torch.cat([states, hidden[:, -1:]], 1))
        return logits, model.lm_head(further[:, -1])


class HalfLayer(nn.Module):
    """The layer of LongCat-Flash's head: one of the two halves of a layer, without experts."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        from transformers.models.longcat_flash import modeling_longcat_flash as published

        self.self_attn = published.LongcatFlashMLA(config, number)
        self.mlp = published.LongcatFlashMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            published.LongcatFlashRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, **settings: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **settings)[0]
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


def head_weights(path: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the head's weights under the names of `MtpLayer`, which stacks experts."""
    from safetensors.torch import load_file

    config = load_model_config(path)
    files = load_file(path / "model.safetensors")

    def find(name: str) -> Tensor:
        for stored, own in _OF_LAYER.items():
            if name.startswith(own):
                return files[stored_name(name.replace(own, stored), config)]
        raise KeyError(name)

    found = {}
    for name, tensor in wanted.items():
        parent, is_stack, last = name.partition(".experts.")
        if not is_stack:
            found[name] = find(name)
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        experts = range(len(tensor))
        found[name] = torch.stack(
            [torch.cat([find(f"{parent}.experts.{number}.{part}.weight") for part in parts]) for number in experts]
        )
    return found


def head_logits(path: Path, group: TensorParallelGroup | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return what `reference_logits` does, of this program's head; None on ranks that get no logits."""
    driver = ModelDriver(path, has_mtp=True, group=group)
    model, request = driver.model, RequestState()
    assert model.draft_head is not None
    head, parts = model.draft_head, []
    states = torch.empty(0)
    with torch.inference_mode():
        for start, end in ((0, 7), (7, 8), (8, len(IDS) - 1)):
            batch = make_batch([(request, IDS[start:end])], driver.kv_cache, driver.backend, driver.blocks)
            _, states = model.forward_with_states(batch)
            hidden, states = head(torch.tensor(IDS[start + 1 : end + 1]), head.read(states), batch, None)
            parts.append(driver.group.gather(head.compute_logits(hidden)))
        guess = [0] if parts[-1] is None else parts[-1][-1:, :97].argmax(-1).tolist()
        guess = driver.group.broadcast(torch.tensor(guess)).tolist()
        batch = make_batch([(request, guess)], driver.kv_cache, driver.backend, driver.blocks)
        hidden, _ = head(torch.tensor(guess), states[-1:], batch, torch.tensor([0]))
        further = driver.group.gather(head.compute_logits(hidden))
    if further is None:
        return None, None
    return torch.cat([part[:, :97] for part in parts if part is not None]), further[:, :97]


def test_logits(checkpoint: Path, tmp_path: Path) -> None:
    if not hasattr(import_module("transformers.modeling_layers"), "MtpLayer"):
        pytest.skip("this version of transformers has no MtpLayer")
    expected, further = reference_logits(checkpoint)
    results: list[Any] = [head_logits(checkpoint), run_ranks(2, head_logits_of_rank, tmp_path, checkpoint)[0]]
    for found, found_further in results:
        torch.testing.assert_close(found, expected, atol=3e-3, rtol=1e-3)  # delta nets enlarge rounding
        torch.testing.assert_close(found_further, further, atol=3e-3, rtol=1e-3)
    assert expected.std() > 0.3


def head_logits_of_rank(group: TensorParallelGroup, path: Path) -> tuple[Tensor | None, Tensor | None]:
    return head_logits(path, group)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(tmp_path))
    with pytest.raises(ConfigError, match="no head for multi-token prediction"):
        config.with_mtp()
