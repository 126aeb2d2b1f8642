"""Drives a model over a KV cache by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from batches import Blocks, RequestState, make_batch
from nvcli.attention.backend import AttentionCase
from nvcli.attention.image_tokens import ImageTokens
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.attention.selection import select_backend
from nvcli.attention.whole_images import WholeImage, plan_both_ways
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.lora import group_rows
from nvcli.kernels.lora_types import BatchAdapters
from nvcli.models.adapter_bank import LoadedAdapters
from nvcli.models.adapters.adapter import Adapter, read_adapter
from nvcli.models.adapters.row_adapters import check_row_adapter
from nvcli.models.causal_lm import CausalLM
from nvcli.models.config import load_model_config
from nvcli.models.draft_heads.own_files import with_draft_head
from nvcli.models.kv_groups import kv_groups
from nvcli.models.loader import begin_reading, find_weights, materialize
from nvcli.models.registry import build_model
from nvcli.models.stored_tensors import with_stored_tensors
from nvcli.worker.distributed.stage import WHOLE, Stage
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

CPU = torch.device("cpu")


def load_weights(
    model: CausalLM,
    path: Path,
    device: torch.device = CPU,
    *,
    adapter: Adapter | None = None,
    has_own_head: bool = False,
    say: Callable[[str], object] = lambda note: None,
) -> int:
    """Fill `model` from the checkpoint folder `path`, and return the bytes of this rank's parameters."""
    weights = find_weights(model, path, adapter=adapter, has_own_head=has_own_head)
    for note in weights.notes:
        say(note)
    materialize(model, device)
    begin_reading(model, weights)()
    return sum(model.weight_bytes().values())


class ModelDriver:
    """A loaded model with a cache. `step` gives the logits of every computed token."""

    def __init__(
        self,
        path: Path,
        *,
        block_size: int = 4,
        num_blocks: int = 512,
        group: TensorParallelGroup | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
        stage: Stage = WHOLE,
        max_positions: int | None = None,
        expert_parallel: bool = False,
        quantization: KeptWeights = "none",
        has_fp8_units: bool = True,
        lora: Path | None = None,
        row_loras: Sequence[Path] = (),
        has_mtp: bool = False,
        draft_head: Path | None = None,
        has_tower: bool = False,
    ) -> None:
        """`lora` is merged into the weights; requests choose among `row_loras`. `has_mtp`: with the head for
        multi-token prediction; `draft_head`: with the head in this folder."""
        config = with_stored_tensors(load_model_config(path, expert_parallel=expert_parallel), path)
        adapter = None if lora is None else read_adapter(lora, config)
        config = (config if adapter is None else adapter.adapt(config)).with_quantization(quantization)
        config = config.with_mtp() if has_mtp else config
        config = config.with_tower() if has_tower else config
        config = config if draft_head is None else with_draft_head(config, str(draft_head))
        self.group = group or TensorParallelGroup.single()
        self.model = build_model(
            config,
            self.group,
            dtype,
            stage=stage,
            max_positions=max_positions,
            has_fp8_units=has_fp8_units,
            has_adapters=bool(row_loras),
        )
        self.notes: list[str] = []
        self.num_bytes = load_weights(self.model, path, device, adapter=adapter, say=self.notes.append)
        if row_loras:
            adapters = {number: read_adapter(folder, config) for number, folder in enumerate(row_loras, 1)}
            for one in adapters.values():
                check_row_adapter(one, config)
            loaded = LoadedAdapters(self.model, adapters, dtype, max_host_bytes=0)
            loaded.make_places(len(row_loras))
            problems = [loaded.load(number, number) for number in range(1, len(row_loras) + 1)]
            assert problems == [None] * len(row_loras)
        groups = kv_groups(config, stage)
        group_layers = tuple(group.layers for group in groups)
        cache_spec = KVCacheSpec.of_layers(
            self.model.cache_layers, group_layers, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype
        )
        self.kv_cache = KVCache(cache_spec, num_blocks, device)
        self.blocks = Blocks(num_blocks, {number: group.span for number, group in enumerate(groups) if group.span > 1})
        case = AttentionCase(
            device=device,
            dtype=dtype,
            specs=self.model.attention_kinds,
            block_size=block_size,
            kv_dtype=kv_dtype,
        )
        self.backend, _ = select_backend("torch", case)

    @torch.inference_mode()
    def step(
        self,
        *work: tuple[RequestState, list[int]],
        adapters: Sequence[int] = (),
        images: ImageTokens | None = None,
        whole_images: Sequence[WholeImage] = (),
        angle_positions: Tensor | None = None,
    ) -> list[Tensor]:
        """Logits [tokens, vocab_size] of each request; empty on ranks that get none. `adapters`: the number of each
        request's adapter among `row_loras`, from 1; 0: it has none."""
        batch = make_batch(list(work), self.kv_cache, self.backend, self.blocks)
        if adapters:
            lens = torch.tensor([len(tokens) for _, tokens in work])
            rows = group_rows(torch.tensor(adapters, dtype=torch.int32).repeat_interleave(lens), max(adapters))
            batch = replace(batch, adapters=BatchAdapters(rows, rows))
        if images is not None and whole_images:
            vision = self.model.config.vision
            assert vision is not None
            specs = (spec for spec in self.model.attention_kinds if vision.is_whole_in(spec.window))
            kinds = [(spec.window, spec.kv_group) for spec in specs]
            images = replace(images, whole=plan_both_ways(whole_images, kinds, batch))
        hidden = self.model(replace(batch, images=images, angle_positions=angle_positions))
        shard = self.model.compute_logits(hidden)
        logits = self.group.gather(shard)
        if logits is None:
            return []
        logits = logits[:, : self.model.config.vocab_size]
        assert logits.shape == (batch.num_tokens, self.model.config.vocab_size)
        return list(logits.split([len(tokens) for _, tokens in work])) if work else []
