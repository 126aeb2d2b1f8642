"""How a run gets its attention backend, and what a user is told who asks for one that cannot serve it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from attention_setup import Bench, History

from nvcli.attention import selection
from nvcli.attention.backend import AttentionCase
from nvcli.attention.choice_sizes import _LIST_BYTES, ChoiceSizes
from nvcli.attention.chosen_keys import ChosenKeys, _on_hopper
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.hybrid import HybridBackend
from nvcli.attention.selection import AUTO_ORDER, BACKENDS, NOT_ASKED, select_backend, why_not
from nvcli.attention.spec import AttentionSpec, CompressedKeys
from nvcli.attention.torch_backend import TorchBackend
from nvcli.attention.triton_backend import TritonBackend
from nvcli.errors import ConfigError
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.pool_settings import Pools
from nvcli.kernels.triton.attention import latent_shares
from nvcli.kernels.triton.attention.attention_launch import AttentionShape

CASE = AttentionCase(
    device=torch.device("cpu"),
    dtype=torch.float32,
    specs=(
        AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),
        AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=64, kv_group=1),
    ),
    block_size=16,
)
DECODES = BatchShape(decode_rows=4)
CHUNKS = BatchShape(prefill_rows=1, prefill_tokens=16)
MIXED = BatchShape(decode_rows=4, prefill_rows=1, prefill_tokens=16)
DRAFTS = BatchShape(decode_rows=4, tokens_per_row=3)


class Picky(TorchBackend):
    name = "picky"

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        return [f"head size {case.specs[0].head_dim} is not 64", "no GPU"]


class Other(TorchBackend):
    """Captures anything."""

    name = "other"

    def can_capture(self, shape: BatchShape) -> bool:
        return True


@pytest.fixture
def _picky_first(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {
        "picky": f"{Picky.__module__}:Picky",
        "other": f"{Other.__module__}:Other",
        "torch": BACKENDS["torch"],
    }
    monkeypatch.setattr(selection, "BACKENDS", backends)
    monkeypatch.setattr(selection, "AUTO_ORDER", {"cpu": ("picky", "torch")})


@pytest.mark.parametrize("choice", ["auto", "torch", "torch:auto", "auto:torch"])
def test_a_cpu_gets_torch(choice: str) -> None:
    backend, _ = select_backend(choice, CASE)
    assert backend.name == "torch"


def test_auto_asks_or_explains_all_that_a_gpu_may_use() -> None:
    assert sorted([*AUTO_ORDER["cuda"], *NOT_ASKED["cuda"]]) == sorted(BACKENDS)
    assert AUTO_ORDER["cuda"][-1] == "torch", "what serves everything comes last"


@pytest.mark.usefixtures("_picky_first")
def test_auto_says_why_it_passed_one_over() -> None:
    backend, notes = select_backend("auto", CASE)
    assert backend.name == "torch"
    assert any("picky" in note and "head size 16 is not 64" in note and "no GPU" in note for note in notes)
    assert len(notes) == len(set(notes)), "prompts and decode steps were passed over for the same reason"


@pytest.mark.usefixtures("_picky_first")
@pytest.mark.parametrize("choice", ["picky", "torch:picky", "picky:torch"])
def test_an_explicit_choice_that_cannot_work_is_an_error_with_the_reasons(choice: str) -> None:
    with pytest.raises(ConfigError, match=r"picky.*head size 16 is not 64; no GPU"):
        select_backend(choice, CASE)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'flsh'.*auto, triton.*torch"):
        select_backend("flsh", CASE)


@pytest.mark.parametrize("name", ["triton", "flash-attn", "flashinfer"])
def test_gpu_backends_say_that_they_need_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot serve this run: needs an NVIDIA GPU.*use `auto`"):
        select_backend(name, CASE)


@pytest.mark.parametrize("name", ["flash-attn", "flashinfer"])
def test_packages_say_that_they_take_no_sinks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    spec = AttentionSpec(num_heads=64, num_kv_heads=8, head_dim=64, scale=0.125, has_sinks=True)
    case = replace(CASE, device=torch.device("cuda"), dtype=torch.bfloat16, specs=(spec,))
    with pytest.raises(ConfigError, match=f"{name} cannot serve this run: the model's heads have attention sinks"):
        select_backend(name, case)
    assert selection.why_not("triton", case) == []


@pytest.mark.usefixtures("_picky_first")
def test_prompts_and_decode_steps_may_go_to_different_backends() -> None:
    backend, notes = select_backend("torch:other", CASE)
    assert (backend.name, notes) == ("torch:other", [])


@pytest.mark.usefixtures("_picky_first")
@pytest.mark.parametrize(
    ("choice", "captured"),
    [
        ("torch:other", [DECODES]),
        ("other:torch", [CHUNKS, DRAFTS]),
        ("other", [DECODES, CHUNKS, MIXED, DRAFTS]),
        ("torch", []),
    ],
)
def test_a_step_is_captured_where_all_who_attend_it_can(choice: str, captured: list[BatchShape]) -> None:
    backend, _ = select_backend(choice, CASE)
    assert [shape for shape in (DECODES, CHUNKS, MIXED, DRAFTS) if backend.can_capture(shape)] == captured


def test_a_hybrid_sends_each_half_to_its_own() -> None:
    class Prefill(TorchBackend):
        def decode(self, *args: object) -> torch.Tensor:
            raise AssertionError

    class Decode(TorchBackend):
        def prefill(self, *args: object) -> torch.Tensor:
            raise AssertionError

    bench = Bench(lambda case: HybridBackend(Prefill(case), Decode(case)), num_kv_heads=2, ratio=2)
    a, b = History(), History()
    bench.step((a, 30), (b, 5))
    bench.step((a, 1), (b, 17))
    bench.step((a, 1), (b, 1))


def test_a_hybrid_reads_new_keys_where_its_prefill_half_does() -> None:
    class FromCache(TorchBackend):
        reads_new_keys = False

    assert HybridBackend(TorchBackend(CASE), FromCache(CASE)).reads_new_keys
    assert not HybridBackend(FromCache(CASE), TorchBackend(CASE)).reads_new_keys


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "kv_dtype", "words"),
    [
        ("flash-attn", (9, 0), torch.bfloat16, FP8, "fp8 keeps a scale for each token and head"),
        ("flashinfer", (9, 0), torch.bfloat16, FP8, "fp8 keeps a scale for each token and head"),
        ("flashinfer", (9, 0), torch.float16, torch.bfloat16, "is kept in bfloat16, and it reads the model's float16"),
        ("triton", (8, 6), torch.bfloat16, FP8, "fp8 needs compute capability 8.9, and this GPU has 8.6"),
        ("triton", (8, 9), torch.bfloat16, FP8, None),
        ("triton", (8, 0), torch.bfloat16, torch.bfloat16, None),
        ("torch", (7, 0), torch.bfloat16, FP8, None),
    ],
)
def test_who_reads_which_cache(
    name: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    specs = (replace(CASE.specs[0], head_dim=64),)
    case = replace(CASE, device=torch.device("cuda"), dtype=dtype, kv_dtype=kv_dtype, specs=specs, block_size=256)
    reasons = why_not(name, case)
    assert (reasons == []) if words is None else any(words in reason for reason in reasons)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_only_torch_reads_new_keys(name: str) -> None:
    """The others read the cache: the layers need not keep the step's keys for them."""
    module_name, _, class_name = BACKENDS[name].partition(":")
    assert getattr(import_module(module_name), class_name).reads_new_keys == (name == "torch")


def test_which_runs_on_hopper_have_a_prefill_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says so. Layers with windows keep the other, and so do pools whose blocks are not all alike, and runs
    with a version of Triton that the kernel has not run with."""
    triton = pytest.importorskip("triton")
    from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind
    from nvcli.kernels.triton.attention.prefill_choice import HOPPER_NOTE, SCRATCH_NOTE

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    wide, windowed = (replace(spec, head_dim=128) for spec in CASE.specs)
    case = replace(CASE, dtype=torch.bfloat16, specs=(wide, windowed), block_size=64)
    backend = TritonBackend(case)
    assert backend.notes == (HOPPER_NOTE,)
    kernels = [backend._prefill.kernels[spec.geometry, spec.window is not None] for spec in case.specs]
    kinds = [kernel.kind if isinstance(kernel, PrefillAttention) else None for kernel in kernels]
    assert kinds == [PrefillKind.HOPPER, PrefillKind.USUAL]
    others = (
        replace(case, specs=(windowed,)),
        replace(case, has_states=True, block_bytes=1 << 7),
        replace(case, batch_invariant=True),
    )
    assert [TritonBackend(other).notes for other in others] == [()] * len(others)
    # The scratch for copies is allocated where the case says; here that must not be a GPU.
    over_fp8 = TritonBackend(replace(case, kv_dtype=FP8, device=torch.device("cpu"), max_num_seqs=1, max_model_len=128))
    assert over_fp8.notes == (SCRATCH_NOTE,)
    assert {type(tiles).__name__ for tiles in over_fp8._prefill._tiles._lists.values()} == {
        "ScratchTiles",
        "PrefillTiles",
    }
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    (what_is_slower,) = TritonBackend(case).notes
    assert what_is_slower.startswith("Triton 4.0.0: ")


@pytest.mark.parametrize(
    ("top_k", "pools", "num_heads", "rate"),
    [
        (32, Pools(), 0, 1),
        (47, Pools(size=16), 0, 1),
        (48, Pools(size=16, num_last=1), 2, 1),
        (32, Pools(), 0, 4),
        (0, Pools(), 0, 8),
    ],
)
def test_what_the_choice_of_keys_takes_is_planned(top_k: int, pools: Pools, num_heads: int, rate: int) -> None:
    """But for scores, which a CPU does not keep, and the list of work of Hopper GPUs."""
    device = torch.device("cpu")
    case = AttentionCase(device=device, dtype=torch.float32, specs=(), block_size=16, max_num_batched_tokens=64)
    spec = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=64, scale=1.0, rate=rate, row_heads=num_heads)
    spec = replace(spec, top_k=top_k or None, index_pools=pools)
    if rate > 1:
        spec = replace(spec, compressed=CompressedKeys(spec, spec), top_k=None)
    keys, planned = ChosenKeys(case, [spec]), ChoiceSizes.of([spec], case.max_model_len)
    taken = {
        value.data_ptr(): value.nbytes
        for value in (*vars(keys).values(), *keys._of_rates.values())
        if isinstance(value, torch.Tensor)
    }
    scores = 4 * planned.score_rows(64) * planned.most_scores
    lists = (64 * 48 + _LIST_BYTES) * planned.num_lists
    assert planned.num_bytes(64) - scores == sum(taken.values()) + lists


def test_what_lists_of_work_take_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_shares, "num_multiprocessors", lambda device: 132)
    shape = AttentionShape(
        num_heads=128, num_kv_heads=1, head_dim=512, tail_dim=64, block_size=64, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=torch.device("cpu"), has_values=False,
    )  # fmt: skip
    attention = latent_shares.HopperLatents(shape, max_rows=64, top_k=2048)
    taken = sum(value.nbytes for value in vars(attention).values() if isinstance(value, torch.Tensor))
    assert 0.95 * _LIST_BYTES < taken - 64 * 48 < _LIST_BYTES


def test_layers_with_and_without_index_keys_share_the_list_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_shares, "serves_latents", lambda shape: True)
    monkeypatch.setattr(latent_shares, "HopperLatents", lambda shape, **sizes: shape.tail_dim)
    spec = AttentionSpec(
        num_heads=16, num_kv_heads=1, head_dim=576, scale=1.0, value_dim=512, has_values=False, top_k=8
    )
    chooser, others = replace(spec, head_dim=704, index_dim=128), replace(spec, top_k=None)
    found = _on_hopper(replace(CASE, specs=(spec, chooser, others)))
    assert list(found.values()) == [64]
    assert chooser.key_geometry == next(iter(found)).geometry
