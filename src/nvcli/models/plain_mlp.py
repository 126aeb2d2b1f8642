"""PlainMLP: an MLP without a gate."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.invariant_linear import row_by_row
from nvcli.kernels.lora_types import AdapterRows
from nvcli.kernels.plain_activation import activate
from nvcli.kernels.xielu import XIELU
from nvcli.models.layers import FeedForward
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.mlp import PlainMLPConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear, TensorShards


class PlainMLP(FeedForward):
    """down(activation(up(x))), sharded over the ranks by intermediate size. [T, H] → `delta` for `residual` [T, H],
    which is None if nothing may be added to the stream yet."""

    quantised_input = "up_proj"

    def __init__(self, build: BuildContext, path: str, config: PlainMLPConfig, norm: NormConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.batch_invariant = build.batch_invariant
        self.up_proj = ColumnParallelLinear(build, f"{path}.up_proj", ("up_proj",))
        self.down_proj = RowParallelLinear(build, f"{path}.down_proj")
        self.numbers = ActivationNumbers(build, f"{path}.act_fn") if config.activation == "xielu" else None

    def forward(
        self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None, ids: Tensor | None = None
    ) -> Tensor | None:
        delta: Tensor | None = self.down_proj(self.hidden(x, adapters), residual, adapters)
        return delta

    def hidden(self, x: Activations, adapters: AdapterRows | None) -> Tensor:
        """Compute activation(up(x)): [T, H] → [T, I]."""
        hidden: Tensor = self.up_proj(x, adapters)
        function = partial(
            activate, activation=self.activation, numbers=None if self.numbers is None else self.numbers()
        )
        return row_by_row(function, hidden) if self.batch_invariant else function(hidden)


class ActivationNumbers(TensorShards):
    """The numbers of a layer's xIELU."""

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: nn.Parameter
    eps: nn.Parameter

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, {name: f"{path}.{name}" for name in XIELU._fields})

    def forward(self) -> XIELU:
        return XIELU(self.alpha_p, self.alpha_n, self.beta, self.eps)
