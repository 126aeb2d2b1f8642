#!/usr/bin/env python3
"""Compiles the kernels that runs launch, for GPUs that need not be there.

    python3 scripts/compile_kernels.py [--gpu 80,90,100] [--model NAME,…] [--kernel PATTERN] [--threads N]

Models of several kinds are started on an imagined GPU (`imagined_gpu.py`), up to where a first start compiles its
kernels; what it launches there is compiled and not run, and so is what only some rows and several ranks launch. The
Triton that is imported compiles: put another one first in PYTHONPATH (with 3.9 set TRITON_DEFAULT_FP_FUSION=1).

A line for each kernel says how many variants were compiled, the most registers of a thread, the most bytes of its
stack, on which spilled registers lie, the most bytes of shared memory, and the seconds that compiling took, which are
few where Triton's cache has the kernel. Kernels that nothing here launched are named. The exit code is 1 if one cannot
be compiled, or needs more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch
import triton
from triton import knobs
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

import nvcli.kernels.triton as kernels
from imagined_gpu import CARDS, imagined_gpu
from nvcli.core.config import RunConfig
from nvcli.core.lora_config import PAGE_RANKS
from nvcli.core.messages import SlotSampling
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.errors import NvcliError, first_line
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines
from nvcli.kernels import candidates, embedding, experts, fp4_rows, fp8, late_masks, lora, low_rank_merge, token_mask
from nvcli.kernels.fp8_types import LowRankSum
from nvcli.kernels.lora_types import BLOCK_FIELDS, AdaptedLayer, AdapterBank, feature_blocks, page_columns
from nvcli.kernels.peer_memory import PeerLayout, PeerMemory
from nvcli.kernels.triton.launch.compile_ahead import Placeholder
from nvcli.models.adapter_bank import BLOCK_FEATURES
from nvcli.tools.bench.shapes import model_folder
from nvcli.worker.runner import model_runner, rank_weights
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from nvcli.worker.runner.warm_up import WarmUp

_PHI_MOE = {
    "architectures": ["PhimoeForCausalLM"],
    "attention_bias": True,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "num_local_experts": 16,
}
_FEW_EXPERTS = {"n_routed_experts": 16, "num_hidden_layers": 4}
_GGUF = {
    "quant_method": "gguf_affine",
    "type": "Q4_K",
    "bits": 4,
    "lm_head": True,
    "modules_in_8_bits": ["model.layers.1", "model.layers.2", "model.embed_tokens"],
    "modules_in_groups_of_16": ["model.layers.2", "model.embed_tokens"],
}
_LIGHTNING = {"architectures": ["MiniMaxForCausalLM"], "num_hidden_layers": 4}
_LING = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "expert_swiglu_limit_list": [0, 0, 0, 0, 0, 7],
    "head_dim": 128,
    "num_experts": 32,
    "num_hidden_layers": 6,
    "share_expert_swiglu_limit_list": [0, 0, 0, 0, 16, 16],
}
_INKLING = {
    "architectures": ["InklingForCausalLM"],
    "dense_mlp_idx": 2,
    "head_dim": 128,
    "hidden_size": 6144,
    "log_scaling_n_floor": 128_000,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 16,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 6,
    "sliding_window_size": 512,
}
_MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "head_dim": 192,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 16,
    "num_hidden_layers": 6,
    "sliding_window": 128,
    "v_head_dim": 128,
}
_MINIMAX_M3 = {
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "dense_intermediate_size": 12288,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_local_experts": 16,
    "rotary_dim": 64,
    "shared_intermediate_size": 3072,
}
_MISTRAL_LARGE4 = {
    **_FEW_EXPERTS,
    "architectures": ["MistralLarge4ForConditionalGeneration"],
    "first_k_dense_replace": 1,
    "index_n_heads": 32,
    "kv_source_layers": [0, 1, 2, 2],
    "n_group": 1,
    "no_rope_layers": [1, 1, 0, 0],
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "qk_nope_head_dim": 64,
    "rope_scaling": None,
}
_OLMO_HYBRID = {
    "architectures": ["OlmoHybridForCausalLM"],
    "hidden_size": 3840,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 96,
    "linear_num_key_heads": 30,
    "linear_num_value_heads": 30,
    "linear_value_head_dim": 192,
    "num_attention_heads": 30,
    "num_key_value_heads": 30,
    "rope_theta": None,
}
_QWEN4 = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "indexer_head_dim": 128,
    "indexer_n_heads": 16,
    "ngram_vocab_size_base": 20_000,
    "num_experts": 32,
    "num_hidden_layers": 4,
    "ple_layer_ids": [2],
}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("qwen3-0.6b", {}),
    "0.6B in float32": ("qwen3-0.6b", {"dtype": "float32"}),
    "8B": ("qwen3-8b", {}),
    "8B in FP8": ("qwen3-8b", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "8B in FP8 with fast sums": ("qwen3-8b", {"quantization": "fp8", "fp8_accumulation": "fast"}),
    "8B in 4 bits": ("qwen3-8b", {"quantization": "w4a16"}),
    "tied 8B in GGUF": (
        "qwen3-8b",
        {"quantization": "w4a16", "hf_overrides": {"quantization_config": _GGUF, "tie_word_embeddings": True}},
    ),
    "8B batch-invariant": ("qwen3-8b", {"batch_invariant": True}),
    "8B with drafts": ("qwen3-8b", {"speculation": SpeculationConfig(method="lookup")}),
    "30B-A3B": ("qwen3-30b-a3b", {}),
    "30B-A3B in FP8": ("qwen3-30b-a3b", {"quantization": "fp8"}),
    "gpt-oss in FP8": ("gpt-oss-20b", {"quantization": "fp8"}),
    "gpt-oss in 4 bits": ("gpt-oss-20b", {"quantization": "w4a16"}),
    "gpt-oss in 4 bits and FP8": ("gpt-oss-20b", {"quantization": "w4a8"}),
    "Phi-3.5-MoE": ("mixtral-8x7b", {"hf_overrides": _PHI_MOE}),
    "DeepSeek-V2-Lite": ("deepseek-v2-lite", {}),
    "DeepSeek-V2-Lite with an FP8 cache": ("deepseek-v2-lite", {"kv_cache_dtype": "fp8"}),
    "DeepSeek-V2-Lite batch-invariant": ("deepseek-v2-lite", {"batch_invariant": True}),
    "DeepSeek-V3.2": ("deepseek-v3.2", {"hf_overrides": _FEW_EXPERTS}),
    "DeepSeek-V4-Flash with drafts": (
        "deepseek-v4-flash",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _FEW_EXPERTS | {"num_hidden_layers": 4}},
    ),
    "GLM-5 with drafts": ("glm-5", {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _FEW_EXPERTS}),
    "Hunyuan V4 with drafts": (
        "hy4-preview",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _FEW_EXPERTS},
    ),
    "GLM-5.3-Flash with drafts": (
        "glm-5.3-flash",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": {"text_config": _FEW_EXPERTS}},
    ),
    "Mistral Large 4 with drafts": (
        "deepseek-v3.2",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _MISTRAL_LARGE4},
    ),
    "MiniMax-M3 with drafts": (
        "mixtral-8x7b",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _MINIMAX_M3},
    ),
    "GLM-4.7-Flash with drafts": ("glm-4.7-flash", {"speculation": SpeculationConfig(method="lookup")}),
    "Gemma 2": ("gemma-2-9b", {}),
    "Gemma 3": ("gemma-3-27b", {}),
    "Gemma 3 both ways": ("gemma-3-27b", {"task": "embed", "hf_overrides": {"use_bidirectional_attention": True}}),
    "Gemma 4 E4B": ("gemma-4-e4b", {}),
    "Gemma 3n E4B": ("gemma-3n-e4b", {}),
    "OLMo 3": ("olmo-3-7b", {}),
    "Qwen3.5-35B-A3B with its head": ("qwen3.5-35b-a3b", {"speculation": SpeculationConfig(method="mtp")}),
    "Qwen4-Exp with drafts": (
        "qwen3.5-35b-a3b",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _QWEN4},
    ),
    "Nemotron-3-Nano": ("nemotron-3-nano-30b-a3b", {}),
    "Ling 3 with drafts": (
        "kimi-linear-48b-a3b",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _LING},
    ),
    "Muse Spark": (
        "muse-spark-816b-a42b",
        {"hf_overrides": {"text_config": {"num_hidden_layers": 4, "num_local_experts": 16}}},
    ),
    "Inkling with drafts": (
        "mixtral-8x7b",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": _INKLING},
    ),
    "MiMo-V2-Flash": ("mixtral-8x7b", {"hf_overrides": _MIMO}),
    "Olmo Hybrid": ("olmo-3-7b", {"hf_overrides": _OLMO_HYBRID}),
    "Kimi Linear with drafts": (
        "kimi-linear-48b-a3b",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": {"num_experts": 32}},
    ),
    "Jamba with drafts": (
        "jamba-mini-1.7",
        {"speculation": SpeculationConfig(method="lookup"), "hf_overrides": {"num_hidden_layers": 8}},
    ),
    "Qwen3-VL-8B": ("qwen3-vl-8b", {"images": "always"}),
    "lightning attention with drafts": (
        "mixtral-8x7b",
        {"hf_overrides": _LIGHTNING, "speculation": SpeculationConfig(method="lookup")},
    ),
    "Granite-4.0-H-Small with drafts": ("granite-4.0-h-small", {"speculation": SpeculationConfig(method="lookup")}),
}
"""The shape of each model, and the settings of its run."""
_MAX_MODEL_LEN = 4096
_RARE_SAMPLING = SlotSampling(
    presence_penalty=0.5, num_logprobs=3, bias_ids=[1, 2], bias_values=[1.0, 2.0], allowed_ids=[1, 2, 3], top_k=20
)
_NUM_RANKS = 2


class Variant(NamedTuple):
    """A kernel as it was compiled for some arguments."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    seconds: float
    problem: str | None = None


class Compiler:
    """Compiles each kernel that is launched, once, and leaves the launch out. To Triton, an active
    `AsyncCompileMode`."""

    def __init__(self, threads: ThreadPoolExecutor, shared_bytes: int, pattern: str = "") -> None:
        """`shared_bytes`: the most that a program may have; `pattern`: that names of kernels match."""
        self._threads, self._shared_bytes, self._pattern = threads, shared_bytes, re.compile(pattern)
        self._compiling: dict[str, tuple[str, Future[Variant]]] = {}

    def __len__(self) -> int:
        return len(self._compiling)

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], *_: Any) -> Any:
        """Begin to compile a kernel; Triton calls this at its first launch."""
        placeholder = Placeholder()
        finalize_fn(placeholder)
        if key not in self._compiling:
            held = dict(zip(compile_fn.__code__.co_freevars, compile_fn.__closure__ or (), strict=True))
            name = name_of(held["src"].cell_contents.fn)
            if self._pattern.search(name):
                self._compiling[key] = name, self._threads.submit(self._compile, compile_fn)
        return placeholder

    def variants(self) -> dict[str, list[Variant]]:
        """Wait for all kernels, and return their variants by name."""
        found: dict[str, list[Variant]] = defaultdict(list)
        for name, future in self._compiling.values():
            found[name].append(future.result())
        return found

    def _compile(self, compile_fn: Callable[[], Any]) -> Variant:
        begun = time.perf_counter()
        try:
            kernel = compile_fn()
        except Exception as error:
            return Variant(0, 0, 0, time.perf_counter() - begun, first_line(error))
        seconds, shared_bytes = time.perf_counter() - begun, kernel.metadata.shared
        fits = shared_bytes <= self._shared_bytes
        problem = None if fits else f"needs {shared_bytes} bytes of shared memory, of {self._shared_bytes}"
        return Variant(*registers_and_stack(kernel.asm["cubin"]), shared_bytes, seconds, problem)


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread of a kernel, and the bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return int(registers), int(stack)


class Launched(Exception):
    """All kernels of a start have been launched."""


def start(shape: str, settings: Mapping[str, Any]) -> None:
    """Start a model on the imagined GPU up to where its kernels are known. Raises NvcliError if the GPU cannot have
    it."""

    def launch_and_stop(runner: ModelRunner) -> None:
        runner._use_kv_cache(1)
        runner._run_steps_to_compile()
        launch_rare(runner)
        raise Launched

    with model_folder("", shape, quantization=settings.get("quantization", "auto")) as folder:
        run = RunConfig(
            model=shape, device="cuda", attention_backend="triton", max_model_len=_MAX_MODEL_LEN, **settings
        )
        config = resolve_engines(run, folder, load_checkpoint(run, folder)).config
        config = msgspec.structs.replace(config, load_format="dummy")
        with (
            patch.object(ModelRunner, "_compile_kernels", launch_and_stop),
            patch.object(rank_weights, "init_random_weights", lambda model, device: 0),
            patch.object(rank_weights, "make_region", lambda num_bytes, device: None),
            patch.object(model_runner, "make_region", lambda num_bytes, device: None),
        ):
            try:
                ModelRunner(config, RankContext(rank=0, report_phase=lambda phase: None))
            except Launched:
                return
    raise AssertionError("the start did not come to its kernels")


@torch.inference_mode()
def launch_rare(runner: ModelRunner) -> None:
    """Launch what only some rows ask for, and what several ranks do."""
    warm_up = WarmUp(config=runner.config, num_tokens=512, num_seqs=8)
    step = next(step for step in warm_up.steps() if step.num_decodes)
    slots = [msgspec.structs.replace(slot, sampling=_RARE_SAMPLING) for slot in step.new_slots]
    runner.launch(msgspec.structs.replace(step, new_slots=slots))

    model, device, columns = runner.model_config, runner.device, runner.slots.sampling.columns
    rows, part_size = 8, model.vocab_size // _NUM_RANKS
    logits = torch.empty(rows, model.vocab_size, dtype=runner.dtype, device=device)
    masks = torch.empty(rows, -(-model.vocab_size // 32), dtype=torch.int32, device=device)
    ints, longs = (torch.empty(rows, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    token_mask.apply_token_mask(logits, masks, ints)
    late_masks.take_late_masks(masks, masks, longs, ints, ints, ints[:2])
    weight = torch.empty(part_size, model.hidden_size, dtype=runner.dtype, device=device)
    embedding.embed_part(ints, weight, 0)
    packed, lists = candidates.shard_candidates(logits[:, :part_size], columns, longs, ints, start=0)
    candidates.choose_candidates(packed, torch.stack([lists] * _NUM_RANKS), columns, longs, ints)

    layout = PeerLayout(num_ranks=_NUM_RANKS, max_rows=4 * rows, hidden_size=model.hidden_size, dtype=runner.dtype)
    blocks = [torch.empty(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(_NUM_RANKS)]
    memory = PeerMemory(layout, blocks, 0)
    memory.two_shot_rows = 2 * rows
    for num_rows in (rows, 2 * rows):
        residual = torch.empty(num_rows, model.hidden_size, dtype=runner.dtype, device=device)
        memory.sum(residual)
        for scaling in (None, "channel", "block"):
            memory.add_rms_norm(memory.part(num_rows), residual, residual[0], 1e-6, scaling)
    memory.max(packed)
    results = torch.empty(3, rows, model.hidden_size, dtype=runner.dtype, device=device)
    experts.sum_results(results)
    experts.sum_results(results, ints.view(-1, 1), (1, 2))
    launch_adapters(model.hidden_size, runner.dtype, device)
    if fp4_rows.has_kernel(device):
        launch_fp8_weights(model.hidden_size, runner.dtype, device)


def launch_fp8_weights(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Launch what makes weights: FP8 of NVFP4 and MXFP4 when they are loaded, and those of adapters merged in turn."""
    rows = 8
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    for block in (16, 32):
        codes, scales = fp4_rows.fp4_to_fp8(packed, torch.empty(rows, columns // block, device=device))
    values = torch.empty(rows, columns, dtype=dtype, device=device)
    for low_rank in (None, LowRankSum(values[:, :1].float(), values[:1].float(), 0.0)):
        fp8.quantise_weight_to(values, "channel", codes, scales, low_rank)
    low_rank_merge.merge_low_rank(values, values, values[:1, :rows], values[:1], 1.0)


def launch_adapters(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Launch the products of LoRA adapters of small and large ranks, for rows that decode and for prompts."""
    runs = [(hidden, 0), (hidden, 1)]
    blocks, align = feature_blocks(runs, BLOCK_FEATURES)
    layer = AdaptedLayer(
        in_features=hidden,
        out_features=2 * hidden,
        first_projection=0,
        num_projections=2,
        down_offset=0,
        up_offset=2 * PAGE_RANKS * hidden,
        blocks=torch.empty(len(blocks), BLOCK_FIELDS, dtype=torch.int32, device=device),
        block_features=BLOCK_FEATURES,
        feature_align=align,
    )
    for rank, num_rows in product((16, 256), (64, 256, 4096)):
        bank = AdapterBank(
            pages=torch.empty(1, 4 * PAGE_RANKS * hidden, dtype=dtype, device=device),
            page_table=torch.empty(8, page_columns(rank), dtype=torch.int32, device=device),
            ranks=torch.empty(8, 2, dtype=torch.int32, device=device),
            scales=torch.empty(8, 2, device=device),
        )
        adapters = torch.empty(num_rows, dtype=torch.int32, device=device)
        lora.spread_adapters(adapters, adapters, adapters, adapters)
        rows = lora.group_rows(adapters, bank)
        x = torch.empty(num_rows, hidden, dtype=dtype, device=device)
        out = torch.empty(num_rows, 2 * hidden, dtype=dtype, device=device)
        lora.add_low_rank(out, x, rows, bank, layer)
        lora.activate_with_low_rank(out, x, rows, bank, layer, "silu")


def report(found: Mapping[str, list[Variant]]) -> bool:
    """Print the table, and return whether all is well."""
    print(f"  {'kernel':<52} variants registers  stack  shared  seconds")
    for name, variants in sorted(found.items()):
        registers, stack, shared = (max(variant[place] for variant in variants) for place in range(3))
        seconds = sum(variant.seconds for variant in variants)
        print(f"  {name:<52} {len(variants):8} {registers:9} {stack:6} {shared:7} {seconds:8.1f}")
    if others := sorted(all_kernels() - found.keys()):
        print(f"  not compiled: {', '.join(others)}")
    problems = [f"  {name}: {one.problem}" for name, variants in found.items() for one in variants if one.problem]
    print("\n".join(problems or ["  all are compiled, and fit"]), flush=True)
    return not problems


def all_kernels() -> set[str]:
    """Name the kernels; what they call has another ending."""
    found = set()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.fn.__name__.endswith("_kernel"):
                found.add(name_of(value))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="80,90,100", help=f"compute capabilities, of {', '.join(map(str, CARDS))}")
    parser.add_argument("--model", default=",".join(MODELS), help="models, of those that are listed without one")
    parser.add_argument("--kernel", default="", help="regular expression for the names of kernels; others are left out")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    capabilities = options.gpu.split(",")
    if len(capabilities) == 1:
        return int(not compile_for(int(options.gpu), options))
    # What is known of a GPU is kept by nvcli and Triton: each has a process of its own.
    command = [sys.executable, __file__, *sys.argv[1:], "--gpu"]
    codes = [subprocess.run([*command, capability]).returncode for capability in capabilities]
    return int(any(codes))


def compile_for(capability: int, options: argparse.Namespace) -> bool:
    """Compile for one GPU, print the table, and return whether all is well."""
    card = CARDS[capability]
    print(f"Triton {triton.__version__}, torch {torch.__version__}, sm_{capability} ({card.name})", flush=True)
    with ThreadPoolExecutor(options.threads) as threads, imagined_gpu(capability):
        compiler = Compiler(threads, card.shared_bytes, options.kernel)
        token = _async_compile.active_mode.set(compiler)
        for model in options.model.split(","):
            before = len(compiler)
            try:
                start(*MODELS[model])
            except NvcliError as error:
                print(f"  {model}: not for this GPU: {error}")
            else:
                print(f"  {model}: {len(compiler) - before} variants more", flush=True)
        _async_compile.active_mode.reset(token)
        return report(compiler.variants())


if __name__ == "__main__":
    sys.exit(main())
