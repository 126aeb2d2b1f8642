"""A layer's mixture of experts: a router, the experts that it chooses from, and optionally a shared expert.

Every rank routes all tokens identically. It holds all experts, each sharded by its intermediate size, so that the ranks
have equal work whatever the routes; or, with expert parallelism, some experts whole: it computes the tokens routed to
them, and leaves all other choices out of its sums. Either way, an expert's output for a token is a part of the residual
sum, like the parts of a product (`layers.py`): on a single rank the parts are not added up before the next norm, and
the shared expert, which is always sharded, is one more part.

Shapes: T tokens, H hidden, E experts of this rank, k experts per token, I this rank's part of the intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes, W4Scales
from nvcli.kernels.experts import apply_experts, sum_results
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.gates import gate_rows
from nvcli.kernels.lora_types import AdapterRows
from nvcli.kernels.norm import rms_norm, sum_in_order
from nvcli.kernels.routing import choose_experts, route_row_by_row, router_logits
from nvcli.models.layers import FeedForward, GatedMLP, Norm
from nvcli.models.mixers.experts import (
    FROM_LATENTS,
    LATENT_NORM,
    RESULT_SCALE,
    TABLE,
    TO_LATENTS,
    WEIGHED,
    ExpertsConfig,
)
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, TensorShard, TensorShards
from nvcli.models.plain_mlp import PlainMLP
from nvcli.models.tensor_spec import EXPERTS
from nvcli.models.weights import WeightModule, WeightSource, empty_fp8_scales, empty_parameter, empty_w4, length


class MixtureOfExperts(FeedForward):
    """[T, H] → `delta` for the residual sum: on a single rank, parts [k, T, H], or [1, T, H] where experts compute with
    latents, and one more with a shared expert; on several ranks, this rank's part of the sum [T, H]."""

    def __init__(self, build: BuildContext, path: str, config: ExpertsConfig, norm: NormConfig) -> None:
        super().__init__()
        self.group = build.group
        self.batch_invariant = build.batch_invariant
        self.gate = Router(build, f"{path}.gate", config)
        self.experts = Experts(build, f"{path}.{EXPERTS}", config)
        self.shared_expert: SharedExpert | None = None
        if config.shared is not None and config.routing.num_shared == 0:
            gate = f"{path}.shared_expert_gate" if config.gates_shared else None
            shared = config.shared.build_at(build, f"{path}.shared_expert", norm)
            self.shared_expert = SharedExpert(build, shared, gate, config.shared_factor)
        self.weighed_experts = nn.ModuleList()
        for number in range(config.routing.num_shared):
            assert config.shared is not None
            weighed = config.shared.build_at(build, f"{path}.{WEIGHED}.{number}", norm)
            self.weighed_experts.append(SharedExpert(build, weighed, None))
        self.to_latents: ColumnParallelLinear | None = None
        self.from_latents: ColumnParallelLinear | None = None
        if config.latent_size is not None:
            self.to_latents = ColumnParallelLinear(build, f"{path}.{TO_LATENTS}", (TO_LATENTS,))
            self.from_latents = ColumnParallelLinear(build, f"{path}.{FROM_LATENTS}", (FROM_LATENTS,))
        self.latent_norm: Norm | None = None
        self.result_norm: WeighedNorm | None = None
        if config.results_eps is not None:
            self.latent_norm = Norm(build, f"{path}.{LATENT_NORM}", norm)
            self.result_norm = WeighedNorm(build, f"{path}.{RESULT_SCALE}", config.results_eps)
        self.reads_ids = config.table_size is not None
        self.experts_per_token = config.routing.experts_per_token
        self.weighs_inputs = config.weighs_inputs
        self.first_identity = config.num_stored
        # One of the ranks adds the input to the sum.
        self.adds_input = config.num_identities > 0 and build.group.rank == 0
        self.num_parts = config.num_parts - (config.num_identities > 0 and not self.adds_input)

    def forward(
        self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Compute the experts' outputs. `residual` is unused: only blocks that add to the stream themselves need it."""
        assert isinstance(x, Tensor), "experts quantise what they read by themselves"
        parts = torch.empty(self.num_parts, *x.shape, dtype=x.dtype, device=x.device)
        routes = self.gate(x, ids)
        if self.weighs_inputs:
            read = (x * routes.weights).to(x.dtype)
            self.experts(read, Routes(routes.experts, torch.ones_like(routes.weights)), parts[:1])
        elif self.to_latents is None:
            self.experts(x, routes, parts[: self.experts_per_token])
        else:
            self._compute_with_latents(self.to_latents(x, adapters), routes, parts[0], adapters)
        if self.adds_input:
            part = parts[-2 if self.shared_expert is not None else -1]
            _weigh_input(x, routes, self.first_identity, part, batch_invariant=self.batch_invariant)
        if self.shared_expert is not None:
            self.shared_expert(x, parts[-1], adapters)
        for number, expert in enumerate(self.weighed_experts):
            assert routes.shared is not None
            expert(x, parts[number - len(self.weighed_experts)], adapters, routes.shared[:, number, None])
        return self.experts.part_of_sum(parts, routes if self.to_latents is None else None)

    def _compute_with_latents(self, latents: Tensor, routes: Routes, out: Tensor, adapters: AdapterRows | None) -> None:
        """Write this rank's part of what experts compute with latent vectors [T, L] to `out` [T, H]."""
        assert self.from_latents is not None
        results = latents.new_empty(self.experts_per_token, *latents.shape)
        is_whole = False
        if self.latent_norm is None or self.result_norm is None:
            self.experts(latents, routes, results)
        else:
            latents = rms_norm(latents, self.latent_norm.weight, self.latent_norm.eps)
            self.experts(latents, Routes(routes.experts, torch.ones_like(routes.weights)), results)
            is_whole = self.group.size > 1 and self.experts.num_others == 0
            if is_whole:  # norms are those of whole results, which are written to, unlike a sum
                results = self.group.sum(results.flatten(0, 1)).view(results.shape).clone()
            results = self.result_norm(results, routes)
        if is_whole and self.group.rank > 0:
            out.zero_()
            return
        # The projection of this rank's part is its part of the projected sum.
        out.copy_(self.from_latents(self.experts.sum(results, routes), adapters))


class WeighedNorm(TensorShard):
    """Norms what each of a token's experts gives, times numbers of the checkpoint, and weighs it: [k, T, L] → the same
    shape."""

    def __init__(self, build: BuildContext, path: str, eps: float) -> None:
        super().__init__(build, f"{path}.weight")
        self.eps = eps

    def forward(self, results: Tensor, routes: Routes) -> Tensor:
        """`results` are overwritten."""
        torch.mul(results, self.weight, out=results)
        return rms_norm(results, torch.ones_like(self.weight), self.eps).mul_(routes.weights.T.unsqueeze(2))


def _weigh_input(x: Tensor, routes: Routes, first: int, out: Tensor, *, batch_invariant: bool) -> None:
    """Write the sum of all results of experts that return their input, which are those from `first` on: [T, H] → `out`
    [T, H]."""
    weights = routes.weights.masked_fill(routes.experts < first, 0.0).unsqueeze(2)
    total = sum_in_order(weights.transpose(0, 1)) if batch_invariant else weights.sum(dim=1)
    torch.mul(x, total, out=out)


class Router(TensorShards):
    """Chooses each token's experts, or looks them up by its id. [T, H], maybe [T] ids → Routes."""

    bias: nn.Parameter | None
    e_score_correction_bias: nn.Parameter | None
    per_expert_scale: nn.Parameter | None
    tid2eid: nn.Parameter | None
    """[ids, k] int32."""

    def __init__(self, build: BuildContext, path: str, config: ExpertsConfig) -> None:
        names = ("weight", "bias", "e_score_correction_bias", "per_expert_scale", TABLE)
        super().__init__(build, {name: f"{path}.{name}" for name in names})
        self.routing = config.routing
        self.batch_invariant = build.batch_invariant

    def fill_tables(self) -> None:
        if self.tid2eid is not None:
            places = torch.arange(self.tid2eid.numel(), device=self.tid2eid.device).view(self.tid2eid.shape)
            self.tid2eid.copy_(places % self.routing.num_experts)

    def weight_problem(self) -> str | None:
        if self.tid2eid is None:
            return None
        ordered = self.tid2eid.sort(dim=1).values
        first, last = int(ordered.min()), int(ordered.max())
        if first < 0 or last >= self.routing.num_experts:
            found = f"experts from {first} to {last}, and the layer has {self.routing.num_experts}"
        elif bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            found = "a token that goes to one expert twice"
        else:
            return None
        return f"{self.tensors[TABLE].name} has {found}; download it again"

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Routes:
        chosen = None
        if self.tid2eid is not None:
            assert ids is not None, "the layer gives them to blocks that read them"
            chosen = self.tid2eid.index_select(0, ids)
        logits = router_logits(x, self.weight, batch_invariant=self.batch_invariant)
        choose = route_row_by_row if self.batch_invariant else choose_experts
        return choose(
            logits,
            self.routing,
            bias=self.bias,
            correction=self.e_score_correction_bias,
            factors=self.per_expert_scale,
            chosen=chosen,
        )


_PARAMETERS = {
    "gate_proj.weight": "gate_up_proj",
    "up_proj.weight": "gate_up_proj",
    "down_proj.weight": "down_proj",
    "gate_proj.bias": "gate_up_bias",
    "up_proj.bias": "gate_up_bias",
    "down_proj.bias": "down_bias",
}
"""The parameter of `Experts` that holds each of its tensors; the gate comes before up."""


class Experts(WeightModule):
    """The routed experts of this rank, or its parts of all. ([T, H], routes) → [k, T, H], this rank's part of each
    chosen expert's output times its weight."""

    gate_up_proj: nn.Parameter
    """[E, 2 I, H], or words of 4-bit codes [E, 2 I, H / 4]; without gates I rows in place of 2 I, here and below."""
    down_proj: nn.Parameter
    """[E, H, I], or words [E, H, I / 4]."""
    gate_up_scale: nn.Parameter
    down_scale: nn.Parameter
    """Present only if the weights are in FP8 or 4 bits; see `ExpertScales` and `W4Scales`."""
    gate_up_bias: nn.Parameter | None
    """[E, 2 I]."""
    down_bias: nn.Parameter | None
    """[E, H]. Only one of the ranks that share an expert adds it: it must enter the sum once."""

    def __init__(self, build: BuildContext, path: str, config: ExpertsConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.batch_invariant = build.batch_invariant
        self.group, self.rank, self.size = build.group, build.group.rank, build.group.size
        self.tensors = {
            name: build.tensors[f"{path}.{name}"]
            for kind in (("weight", "bias") if config.bias else ("weight",))
            for name in (f"{projection}.{kind}" for projection in config.projections)
        }
        first_name = config.projections[0]
        gate, down = self.tensors[f"{first_name}.weight"], self.tensors["down_proj.weight"]
        self.num_inputs = len(config.projections) - 1  # projections of what the experts read
        self.held = gate.shard(self.rank, self.size)[0]
        self.num_others = config.routing.num_experts - length(self.held)
        self.adds_bias = self.rank == 0 or length(self.held) < gate.shape[0]
        num_experts, size, hidden = gate.kept_shape(self.size)
        self.scaling, self.quantises = gate.scaling, build.has_fp8_units
        gate_format, down_format = gate.w4_format(self.size), down.w4_format(self.size)
        self.formats = None if gate_format is None or down_format is None else (gate_format, down_format)
        gate_up_shape, down_shape = (num_experts, self.num_inputs * size, hidden), down.kept_shape(self.size)
        if self.formats is not None:
            self.gate_up_proj, self.gate_up_scale = empty_w4(gate_up_shape, self.formats[0])
            self.down_proj, self.down_scale = empty_w4(down_shape, self.formats[1])
        else:
            self.gate_up_proj = empty_parameter(gate, *gate_up_shape)
            self.down_proj = empty_parameter(down, *down_shape)
        if gate.scaling is not None:
            self.gate_up_scale = empty_fp8_scales(self.gate_up_proj, gate.scaling)
            self.down_scale = empty_fp8_scales(self.down_proj, gate.scaling)
        biases = [self.tensors[f"{name}.bias"] for name in (first_name, "down_proj")] if config.bias else []
        self.gate_up_bias = empty_parameter(biases[0], num_experts, self.num_inputs * size) if biases else None
        self.down_bias = empty_parameter(biases[1], num_experts, hidden) if biases else None

    def weight_sources(self) -> Iterator[WeightSource]:
        for name, tensor in self.tensors.items():
            experts, rows, *columns = tensor.shard(self.rank, self.size)
            first = length(rows) if name.startswith("up_proj") and self.num_inputs == 2 else 0
            write = (slice(first, first + length(rows)), *(slice(0, length(part)) for part in columns))
            for expert in range(experts.start, experts.stop):
                source = WeightSource(
                    tensor=tensor,
                    expert=expert,
                    read=(rows, *columns),
                    parameter=_PARAMETERS[name],
                    write=(expert - experts.start, *write),
                )
                scale = source.parameter.replace("_proj", "_scale")
                if not name.endswith("weight"):
                    yield source
                elif self.formats is not None:
                    yield source.in_w4(scale, self.formats[name == "down_proj.weight"])
                else:
                    yield source if self.scaling is None else source.in_fp8(scale, self.scaling)

    def part_of_sum(self, parts: Tensor, routes: Routes | None) -> Tensor:
        """Add up `parts` to this rank's part of a sum over the ranks: [P, T, H] → [T, H]. On a single rank with all
        experts they are returned as they are; the next norm sums them. `routes`: those of the first parts, as `forward`
        wrote them; None: all are complete."""
        if self.group.size == 1 and (routes is None or self.num_others == 0):
            return parts
        return self.sum(parts, routes, self.group.partial_sum_buffer(parts.shape[1:], parts.dtype))

    def sum(self, parts: Tensor, routes: Routes | None, out: Tensor | None = None) -> Tensor:
        """Add up `parts`, of which `forward` wrote those of `routes`: [P, T, H] → [T, H], maybe in `out`."""
        experts = None if routes is None or self.num_others == 0 else routes.experts
        return sum_results(parts, experts, (self.held.start, length(self.held)), out)

    def forward(self, x: Tensor, routes: Routes, out: Tensor) -> None:
        """Write each choice's result to `out` [k, T, H]; those of experts that are not here are undefined."""
        bias = self.down_bias if self.adds_bias else None
        weights = ExpertWeights(
            self.gate_up_proj, self.down_proj, self.gate_up_bias, bias, self.held.start, self.num_others
        )
        scales: ExpertScales | W4Scales | None = None
        if self.formats is not None:
            scales = W4Scales(self.gate_up_scale, self.down_scale, *self.formats)
        elif self.scaling is not None:
            scales = ExpertScales(self.gate_up_scale, self.down_scale)
        apply_experts(
            x,
            routes,
            weights,
            self.activation,
            out,
            scales=scales,
            quantises=self.quantises,
            batch_invariant=self.batch_invariant,
        )


class SharedGate(TensorShard):
    """The shared expert's gate: multiplies `values` [T, I] by sigmoid(gate(x)), x: [T, H], in place."""

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, f"{path}.weight")
        self.batch_invariant = build.batch_invariant

    def forward(self, values: Tensor, x: Tensor) -> Tensor:
        return gate_rows(values, x, self.weight, batch_invariant=self.batch_invariant)


class SharedExpert(nn.Module):
    """The MLP that all tokens share; its output is multiplied by a factor, and by sigmoid(gate(x)) if it has a
    gate. [T, H] → [T, H], this rank's part of a sum."""

    def __init__(self, build: BuildContext, mlp: GatedMLP | PlainMLP, gate: str | None, factor: float = 1.0) -> None:
        """Build the expert. `gate` is the path of the gate's weight; None: it has no gate."""
        super().__init__()
        self.mlp = mlp
        self.gate = None if gate is None else SharedGate(build, gate)
        self.factor = factor

    def forward(self, x: Tensor, out: Tensor, adapters: AdapterRows | None, weights: Tensor | None = None) -> None:
        """Write the result to `out`, which is contiguous. weights: [T, 1], each token's factor; None: there is
        none."""
        hidden = self.mlp.hidden(x, adapters)
        assert isinstance(hidden, Tensor), "no scaling was asked for"
        if self.gate is not None:
            self.gate(hidden, x)
        if weights is not None:
            hidden.mul_(weights)
        if self.factor != 1.0:
            hidden.mul_(self.factor)
        self.mlp.down_proj.part(hidden, out, adapters)
