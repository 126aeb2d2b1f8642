"""KeptStates: what layers with recurrent states keep of steps with drafts (`kernels/kept_inputs.py`), at fixed
addresses, and the requests whose states do not include it yet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.kernels.advance_states import advance_states, end_drafts
from nvcli.kernels.kept_inputs import KeptInputs, PendingTokens
from nvcli.kernels.state_rows import StateRows


class KeptStates:
    """The kept numbers of the last step with drafts, and room for those of the next one."""

    def __init__(self, spec: KVCacheSpec, max_tokens: int, max_rows: int, device: torch.device) -> None:
        """`max_tokens`, `max_rows`: the most tokens of a step's rows with drafts, and the most such rows."""
        self._of_group = {
            group: KeptInputs.empty(
                len(spec.group_layers[group]),
                max_tokens,
                state.recurrent_shape,
                state.conv_shape[1],
                state.key_size,
                spec.dtype,
                device,
                num_decays=state.num_decays,
                has_rates=state.has_rates,
            )
            for group in spec.state_groups
            if (state := spec.group_states[group]) is not None
        }
        self._has_unit_keys = {
            group: state.has_unit_keys for group, state in enumerate(spec.group_states) if state is not None
        }
        self._of_layer = {
            (layer, group): kept.layer(place)
            for group, kept in self._of_group.items()
            for place, layer in enumerate(spec.group_layers[group])
        }
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._pending = {group: PendingTokens.empty(max_rows, self._turn) for group in self._of_group}

    def layer(self, index: int, group: int) -> KeptInputs:
        """Return the numbers of one layer, counted from the rank's first, in a KV group."""
        return self._of_layer[index, group]

    def pending(self, group: int, earlier: Tensor) -> PendingTokens:
        """Return what the states of a KV group do not have yet. earlier: [R] int32, see `begin`."""
        return self._pending[group]._replace(earlier=earlier)

    def keep(self, kv_cache: KVCache, rows_of: Callable[[int], StateRows], counts: Tensor) -> None:
        """Make the step that has just run the last one. Of each of its rows with drafts, the first `counts` [R] int32
        tokens count. `rows_of` returns the rows by KV group."""
        for group, kept in self._of_group.items():
            end_drafts(kept, kv_cache.group_states(group)[0], rows_of(group), counts)
        self._turn.bitwise_xor_(1)

    def advance(self, kv_cache: KVCache, chosen: Tensor) -> None:
        """Add what is pending to the states of some rows of the last step, [n] int32, because no later step may do
        so."""
        for group, kept in self._of_group.items():
            pool, has_unit_keys = kv_cache.group_states(group)[1], self._has_unit_keys[group]
            advance_states(kept, pool, self._pending[group], chosen, has_unit_keys=has_unit_keys)
