"""KeptStates: what layers with recurrent states keep of a step with drafts (`kernels/kept_inputs.py`), at fixed
addresses, and the states' move once it is known which tokens count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.kernels.advance_states import advance_states
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.state_rows import StateRows


class KeptStates:
    """The kept numbers of one step, which the next step with drafts overwrites."""

    def __init__(self, spec: KVCacheSpec, max_tokens: int, device: torch.device) -> None:
        """`max_tokens`: the most tokens of a step's rows with drafts."""
        self._of_group = {
            group: KeptInputs.empty(
                len(spec.group_layers[group]),
                max_tokens,
                state.recurrent_shape,
                state.conv_shape[1],
                state.key_size,
                spec.dtype,
                device,
            )
            for group in spec.state_groups
            if (state := spec.group_states[group]) is not None
        }
        self._has_unit_keys = {
            group: state.has_unit_keys for group, state in enumerate(spec.group_states) if state is not None
        }
        self._of_layer = {
            layer: kept.layer(place)
            for group, kept in self._of_group.items()
            for place, layer in enumerate(spec.group_layers[group])
        }

    def layer(self, index: int) -> KeptInputs:
        """Return the numbers of one layer, counted from the rank's first."""
        return self._of_layer[index]

    def advance(self, kv_cache: KVCache, rows_of: Callable[[int], StateRows], counts: Tensor) -> None:
        """Bring the states of a step's rows with drafts behind the tokens that count: the first `counts` [R] int32 of
        each row's. `rows_of` returns the rows by KV group. Call it once for each step that has such rows."""
        for group, kept in self._of_group.items():
            states = kv_cache.group_states(group)
            advance_states(kept, *states, rows_of(group), counts, has_unit_keys=self._has_unit_keys[group])
