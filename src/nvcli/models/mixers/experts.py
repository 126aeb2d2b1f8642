"""ExpertsConfig: a mixture of experts in place of an MLP. `models/experts.py` computes it, or
`models/experts_beside_mlp.py` if it runs beside an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.core.config_types import FP8_PRODUCTS, KeptWeights
from nvcli.kernels.expert_settings import EXPERT_ALIGNMENT, ExpertActivation, Routing
from nvcli.models.mixers.mixer import FeedForward, LayerContext, Piece, Ranks, code_elements
from nvcli.models.mixers.mlp import MLPConfig, PlainMLPConfig
from nvcli.models.tensor_spec import EXPERTS, Sharding, TensorSpec, matrix, vector, with_bias

TABLE = "tid2eid"
"""The name of the table that says which experts each token id has."""
WEIGHED = f"shared_expert.{EXPERTS}"
"""The name of shared experts that the router weighs, which their numbers follow."""
CORRECTION = "e_score_correction_bias"
"""The name of the numbers that are added to a router's scores when experts are chosen."""
LATENT_NORM, RESULT_SCALE = "latent_norm", "result_scale"
"""The norm of what experts read in another space, and the numbers by which each one's result is multiplied before it is
normed."""
TO_LATENTS, FROM_LATENTS = "fc1_latent_proj", "fc2_latent_proj"
"""The projections of what experts read and of their results, where they compute in another space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(FeedForward):
    """A mixture of experts in place of an MLP: MLPs with or without gates of which a router chooses some for each
    token, and optionally one that all tokens share."""

    name: ClassVar[str] = "mlp"
    launch_seconds: ClassVar[float] = 2e-3
    """Measured on an H200 machine, torch 2.11."""
    routing: Routing
    intermediate_size: int
    """The size of each expert that a router chooses."""
    activation: ExpertActivation
    bias: bool = False
    """Whether the router's and the experts' projections have biases."""
    has_correction: bool = False
    """Whether numbers from the checkpoint are added to the scores when experts are chosen; see `route`."""
    may_lack_correction: bool = False
    """Whether a checkpoint may leave these numbers out, which then are 0 (`stored_tensors.py`)."""
    has_factors: bool = False
    """Whether each expert's weight for a token is multiplied by a number from the checkpoint; see `route`."""
    weighs_inputs: bool = False
    """Whether a token's weight multiplies what its expert reads, in place of the result; it has one expert then."""
    has_wide_router: bool = False
    """Whether the router's weight is kept in float32 where a checkpoint stores it so (`stored_tensors.py`)."""
    table_size: int | None = None
    """The number of token ids, if a table from the checkpoint says which experts each has (hash routing); None: the
    router chooses them by its scores."""
    num_identities: int = 0
    """The last of the router's experts, which return their input; they have no weights (zero-computation experts,
    https://arxiv.org/abs/2509.01322)."""
    latent_size: int | None = None
    """The size of a vector that the block's input is projected to for the experts, and their results from; None: they
    read the input itself. The router and the shared expert do so in any case."""
    results_eps: float | None = None
    """With it the latent vectors that experts read are normed, and each expert's result, multiplied by numbers from the
    checkpoint, is normed with this epsilon before its weight for the token counts; None: neither is normed."""
    router_factor: float = 1.0
    """The router's weight is multiplied by it when it is loaded."""
    shared: MLPConfig | PlainMLPConfig | None = None
    """The shared expert; several of them form one whose size is their sum, unless the router weighs each by itself
    (`Routing.num_shared`): then they are all like this one."""
    gates_shared: bool = False
    """Whether the shared expert's output for each token is multiplied by a gate."""
    shared_factor: float = 1.0
    """A factor of the shared expert's output; a power of 2, which rounds nothing."""
    has_norms: bool = False
    """Whether the router, the experts that it chooses and the shared expert have norms of their own
    (`experts_beside_mlp.py`); there is a shared expert then, without a gate."""

    @property
    def module(self) -> str:
        if self.has_norms:
            return "nvcli.models.experts_beside_mlp:ExpertsBesideMLP"
        return "nvcli.models.experts:MixtureOfExperts"

    @property
    def num_stored(self) -> int:
        """The number of experts that have weights."""
        return self.routing.num_experts - self.num_identities

    @property
    def reads_stream(self) -> bool:
        return self.has_norms

    @property
    def num_shared(self) -> int:
        """The MLPs that all tokens share."""
        return self.routing.num_shared or int(self.shared is not None)

    @property
    def num_parts(self) -> int:
        """The parts of its result on a single rank: one for each expert of a token, or for all of them after a
        projection from latents, one of the input and one for each shared expert."""
        experts = self.routing.experts_per_token if self.latent_size is None else 1
        return experts + (self.num_identities > 0) + self.num_shared

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections of an expert, which are kept in FP8 or 4 bits together."""
        return ("gate_proj", "up_proj", "down_proj") if self.activation.is_gated else ("up_proj", "down_proj")

    def num_kernels(self, ranks: Ranks) -> int:
        """Return the number of kernels. Several ranks add up the experts' results in one of its own."""
        shared = 0
        if self.shared is not None:
            is_weighed = self.gates_shared or self.routing.num_shared > 0
            shared = self.num_shared * (self.shared.num_kernels(ranks) - 1 + is_weighed)
        return 7 + shared + (ranks.size > 1) + self.weighs_inputs + 4 * (self.results_eps is not None)

    def check(self, ranks: Ranks) -> Iterator[str]:
        if self.shared is not None:
            yield from self.shared.check(ranks)
        num_experts, parts = self.num_stored, ranks.parts_of_expert
        if ranks.expert_parallel and num_experts % ranks.size:
            yield f"{num_experts} experts do not divide by {ranks.size} (enable_expert_parallel, --ep)"
        if self.intermediate_size % (parts * EXPERT_ALIGNMENT):
            problem = (
                f"the experts' intermediate size {self.intermediate_size} does not divide by {parts} into multiples of "
                f"{EXPERT_ALIGNMENT}"
            )
            has_way = parts > 1 and num_experts % ranks.size == 0 and self.intermediate_size % EXPERT_ALIGNMENT == 0
            yield f"{problem} (--ep deals out whole experts)" if has_way else problem

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        if self.shared is not None:
            yield from self.shared.pieces(ranks)
        size = self.intermediate_size // ranks.parts_of_expert
        *inputs, last = self.projections
        projections = f"the experts' {', '.join(inputs)} and {last}"
        yield Piece(projections, size, "the experts' down_proj", is_of_experts=True)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements. Each of a token's experts has an output of its own, and all of them may be whole on one
        rank."""
        experts = self.routing.experts_per_token
        results = self.num_parts + self.has_norms + self.weighs_inputs  # and what the experts read
        inner = experts * self.intermediate_size // ranks.parts_of_expert
        if self.latent_size is not None:
            inner += (2 + experts * (1 + (self.results_eps is not None))) * self.latent_size
        return (2 + results) * hidden_size + inner + (code_elements(inner) if quantization in FP8_PRODUCTS else 0)

    def unused_tensors(self, path: str) -> Iterator[str]:
        """Yield the weights that transformers writes for experts that return their input."""
        for expert in range(self.num_stored, self.routing.num_experts):
            yield from (f"{path}.{EXPERTS}.{expert}.{name}.weight" for name in self.projections)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. The router's bias, correction and factors are kept in float32, in which routes are
        computed."""
        hidden, dtype = context.hidden_size, context.dtype
        num_experts, size = self.routing.num_experts, self.intermediate_size
        num_stored = self.num_stored
        read = hidden if self.latent_size is None else self.latent_size
        router_dtype = "float32" if self.has_wide_router and context.stores_wide_routers else dtype
        num_logits = num_experts + self.routing.num_shared
        router = matrix(f"{path}.gate", (num_logits, hidden), Sharding.REPLICATED, router_dtype, "MLP")
        scaled = replace(router, dtype="float32", factor=self.router_factor)  # so that nothing is rounded
        yield router if self.router_factor == 1.0 else scaled
        vectors = {
            "bias": self.bias,
            CORRECTION: self.has_correction,
            "per_expert_scale": self.has_factors,
        }
        for name in (name for name, is_there in vectors.items() if is_there):
            yield vector(f"{path}.gate.{name}", num_experts, Sharding.REPLICATED, "MLP")
        if self.table_size is not None:
            yield TensorSpec(
                name=f"{path}.gate.{TABLE}",
                shape=(self.table_size, self.routing.experts_per_token),
                sharding=Sharding.REPLICATED,
                dtype="int32",
                part="embeddings",
            )
        for name in self.projections:
            is_down = name == "down_proj"
            shape = (num_stored, read, size) if is_down else (num_stored, size, read)
            sharding = Sharding.COLUMNS if is_down else Sharding.ROWS
            sharding = Sharding.EXPERTS if context.expert_parallel else sharding
            weight = matrix(f"{path}.{EXPERTS}.{name}", shape, sharding, dtype, "experts", self.projections)
            yield from with_bias(replace(weight, is_of_experts=True), bias=self.bias)
        if self.latent_size is not None:
            for name, sizes in ((TO_LATENTS, (read, hidden)), (FROM_LATENTS, (hidden, read))):
                yield matrix(f"{path}.{name}", sizes, Sharding.REPLICATED, dtype, "MLP", (name,))
        if self.results_eps is not None:
            for name in (LATENT_NORM, RESULT_SCALE):
                yield context.norm_weight(f"{path}.{name}", read, "MLP")
        for number in range(self.routing.num_shared):
            assert self.shared is not None
            yield from self.shared.tensors(f"{path}.{WEIGHED}.{number}", context)
        if self.shared is not None and self.routing.num_shared == 0:
            yield from self.shared.tensors(f"{path}.shared_expert", context)
            if self.gates_shared:
                yield matrix(f"{path}.shared_expert_gate", (1, hidden), Sharding.REPLICATED, dtype, "MLP")
        if self.has_norms:
            # The router's input is normed without a weight, and divided by the square root of its size.
            yield context.norm_weight(f"{path}.gate_norm", hidden, "MLP", weight_offset=0.0, factor=hidden**-0.5)
            for name in ("experts_input_norm", "experts_norm", "shared_expert_norm"):
                yield context.norm_weight(f"{path}.{name}", hidden, "MLP")
