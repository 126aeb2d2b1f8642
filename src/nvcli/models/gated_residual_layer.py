"""GatedResidualLayer: a decoder layer whose results are normed and added to the residual stream through gates
(`kernels/residual_gates.py`). Shapes: T tokens, H hidden."""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.kernels.residual_gate_settings import ResidualGates
from nvcli.kernels.residual_gates import add_through_gate
from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.layer_config import GATE_OF_MIXER, GATE_OF_MLP, SCALE_OF_MLP
from nvcli.models.parallel import BuildContext, TensorShards


class ResidualGate(TensorShards):
    """Sums the ranks' parts of a block's result, and adds the norm of the sum to the stream."""

    gate: nn.Parameter
    scale: nn.Parameter | None
    """Factors of the result before it is normed; None: there are none."""

    def __init__(self, build: BuildContext, gate: str, scale: str, settings: ResidualGates) -> None:
        super().__init__(build, {"gate": gate, "scale": scale})
        self.settings = settings

    def forward(self, part: Tensor | None, residual: Tensor) -> None:
        """Change `residual` [T, H] in place. `part` is this rank's part of the result, as in `layers.py`."""
        assert part is not None, "nothing was to be added to the stream yet"
        add_through_gate(self.group.sum(part), residual, self.gate, self.scale, self.settings)


class GatedResidualLayer(DecoderLayer):
    """One layer, with a norm before each of its two blocks and a gate after it."""

    def __init__(self, settings: ResidualGates, plan: LayerPlan) -> None:
        super().__init__(plan)
        own, path = plan.build.of_own_rows(), plan.path
        self.mixer_gate = ResidualGate(own, f"{path}.{GATE_OF_MIXER}", "", settings)
        self.mlp_gate = ResidualGate(own, f"{path}.{GATE_OF_MLP}", f"{path}.{SCALE_OF_MLP}.weight", settings)

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer, and add all to the residual stream. `state.delta` is nothing, or zeros from another
        stage."""
        residual, (angles, batch, rows, _, before) = state.residual, step
        assert self.before_attention is not None
        assert self.before_mlp is not None
        assert self.mlp is not None
        if before is not None:
            before.copy_(residual)
        mixed = self.mixer(self.before_attention(None, residual), angles, batch)
        adapters = batch.adapters_behind_attention(rows)
        if rows is not None:
            mixed, residual = mixed[rows], residual[rows]
            if len(rows) == 0:
                return LayerState(None, residual)
        self.mixer_gate(self.mixer.o_proj(mixed, None, adapters), residual)
        del mixed  # the MLP can reuse its memory
        x = self.before_mlp(None, residual)
        self.mlp_gate(self.mlp(x, None, adapters, self.ids_of(self.mlp, batch, rows)), residual)
        return LayerState(None, residual)
