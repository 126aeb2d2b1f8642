"""Known shapes: everything that plans knows each of them, and mixtures of experts compute what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.cli.completion import shapes
from nvcli.core.config import RunConfig
from nvcli.core.messages import ForwardMode
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.engine.request import StepRecord
from nvcli.job.planning.layout import choose_layout
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.models.config import load_model_config
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.tensor_spec import DTYPE_BYTES
from nvcli.sizing.costs import model_costs
from nvcli.sizing.weights import weight_bytes
from nvcli.tools.bench.roofline import work_of
from nvcli.tools.bench.shapes import SHAPES, write_shape
from nvcli.tools.profile.profile import profile_from_config

H200_BYTES = 141 * 10**9
GPUS = [
    SmiGpu(
        index=index, uuid=str(index), name="NVIDIA H200", driver="580", total_bytes=H200_BYTES, used_bytes=0, mig=False
    )
    for index in range(8)
]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_planned(name: str, tmp_path: Path) -> None:
    """On two or eight GPUs a layout is found, its dry run fits, and the limit counts each weight of a token once."""
    model = load_model_config(write_shape(name, tmp_path))
    is_fp8 = model.quantisation is not None and model.quantisation.numbers == "fp8"  # `auto` takes these
    if is_fp8 or name in ("longcat-flash", "muse-spark-816b-a42b"):  # which are too large in 16 bits
        model = model.with_quantization("fp8")
    max_model_len = min(4096, model.max_position_embeddings)
    config = resolve_engine_config(RunConfig(model=name, device="cuda", max_model_len=max_model_len), tmp_path, model)
    is_large = sum(weight_bytes(model, config.dtype).values()) > H200_BYTES // 3
    layout = choose_layout(GPUS if is_large else GPUS[:2], model, config, num_requests=2000)
    profile = profile_from_config(layout.apply(config), model, name, total=H200_BYTES, lengths=None)
    assert profile.problem is None
    assert profile.full_length_requests > 10
    costs = model_costs(model, config.dtype)
    step = StepRecord(
        mode=ForwardMode.DECODE,
        num_decodes=1,
        num_prefill_tokens=0,
        num_sampled=1,
        decode_keys=5000,
        prefill_keys=0,
        prefill_pairs=0,
    )
    read = sum(work.num_bytes for part, work in work_of(step, costs).items() if not part.startswith("decode"))
    weights = weight_bytes(model, config.dtype)
    beside = weights.get("experts", 0) + weights["norms"] + weights["embeddings"]
    if model.tie_word_embeddings:
        beside -= model.vocab_size * model.hidden_size * DTYPE_BYTES[config.dtype]  # not those of each layer
    of_experts = costs.experts.read_bytes(1)
    assert read == pytest.approx(sum(weights.values()) - beside + of_experts, rel=1e-3)
    assert name in shapes(name[:4])


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen2-57b-a14b", 57.4, 14),
        ("olmoe-1b-7b", 6.9, 1.3),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("gemma-4-26b-a4b", 25.2, 3.8),
        ("glm-4.5-air", 106, 12),
        ("glm-4.5", 355, 32),
        ("muse-spark-816b-a42b", 816, 42),
    ],
)
def test_experts_compute_what_is_published(name: str, total: float, active: float, tmp_path: Path) -> None:
    """In billions, as the names and papers have it; some leave embeddings out."""
    model = load_model_config(write_shape(name, tmp_path))
    assert any(isinstance(layer.mlp, ExpertsConfig) for layer in model.layers)
    costs = model_costs(model, "bfloat16")
    assert sum(weight_bytes(model, "bfloat16").values()) / 2e9 == pytest.approx(total, rel=0.01)
    embedding = model.vocab_size * model.hidden_size / 1e9
    computed = (costs.weights_per_token + costs.lm_head.num_weights) / 1e9
    assert computed - embedding < 1.03 * active
    assert computed + embedding > 0.97 * active
