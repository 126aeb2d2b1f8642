"""ModelCosts: the bytes and operations of one rank's share of a model per step, counted from its tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from nvcli.attention.kv_layout import KVDtype
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import EMBEDDING, HEAD, model_tensors
from nvcli.models.mixers.mixer import Block, Mixer, MixerCosts
from nvcli.models.tensor_spec import DTYPE_BYTES, StoredDtype, TensorSpec
from nvcli.worker.distributed.stage import WHOLE, Stage

_FOR_SUMS = ("o_proj", "o_b_proj", "out_proj", "down_proj")
"""Projections whose results are summed over the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCosts:
    """Weights by which a step's rows are multiplied: each row by all of them or, with experts, by a few."""

    num_weights: int = 0
    """Weights, each of which costs two operations per row."""
    num_bytes: int = 0
    num_fp8_weights: int = 0
    """The part of them that is multiplied in FP8."""
    num_experts: int = 1
    experts_per_token: int = 1

    def __add__(self, other: MatrixCosts) -> MatrixCosts:
        """Return the costs of both, if no experts are among them."""
        assert self.num_experts == other.num_experts == 1
        return MatrixCosts(
            num_weights=self.num_weights + other.num_weights,
            num_bytes=self.num_bytes + other.num_bytes,
            num_fp8_weights=self.num_fp8_weights + other.num_fp8_weights,
        )

    def of_share(self, num_shares: int) -> MatrixCosts:
        """Return the costs for one of `num_shares` shares of the rows, with operations per row as means over all rows.
        The weights are read for any share."""
        return replace(
            self, num_weights=self.num_weights // num_shares, num_fp8_weights=self.num_fp8_weights // num_shares
        )

    @property
    def weights_per_row(self) -> int:
        """Weights by which one row is multiplied."""
        return self.num_weights * self.experts_per_token // self.num_experts

    @property
    def operations_per_row(self) -> int:
        """Operations per row, in units of the model's own type: two operations in FP8 count as one."""
        fp8_weights = self.num_fp8_weights * self.experts_per_token // self.num_experts
        return 2 * self.weights_per_row - fp8_weights

    def read_bytes(self, num_rows: float) -> float:
        """Bytes read for this many rows. Of the experts, those count that at least one row uses, if every row is
        equally likely to use any."""
        unread: float = (1 - self.experts_per_token / self.num_experts) ** num_rows
        return self.num_bytes * (1 - unread)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Costs of one rank's share of a stage."""

    layers: MatrixCosts
    lm_head: MatrixCosts
    """Zero in a stage that is not the last."""
    mixers: tuple[MixerCosts, ...]
    """One entry for all layers that mix tokens alike."""
    experts: MatrixCosts = MatrixCosts()
    activation_bytes: int = 0
    """Activations of one row, over all blocks."""
    num_kernels: int = 0
    """Kernels of a decode step."""
    num_sums: int = 0
    """Sums over the ranks of a step."""

    @property
    def weights_per_token(self) -> int:
        """The layers' weights by which one row is multiplied."""
        return self.layers.weights_per_row + self.experts.weights_per_row

    @property
    def operations_per_token(self) -> int:
        """Operations of the layers' matrices per row, as counted by `MatrixCosts.operations_per_row`."""
        return self.layers.operations_per_row + self.experts.operations_per_row

    def matrix_read_bytes(self, num_rows: float) -> float:
        """Bytes of the layers' weights read for this many rows."""
        return self.layers.num_bytes + self.experts.read_bytes(num_rows)

    @property
    def state_bytes_per_row(self) -> int:
        """Bytes of recurrent states that one row of a step reads and writes."""
        return 2 * sum(one.state_bytes for one in self.mixers)

    @property
    def state_flops_per_token(self) -> int:
        """Operations per token on all recurrent states."""
        return sum(one.flops_per_token for one in self.mixers)

    def kv_read_bytes(self, num_tokens: float) -> float:
        """Bytes of keys and values that a decode row reads after `num_tokens` tokens."""
        return sum(
            one.kv_bytes_per_token * (num_tokens if one.window is None else min(num_tokens, one.window))
            for one in self.mixers
        )


@lru_cache(maxsize=512)  # a layout is chosen from the same few, asked for many times
def model_costs(
    model: ModelConfig,
    dtype: StoredDtype,
    *,
    tensor_parallel_size: int = 1,
    stage: Stage = WHOLE,
    kv_dtype: KVDtype | None = None,
) -> ModelCosts:
    """Count the costs of one rank's share of a stage. Weights are kept in `dtype`, keys and values in `kv_dtype` (None:
    in `dtype` too). With attention by rows a rank mixes a share of a step's rows, and costs per row and token are means
    over all rows."""
    tensors = {tensor.name: tensor for tensor in model_tensors(model, dtype, stage)}
    head = tensors.get(f"{EMBEDDING if model.tie_word_embeddings else HEAD}.weight") if stage.is_last else None
    size, homes = model.attention_ranks(tensor_parallel_size), tensor_parallel_size if model.attention_dp else 1
    by_part = {part: [tensor for tensor in tensors.values() if tensor.part == part] for part in ("attention", "MLP")}
    blocks = [block for number in model.decoder.stage_layers(stage) for block in model.layers[number].blocks]
    mixers = Counter(block for block in blocks if isinstance(block, Mixer))
    elements = activation_elements(model, tensor_parallel_size)
    activations = sum(elements[block] // (homes if isinstance(block, Mixer) else 1) for block in blocks)
    if model.decoder.num_streams > 1:  # read twice and written once before each block
        activations += len(blocks) * 3 * model.decoder.num_streams * model.hidden_size
    # A quantised product for a sum has one kernel more: its input is quantised, or its parts are added up.
    num_kernels = sum(block.num_kernels(model.ranks(tensor_parallel_size, block)) for block in blocks)
    kinds = [mixer.costs(num_layers, dtype, kv_dtype or dtype, size) for mixer, num_layers in mixers.items()]
    choices = [mixer.choice_costs(num_layers, kv_dtype or dtype) for mixer, num_layers in mixers.items()]
    num_kernels += len(blocks) * model.decoder.stream_kernels
    num_kernels += sum(
        (tensor.scaling or tensor.w4) is not None and tensor.name.split(".")[-2] in _FOR_SUMS
        for tensor in tensors.values()
    )
    return ModelCosts(
        layers=_matrices(by_part["attention"], tensor_parallel_size).of_share(homes)
        + _matrices(by_part["MLP"], tensor_parallel_size),
        lm_head=_matrices([] if head is None else [head], tensor_parallel_size),
        mixers=tuple(costs.of_share(homes) for costs in (*kinds, *filter(None, choices))),
        experts=_expert_costs(model, list(tensors.values()), tensor_parallel_size),
        activation_bytes=activations * DTYPE_BYTES[dtype],
        num_kernels=num_kernels,
        num_sums=sum(not (model.attention_dp and isinstance(block, Mixer)) for block in blocks),
    )


def activation_elements(model: ModelConfig, tensor_parallel_size: int) -> dict[Block, int]:
    """Return the peak number of activations per token on a rank, by block."""
    blocks = {block for layer in model.decoder.layer_kinds for block in layer.blocks}
    return {
        block: block.activation_elements(
            model.hidden_size, model.ranks(tensor_parallel_size, block), model.quantization
        )
        for block in blocks
    }


def _expert_costs(model: ModelConfig, tensors: list[TensorSpec], tensor_parallel_size: int) -> MatrixCosts:
    """Count one rank's part of the experts."""
    experts = _matrices([tensor for tensor in tensors if tensor.part == "experts"], tensor_parallel_size)
    routings = {layer.routing for layer in model.decoder.layer_kinds if layer.routing is not None}
    if not experts.num_weights:
        return experts
    assert len(routings) == 1, "no family routes differently in different layers"
    (routing,) = routings
    return replace(experts, num_experts=routing.num_experts, experts_per_token=routing.experts_per_token)


def _matrices(tensors: list[TensorSpec], tensor_parallel_size: int) -> MatrixCosts:
    """Count one rank's part of the matrices among `tensors`, alone or in stacks. The taps of a convolution, [channels,
    1, taps], are none."""
    matrices = [one for one in tensors if len(one.stored_shape) == 2 or one.stored_shape[1:2] > (1,)]
    return MatrixCosts(
        num_weights=sum(math.prod(tensor.kept_shape(tensor_parallel_size)) for tensor in matrices),
        num_bytes=sum(tensor.kept_bytes(tensor_parallel_size) for tensor in matrices),
        num_fp8_weights=sum(
            math.prod(tensor.kept_shape(tensor_parallel_size)) for tensor in matrices if tensor.is_multiplied_in_fp8
        ),
    )
