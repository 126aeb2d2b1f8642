"""Random EAGLE-3 heads for small models, written as published checkpoints have them, and their published arithmetic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_head import Eagle3Head, HeadShape, Keys
from nvcli.models.config import load_model_config


def write_head(
    folder: Path,
    target: Path,
    *,
    layout: str = "SafeAILab",
    layers: Sequence[int] | None = None,
    draft_ids: Sequence[int] | None = None,
    has_embedding: bool = True,
    has_lm_head: bool = True,
    seed: int = 5,
    config: dict[str, Any] | None = None,
    **shape: Any,
) -> Eagle3Head:
    """Write a random head for the model in `target`. `layout`: SafeAILab or speculators; `layers`: those whose inputs
    it reads; `draft_ids`: the tokens that it drafts (None: all); `shape`: fields of `HeadShape`; `config`: keys of
    config.json. Parts that the head lacks are the target's in what is returned."""
    model = load_model_config(target)
    size = {
        "hidden_size": model.hidden_size,
        "target_hidden_size": model.hidden_size,
        "num_states": 3 if layers is None else len(layers),
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": model.vocab_size if draft_ids is None else len(draft_ids),
        **shape,
    }
    head = Eagle3Head(HeadShape(**size)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.2
            parameter.copy_(noise * scale + (1.0 if "norm" in name else 0.0))
    tensors = {name: tensor.detach().clone() for name, tensor in head.named_parameters()}
    _share(head, target, tensors, has_embedding=has_embedding, has_lm_head=has_lm_head)
    if draft_ids is not None:
        ids = torch.tensor(draft_ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**_config(head.shape, layout, layers), **(config or {})}))
    return head


def _share(
    head: Eagle3Head, target: Path, tensors: dict[str, Tensor], *, has_embedding: bool, has_lm_head: bool
) -> None:
    """Give a head parts of its target, and take them out of what is written."""
    from safetensors.torch import load_file

    files = load_file(target / "model.safetensors")
    parts = {"embed_tokens": ("model.embed_tokens", has_embedding), "lm_head": ("lm_head", has_lm_head)}
    for name, (of_target, is_own) in parts.items():
        if not is_own:
            del tensors[f"{name}.weight"]
            weight = files.get(f"{of_target}.weight", files["model.embed_tokens.weight"])
            getattr(head, name).weight.data.copy_(weight)


def _config(shape: HeadShape, layout: str, layers: Sequence[int] | None) -> dict[str, Any]:
    layer = shape.layer_config()
    flags = {key: getattr(shape, key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    own: dict[str, Any] = {"draft_vocab_size": shape.draft_vocab_size, **flags}
    if shape.target_hidden_size != shape.hidden_size:
        own["target_hidden_size"] = shape.target_hidden_size
    if layout == "speculators":
        listed = {} if layers is None else {"eagle_aux_hidden_state_layer_ids": list(layers)}
        kind = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        return {**kind, **own, **listed, "transformer_layer_config": layer}
    listed = {} if layers is None else {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in layers]}
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own, "eagle_config": listed}


@torch.inference_mode()
def published_logits(
    head: Eagle3Head, target: Path, ids: Sequence[int], layers: Sequence[int], draft_ids: Sequence[int] | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Return a head's logits at all positions but the last, and those of a further pass behind them, over the target's
    vocabulary with -inf for tokens that it does not draft: [length - 1, V], [1, V], and the token of the further
    pass."""
    from checkpoints import reference_model

    model = reference_model(target)
    tokens = torch.tensor([list(ids)])
    hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states
    states = head.combine(torch.cat([hidden[number] for number in layers], -1))[:, :-1]
    positions = torch.arange(len(ids) - 1)[None]
    logits, fed, _ = head(tokens[:, 1:], states, positions, [])
    spread = _spread(logits[0], head, draft_ids)
    guess = spread[-1].argmax()[None, None]
    # The second pass attends to the keys of the target's states, and to its own.
    together = torch.cat([tokens[:, 1:], guess], 1), torch.cat([states, fed[:, -1:]], 1)
    further, _, _ = head(*together, torch.arange(len(ids))[None], list[Keys]())
    return spread, _spread(further[0, -1:], head, draft_ids), guess[0].tolist()


def _spread(logits: Tensor, head: Eagle3Head, draft_ids: Sequence[int] | None) -> Tensor:
    spread = logits.new_full((len(logits), head.shape.vocab_size), -torch.inf)
    spread[:, list(range(head.shape.vocab_size) if draft_ids is None else draft_ids)] = logits
    return spread
